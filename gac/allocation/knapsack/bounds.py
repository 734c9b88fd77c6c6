"""A bound that holds in exact integers, whatever the multipliers that floats suggested."""

from dataclasses import dataclass

import numpy as np

from gac.allocation.knapsack.ragged import Mask, Ragged
from gac.arrays import Floats, Ints

_DOWN = 1 - 2.0**-50
_UP = 1 + 2.0**-50
_LARGEST = 2.0**60


@dataclass(frozen=True, eq=False)
class Bound:
    """A Lagrangian lower bound, and what each item adds to it.

    A choice within the limits has a value of at least ``lower`` plus the sum of its items' ``reduced``, and for any
    limit l of at least ``lower + multipliers[l] * (slack[l] - used[l])``.

    Attributes:
        lower: no choice within the limits has a smaller value.
        reduced: 0 or more, and 0 for one item in each group, shape ``(items,)``.
        multipliers: value per unit of each limit, shape ``(limits,)``.
    """

    lower: int
    reduced: Ints
    multipliers: Floats

    def keep(self, mask: Mask) -> "Bound":
        return Bound(self.lower, self.reduced[mask], self.multipliers)


def lagrangian(items: Ragged, multipliers: Floats) -> Bound:
    """The bound of multipliers >= 0 (Lagrangian relaxation of every limit); ``items`` has integer values.

    For a choice within the limits, sum(value) >= sum(value + penalty) - sum(allowance) as long as no penalty
    exceeds multiplier * cost and no allowance falls short of multiplier * slack. Penalties are rounded down and
    allowances up, each with a margin (2**-50) wider than three float64 roundings can err (3 * 2**-53), so that the
    inequality is one between exact integers. It costs a few units of 2**52.
    """
    multipliers = np.minimum(multipliers, _LARGEST / len(multipliers) / np.maximum(items.slack, 1))
    total = items.values.astype(np.int64)
    allowance = 0
    for multiplier, cost, slack in zip(multipliers, items.costs, items.slack, strict=True):
        total += np.floor(multiplier * cost * _DOWN).astype(np.int64)
        allowance += int(np.ceil(multiplier * float(slack) * _UP))
    lowest = np.minimum.reduceat(total, items.starts)
    return Bound(int(lowest.sum()) - allowance, total - lowest[items.group], multipliers)
