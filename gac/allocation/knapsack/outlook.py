"""What the groups to come are bound to add to a partial choice, by what it leaves of one limit."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gac.arrays import Floats, Ints

_BITS, _MEMORY_BITS, _WORK_BITS = 14, 22, 24
_DOWN = 1 - 2.0**-50
_LARGEST = 2.0**61


@dataclass(frozen=True, eq=False)
class Outlook:
    """The group relaxation (Gomory 1965): all that is asked is what is left of one limit, modulo so many steps.

    A choice has a value of at least the bound, plus its reduced values, plus ``multiplier`` times what it leaves; and
    it leaves that remainder or more. The least sum of the two over the choices of some groups follows, for each
    remainder, from that over all of them but the first. A model's weights have costs in steps so wide that nearly all
    partial choices are bound to lose more than there is room for.

    Attributes:
        free: what the default choice leaves of the limit.
        step: a common divisor of all costs.
        least: what the groups from each place on add at least, by the steps that are left, modulo the tables' size.
    """

    free: int
    step: int
    least: tuple[Ints, ...]

    def added(self, costs: Ints, place: int) -> Ints:
        """What the groups from a place on add at least to partial choices of these costs."""
        least = self.least[place]
        found: Ints = least[(self.free - costs) // self.step % len(least)]
        return found


def least_worth(unused: Floats | Ints, multiplier: float) -> Ints:
    """What it costs at least to leave so much of a limit unused, in whole numbers."""
    return np.asarray(np.minimum(unused * multiplier * _DOWN, _LARGEST).astype(np.int64))


def outlook(costs: Ints, reduced: Ints, groups: Sequence[slice], free: int, multiplier: float) -> Outlook:
    """The outlook on a limit.

    Args:
        costs: of each item, beside its group's default choice.
        reduced: reduced value of each item; those of a choice sum to less than ``2**62``.
        groups: the items of each, in the order in which they are to come.
    """
    step = max(1, int(np.gcd.reduce(costs)))
    bits = min(_BITS, _MEMORY_BITS - len(groups).bit_length(), _WORK_BITS - len(costs).bit_length())
    size = 1 << max(0, bits)
    unused: Floats = np.arange(size, dtype=np.float64) * step + free % step
    found = [least_worth(unused, multiplier)]
    moves = (costs // step % size).tolist()
    for group in reversed(groups):
        after, least = np.tile(found[-1], 2), found[-1].copy()
        for move, more in zip(moves[group], reduced[group].tolist(), strict=True):
            np.minimum(least, after[size - move : 2 * size - move] + more, out=least)
        found.append(least)
    return Outlook(free, step, tuple(reversed(found)))
