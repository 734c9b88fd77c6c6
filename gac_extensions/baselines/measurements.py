"""Measurements that peers' rules need besides loss curves, by layer, kept beside the statistics.

ZS-SVD (arXiv 2602.02848): with D the mean gradient of a weight, W - u s v^T changes the loss by about -<D, u s v^T>
nats a token; in whitened coordinates its ``-sigma_i u_i^T (D R^-T) v_i``, for its whitened ``W R``. The sign is kept.
ASVD (arXiv 2312.05821, section 3.3): the loss of the model with one weight truncated, for every weight and fraction.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby

import numpy as np
import torch
from torch import Tensor, nn

from gac.core.arrays import Floats
from gac.core.linalg import check_measured
from gac.core.progress import progress_bar
from gac.forms.low_rank.torch import every_rank
from gac.measurement.calibration import CalibrationRun
from gac.measurement.curves import fit_layers
from gac.measurement.runs import window_loss
from gac.measurement.weight_measurements import WeightMeasurement
from gac.models.examples import TokenWindows, predicted_tokens
from gac.models.linears import linear_at
from gac.models.modules import frozen
from gac.models.sites import Site, Weight

CHUNK_BYTES = 12 * 2**30
"""Most bytes of float32 sums of gradients in one pass over the windows; those of a window come on top."""

KEPT_FRACTIONS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""The kept fractions of a weight's parameters that are tried, as in ASVD's code."""

WINDOWS = 4  # calibration windows, from the first on, that the loss of a truncated model is measured on

logger = logging.getLogger("gac")

Layers = Iterator[tuple[int, dict[str, Floats]]]  # yields ``(layer, {weight name: numbers})``


class LossChanges(WeightMeasurement):
    """Changes of the loss (``component_changes``), shape ``(full,)``, for the components of the layers' factors.

    Takes one more backward pass over the windows for each chunk of layers whose gradients fit in ``CHUNK_BYTES``.
    """

    name = "zero-sum"

    def stream(self, run: CalibrationRun, sites: Sequence[Site]) -> Layers:
        layers = [list(group) for _, group in groupby(sites, key=lambda site: site.layer)]
        largest = max((4 * sum(site.params for site in layer) for layer in layers), default=1)
        count = max(1, CHUNK_BYTES // largest)
        for start in range(0, len(layers), count):
            chunk = [site for layer in layers[start : start + count] for site in layer]
            weights = [weight for site in chunk for weight in site.weights]
            gradients = mean_gradients(run.model, weights, run.windows, run.progress)
            for layer, fit in fit_layers(run, chunk).items():
                members = [weight for site in chunk if site.layer == layer for weight in site.weights]
                factors = {weight.name: every_rank(fit.artifacts, weight) for weight in members}
                yield layer, {name: component_changes(*pair, gradients[name]) for name, pair in factors.items()}
            del gradients  # before the next chunk's are summed


class TruncationLosses(WeightMeasurement):
    """Losses of shape ``(fractions, 2)`` with one weight truncated; logs first how many runs of the model it takes.

    A row has the rank, ``int(out in kept / (out + in))`` and at least 1, and the mean loss in nats a token of the model
    in which that weight alone has it.
    """

    name = "sensitivity"

    def stream(self, run: CalibrationRun, sites: Sequence[Site]) -> Layers:
        count = sum(len(site.weights) for site in sites) * len(KEPT_FRACTIONS)
        if not count:
            return
        model, ids = run.model, run.windows[:WINDOWS]
        logger.info("truncating weights takes %d runs of the model over %d windows of %d tokens", count, *ids.shape)
        with progress_bar("truncating", "run", count, shown=run.progress) as bar:
            for layer, fit in fit_layers(run, sites).items():
                arrays = {}
                for weight in (weight for site in sites if site.layer == layer for weight in site.weights):
                    second, first = every_rank(fit.artifacts, weight)
                    losses = []
                    for fraction in KEPT_FRACTIONS:
                        rank = max(1, int(weight.params * fraction / (weight.out_features + weight.in_features)))
                        with _replaced(linear_at(model, weight.name).weight, second[:, :rank] @ first[:rank]):
                            name = f"a calibration window with {weight.name} at rank {rank}"
                            with frozen(model), torch.no_grad():
                                total = sum(float(window_loss(model, window, name)) for window in ids)
                            losses.append((rank, total / predicted_tokens(ids)))
                        bar.update()
                    arrays[weight.name] = np.array(losses, dtype=np.float64)
                yield layer, arrays


def component_changes(second: Tensor, first: Tensor, gradient: Tensor) -> Floats:
    """Predicted change of the loss by dropping each component, nats a token, the largest singular value first.

    Args:
        second: shape ``(out, full)``; component i is ``second[:, i]`` times ``first[i]``.
        first: shape ``(full, in)``.
        gradient: the mean gradient of the weight, shape ``(out, in)``.
    """
    changes: Floats = -((second.double().T @ gradient.double()) * first.double()).sum(1).cpu().numpy()
    return changes


def mean_gradients(
    model: nn.Module, weights: Sequence[Weight], windows: TokenWindows, progress: bool = True
) -> dict[str, Tensor]:
    """The gradient of the loss, nats a token, at each weight, float32 ``(out, in)``; a ModelError if not finite."""
    parameters = {weight.name: model.get_parameter(f"{weight.name}.weight") for weight in weights}
    sums = {name: torch.zeros_like(parameter, dtype=torch.float32) for name, parameter in parameters.items()}
    with frozen(model):
        try:
            for parameter in parameters.values():
                parameter.requires_grad_(True)
            for window in progress_bar("mean gradients", "window", steps=windows, shown=progress):
                gradients = torch.autograd.grad(window_loss(model, window), list(parameters.values()))
                for total, gradient in zip(sums.values(), gradients, strict=True):
                    total.add_(gradient)
        finally:
            for parameter in parameters.values():
                parameter.requires_grad_(False)
    predicted = predicted_tokens(windows)
    for name, total in sums.items():
        check_measured(total.div_(predicted), f"the gradient of {name} is not finite", "finite gradients")
    transposed = {name: linear_at(model, name) is not model.get_submodule(name) for name in sums}
    return {name: total.T if transposed[name] else total for name, total in sums.items()}


@contextmanager
def _replaced(parameter: Tensor, value: Tensor) -> Iterator[None]:
    with torch.no_grad():
        original = parameter.clone()
        try:
            parameter.copy_(value)
            yield
        finally:
            parameter.copy_(original)
