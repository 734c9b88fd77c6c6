"""ASVD's sensitivity: the loss of the model with one weight truncated, for every weight and several kept fractions.

Sensitivity-based truncation rank searching (ASVD, arXiv 2312.05821, section 3.3). It is measured and not predicted, and
so takes as many runs of the model as there are weights and fractions.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from gac.core.arrays import Floats
from gac.core.progress import progress_bar
from gac.forms.low_rank.torch import every_rank
from gac.measurement.calibration import CalibrationRun
from gac.measurement.curves import stream_fits
from gac.measurement.losses import window_loss
from gac.measurement.weight_measurements import WeightMeasurement
from gac.models.linears import linear_at
from gac.models.modules import frozen
from gac.models.sites import Site

KEPT = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""The kept fractions of a weight's parameters that are tried, as in ASVD's code."""

WINDOWS = 4
"""How many calibration windows the loss is measured on, from the first on."""

logger = logging.getLogger("gac")


class TruncationLosses(WeightMeasurement):
    """Losses of the model with one weight truncated, see ``stream_truncation_losses``."""

    name = "sensitivity"

    def stream(self, run: CalibrationRun, sites: Sequence[Site]) -> Iterator[tuple[int, dict[str, Floats]]]:
        return stream_truncation_losses(run, sites)


def stream_truncation_losses(run: CalibrationRun, sites: Sequence[Site]) -> Iterator[tuple[int, dict[str, Floats]]]:
    """Yield ``(layer, {weight name: losses})``; says first how many runs of the model it takes.

    Losses have shape ``(fractions, 2)``: the rank, ``int(out in kept / (out + in))`` and at least 1, and the mean loss
    in nats a token of the model in which that one weight has it.

    Raises:
        ModelError: a statistic, or the loss with a weight truncated, is not finite.
    """
    count = sum(len(site.weights) for site in sites)
    if not count:
        return
    model, ids = run.model, run.windows[:WINDOWS]
    logger.info(
        "%d weights at %d kept fractions: %d runs of the model over %d windows of %d tokens",
        count,
        len(KEPT),
        count * len(KEPT),
        *ids.shape,
    )
    with progress_bar("truncating", "run", count * len(KEPT), shown=run.progress) as bar:
        for layer, fit in stream_fits(run, sites):
            found = {}
            for weight in (weight for site in sites if site.layer == layer for weight in site.weights):
                second, first = every_rank(fit.kept, weight)
                losses = []
                for kept in KEPT:
                    rank = max(1, int(weight.params * kept / (weight.out_features + weight.in_features)))
                    with _replaced(linear_at(model, weight.name).weight, second[:, :rank] @ first[:rank]):
                        what = f"a calibration window with {weight.name} at rank {rank}"
                        losses.append((rank, _loss(model, ids, what)))
                    bar.update()
                found[weight.name] = np.array(losses, dtype=np.float64)
            yield layer, found


@contextmanager
def _replaced(parameter: Tensor, value: Tensor) -> Iterator[None]:
    """Another value inside, the parameter's own again after."""
    with torch.no_grad():
        own = parameter.clone()
        try:
            parameter.copy_(value)
            yield
        finally:
            parameter.copy_(own)


def _loss(model: nn.Module, ids: Tensor, what: str) -> float:
    """Mean loss over the predicted tokens, nats; one window at a time."""
    with frozen(model), torch.no_grad():
        total = sum(float(window_loss(model, window, what)) for window in ids)
    return total / (ids.numel() - len(ids))
