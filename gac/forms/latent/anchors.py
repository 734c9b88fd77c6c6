"""Loss curves that pass through losses which were measured by running the model.

A metric prices small errors well on average, not for each weight and not at every rank. So each weight's curve is
anchored: at a few ranks the model is run with that weight alone changed, on text that its moments have not seen
(``gac.measurement.attended.held_out``). Between anchors the logarithm of the loss is linear in that of the price.
Beyond the last one the loss is in the same ratio to the price as there.

The anchors of all weights together would lose as much by their prices as the form's ``anchors`` say, so they lie where
plans choose. With three of them a model of n layers takes 6 n runs, each from the layer that changes on: of half the
layers on average. In 16 bits there is one more for each weight: what its pair of the full rank loses is rounding, which
is in every run and is subtracted. What all weights lose together is in ``gac.measurement.whole_model``.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from gac.core.arrays import Floats

LARGEST_RATIO = 8.0
"""Bound on the ratio of measured loss to price, either way."""


def anchor_ranks(price: Floats, prices: Sequence[float]) -> list[int]:
    """The ranks at which a curve is anchored, the largest first: of each price the largest that costs as much.

    Args:
        price: at ranks 0 to the full one; never rises.
    """
    dear = [int((price[1:] >= limit).sum()) for limit in prices]
    return sorted({rank for rank in dear if rank}, reverse=True)


def denoised(measured: Floats, price: Floats) -> Floats:
    """Measured losses by rising price, as a running maximum: a higher price never loses less."""
    ratios = np.clip(measured / price, 1 / LARGEST_RATIO, LARGEST_RATIO)
    losses: Floats = np.maximum.accumulate(ratios * price)
    return losses


def anchored(price: Floats, measured: Mapping[int, float]) -> Floats:
    """The curve through measured losses by rank; it never rises, as the price does not."""
    if not measured:
        return price
    ranks = sorted(measured, reverse=True)
    known = price[ranks]
    losses = np.log(denoised(np.array([measured[rank] for rank in ranks]), known))
    known = np.log(known)
    logs = np.log(np.maximum(price, np.finfo(float).tiny))
    inside = np.clip(logs, known[0], known[-1])
    return np.where(price > 0, np.exp(np.interp(inside, known, losses) + logs - inside), 0.0)
