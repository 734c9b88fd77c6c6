"""What the groups to come are bound to add to a partial choice, by what it leaves of the limits."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gac.core.arrays import Floats, Ints

_BITS, _MEMORY_BITS, _WORK_BITS = 14, 22, 24
_DOWN = 1 - 2.0**-50
_LARGEST = 2.0**61


@dataclass(frozen=True, eq=False)
class Outlook:
    """The group relaxation (Gomory 1965): all that is asked is in which cell what is left lies, modulo so many cells.

    A choice has a value of at least the bound, plus its reduced values, plus for each limit its multiplier times what
    it leaves; and it leaves the least of its cell or more. The least sum of all that over the choices of some groups
    follows, for each cell, from that over all of them but the first. A model's weights have costs in wide steps, or
    have to meet several limits at once: nearly all partial choices are bound to lose more than there is room for.

    Attributes:
        limits: which are looked at.
        free: what the default choice leaves of each of them.
        widths: how much of each of them a cell spans.
        strides: how far apart in the tables a limit's neighbouring cells are.
        least: what the groups add at least while so many of them are to come, by the cell of what is left.
    """

    limits: Ints
    free: Ints
    widths: Ints
    strides: Ints
    least: tuple[Ints, ...]

    def added(self, costs: Ints, coming: int) -> Ints:
        """What the last groups, ``coming`` of them, add at least to partial choices of these costs under each limit."""
        least = self.least[coming]
        left = self.free[:, None] - costs[self.limits]
        found: Ints = least[_at(left // self.widths[:, None], self.strides, len(least))]
        return found


def least_worth(unused: Floats | Ints, multiplier: float | Floats) -> Ints:
    """What it costs at least to leave so much of a limit unused, in whole numbers."""
    return np.asarray(np.minimum(unused * multiplier * _DOWN, _LARGEST).astype(np.int64))


def outlook(
    limits: Ints,
    costs: Ints,
    reduced: Ints,
    groups: Sequence[slice],
    free: Ints,
    multipliers: Floats,
    widths: Ints,
) -> Outlook:
    """The outlook on some limits.

    An item whose cost is no multiple of the width leads from a cell to one of two, and the better one counts.

    Args:
        limits: which those are; what follows has a row or an entry for each.
        costs: of each item, beside its group's default choice.
        reduced: reduced value of each item; those of a choice sum to less than ``2**62``.
        groups: the items of each, in the order in which they are to come.
        widths: of a cell, multiples of the greatest common divisor of all costs.
    """
    bits = max(0, min(_BITS, _MEMORY_BITS - len(groups).bit_length(), _WORK_BITS - len(reduced).bit_length()))
    across = int(2.0 ** (bits / len(free)))
    strides = across ** np.arange(len(free))
    rests = free % np.maximum(np.gcd.reduce(costs, axis=1), 1)
    found = [_unused(rests, widths, multipliers, across)]
    size = len(found[0])
    moves, between = _at(costs // widths[:, None], strides, size).tolist(), costs % widths[:, None] != 0
    for group in reversed(groups):
        after, least = found[-1], found[-1].copy()
        for stride in strides[between[:, group].any(axis=1)].tolist():
            after = np.minimum(after, np.roll(after, stride))
        after = np.tile(after, 2)
        for move, more in zip(moves[group], reduced[group].tolist(), strict=True):
            np.minimum(least, after[size - move : 2 * size - move] + more, out=least)
        found.append(least)
    return Outlook(limits, free, widths, strides, tuple(found))


def _unused(rests: Ints, widths: Ints, multipliers: Floats, across: int) -> Ints:
    """What it costs at least, by its cell, to leave what is left: so many cells of each limit, or one limit's all."""
    least = np.zeros(1, dtype=np.int64)
    most = int(min(least_worth(across * widths.astype(np.float64), multipliers)))
    for rest, width, multiplier in zip(rests.tolist(), widths.tolist(), multipliers.tolist(), strict=True):
        worth = least_worth(np.arange(across) * float(width) + rest, multiplier)
        least = np.minimum(worth[:, None] + least, most).ravel()
    return least


def _at(cells: Ints, strides: Ints, size: int) -> Ints:
    """The place in the tables of cells counted under each limit."""
    place: Ints = strides @ (cells % size) % size
    return place
