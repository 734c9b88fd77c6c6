"""First-order changes of the loss: what dropping each singular component of a weight is predicted to change.

With D the mean gradient of a weight over the calibration tokens, W - u s v^T changes the loss by about -<D, u s v^T>,
nats a token. Components are those of the method's decomposition; in whitened coordinates this is ZS-SVD's
``-sigma_i u_i^T (D R^-T) v_i`` (arXiv 2602.02848), for its whitened ``W R``. The sign is kept, and it cancels in sums.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import groupby

import torch
from torch import Tensor, nn

from gac.core.arrays import Floats
from gac.core.linalg import check_measured
from gac.core.progress import progress_bar
from gac.forms.low_rank.torch import every_rank
from gac.measurement.calibration import CalibrationRun
from gac.measurement.curves import stream_fits
from gac.measurement.losses import window_loss
from gac.measurement.weight_measurements import WeightMeasurement
from gac.models.linears import linear_at
from gac.models.modules import frozen
from gac.models.sites import Site, Weight

CHUNK_BYTES = 12 * 2**30


class LossChanges(WeightMeasurement):
    """Predicted change of the loss by dropping each singular component, see ``stream_changes``."""

    name = "zero-sum"

    def stream(self, run: CalibrationRun, sites: Sequence[Site]) -> Iterator[tuple[int, dict[str, Floats]]]:
        return stream_changes(run, sites)


def stream_changes(run: CalibrationRun, sites: Sequence[Site]) -> Iterator[tuple[int, dict[str, Floats]]]:
    """Yield ``(layer, {weight name: changes})``; changes as in ``component_changes``.

    Components are those of the layers' factors, from the store where it has them. Takes one more backward pass over the
    windows for each chunk of layers whose gradients fit in ``CHUNK_BYTES``.

    Raises:
        ModelError: a gradient, the loss or a statistic is not finite.
    """
    for chunk in _chunks(sites):
        weights = [weight for site in chunk for weight in site.weights]
        gradients = mean_gradients(run.model, weights, run.windows, run.progress)
        for layer, fit in stream_fits(run, chunk):
            members = [weight for site in chunk if site.layer == layer for weight in site.weights]
            changes = {one.name: component_changes(*every_rank(fit.kept, one), gradients[one.name]) for one in members}
            yield layer, changes
        del gradients  # before the next chunk's are summed


def component_changes(second: Tensor, first: Tensor, gradient: Tensor) -> Floats:
    """What dropping each component is predicted to change, the largest singular value first.

    Nats a token, float64, shape ``(full,)``.

    Args:
        second: shape ``(out, full)``; component i is ``second[:, i]`` times ``first[i]``.
        first: shape ``(full, in)``.
        gradient: the mean gradient of the weight, shape ``(out, in)``.
    """
    changes: Floats = -((second.double().T @ gradient.double()) * first.double()).sum(1).cpu().numpy()
    return changes


def mean_gradients(
    model: nn.Module, weights: Sequence[Weight], windows: Tensor, progress: bool = True
) -> dict[str, Tensor]:
    """The gradient of the loss in nats a token at each weight, float32, shape ``(out, in)``, by name.

    Raises:
        ModelError: a gradient or the loss is not finite.
    """
    names = [weight.name for weight in weights]
    sums = {name: torch.zeros_like(model.get_parameter(f"{name}.weight"), dtype=torch.float32) for name in names}
    with _only_gradients_of(model, sums):
        for window in progress_bar("mean gradients", "window", steps=windows, shown=progress):
            window_loss(model, window).backward()  # type: ignore[no-untyped-call]
    predicted = windows.numel() - len(windows)
    for name, total in sums.items():
        check_measured(total.div_(predicted), f"the gradient of {name} is not finite", "finite gradients")
    turned = {name: linear_at(model, name) is not model.get_submodule(name) for name in names}
    return {name: total.T if turned[name] else total for name, total in sums.items()}


@contextmanager
def _only_gradients_of(model: nn.Module, sums: dict[str, Tensor]) -> Iterator[None]:
    """In eval mode, and every gradient of these weights is added to its sum and let go; as before on exit."""
    weights = {name: model.get_parameter(f"{name}.weight") for name in sums}
    own = {name: weight.grad for name, weight in weights.items()}
    with frozen(model), ExitStack() as hooks:
        try:
            for name, weight in weights.items():
                weight.requires_grad_(True).grad = None
                add = partial(_add, sums[name])
                hooks.enter_context(weight.register_post_accumulate_grad_hook(add))  # type: ignore[no-untyped-call]
            yield
        finally:
            for name, weight in weights.items():
                weight.requires_grad_(False).grad = own[name]


def _add(total: Tensor, weight: Tensor) -> None:
    assert weight.grad is not None
    total.add_(weight.grad)
    weight.grad = None


def _chunks(sites: Sequence[Site]) -> Iterator[list[Site]]:
    """Whole layers, as many as have float32 gradients of ``CHUNK_BYTES`` together; at least one."""
    chunk: list[Site] = []
    size = 0
    for _, group in groupby(sites, key=lambda site: site.layer):
        members = list(group)
        needed = 4 * sum(site.params for site in members)
        if chunk and size + needed > CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk += members
        size += needed
    if chunk:
        yield chunk
