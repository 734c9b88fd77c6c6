"""From groups to a reduced instance: flat arrays, sums that fit int64, costs from 0, common divisors out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gac.allocation.knapsack.groups import Group
from gac.allocation.knapsack.ragged import Ragged
from gac.core.arrays import Floats, Ints

VALUE_BITS = 52
COST_BITS = 62
FINEST = -1074
"""Every float is a whole number of ``2**-1074``."""

_LOW_BITS = 32


class OutOfReachError(Exception):
    """Some group has no item, or all groups together no choice, within a limit taken alone."""


@dataclass(frozen=True, eq=False)
class Reduced:
    """The instance that is solved: ``items`` with costs from 0 divided by ``divisors``, values from 0 in each group."""

    items: Ragged
    divisors: Ints

    def positions(self, choice: Sequence[int]) -> Ints:
        """Where the items of a choice within the limits stand in the instance."""
        found = np.flatnonzero(np.asarray(choice)[self.items.group] == self.items.origin)
        assert len(found) == len(choice), "a choice within the limits was left out"
        return found


def reduced_items(items: Ragged, limits: Sequence[int]) -> Reduced:
    """Subtract each group's cheapest cost and smallest value, and divide out each limit's gcd.

    Items that break a limit even beside the cheapest of every other group are left out. Under a limit that no choice
    breaks all costs are 0, so that no search keeps choices apart for it. Sums of costs fit int64.

    Raises:
        OutOfReachError: a limit cannot be met, even taken alone.
    """
    room = [limit - sum(row) for limit, row in zip(limits, items.cheapest.tolist(), strict=True)]
    if min(room) < 0:
        raise OutOfReachError
    slack = np.minimum(np.array(room, dtype=object), np.iinfo(np.int64).max).astype(np.int64)
    items = replace(items, costs=items.costs - items.cheapest[:, items.group], slack=slack)
    fits = (items.costs <= slack[:, None]).all(axis=0)
    if not np.logical_or.reduceat(fits, items.starts).all():
        raise OutOfReachError
    items = items.keep(fits)
    divisors = np.maximum(np.gcd.reduce(items.costs, axis=1), 1)
    costs = items.costs // divisors[:, None]
    spread = [spread_of(row, items) for row in costs]
    for row, most in enumerate(spread):
        if most <= room[row] // int(divisors[row]):
            costs[row], spread[row] = 0, 0
    lowest = np.minimum.reduceat(items.values, items.starts)
    return Reduced(
        replace(
            items,
            values=items.values - lowest[items.group],
            costs=costs,
            slack=np.array([min(r // d, most) for r, d, most in zip(room, divisors.tolist(), spread, strict=True)]),
        ),
        divisors,
    )


def flatten(groups: Sequence[Group]) -> Ragged:
    """The groups' items end to end, with a slack of 0 under every limit."""
    sizes = np.array([len(group.values) for group in groups])
    starts = np.cumsum(sizes) - sizes
    values = np.concatenate([group.values for group in groups])
    costs = np.ascontiguousarray(np.concatenate([group.costs for group in groups]).T)
    origin = np.arange(len(values)) - np.repeat(starts, sizes)
    return Ragged(values, costs, starts, origin, np.zeros(len(costs), dtype=np.int64))


def spread_of(costs: Floats | Ints, items: Ragged) -> int:
    """The largest sum that integer costs (from 0) can come to with one item a group."""
    spread: int = sum(np.maximum.reduceat(costs, items.starts).tolist())
    return spread


@dataclass(frozen=True, eq=False)
class Rows:
    """Items, and limits under which no sum of their costs exceeds int64.

    A limit whose sums might is two rows here, and there is one more group. A cost is ``high * B + low`` and a limit
    ``h * B + l``, with B = ``2**32``. Item k of the group, from 0 to the number of groups, adds k to the high costs
    and takes ``k * B`` from the low ones. There is a k with ``sum(low) - k * B <= l`` and ``sum(high) + k <= h`` if
    and only if ``sum(cost) <= limit``. Added up, the two say so. Conversely k = ``h - sum(high)`` will do, or the
    largest k where that is larger, since all low costs together are less than B times the number of groups.

    Attributes:
        items: costs under each row; the groups that were added come last.
        limits: of each row.
        shifts: how many bits a row's costs lack: 0, or 32 for high costs. The low ones are in the row before.
    """

    items: Ragged
    limits: tuple[int, ...]
    shifts: tuple[int, ...]

    @property
    def deciding(self) -> list[int]:
        """The row that decides each limit as given: its own, or that of its high costs."""
        return [row for row, after in enumerate((*self.shifts[1:], 0)) if not after]

    def all(self, choice: Sequence[int]) -> tuple[int, ...]:
        """A choice within the limits as given, and what the added groups have then."""
        taken = self.items.starts[: len(choice)] + np.asarray(choice)
        split = [row for row in reversed(range(len(self.shifts))) if self.shifts[row]]
        left = [self.limits[row] - int(self.items.costs[row, taken].sum()) for row in split]
        return (*choice, *(min(most, len(choice) + at) for at, most in enumerate(left)))


def rows_of(groups: Sequence[Group], limits: Sequence[int]) -> Rows:
    """The groups end to end, with wide limits in two rows."""
    items, most, shifts = flatten(groups), list(limits), [0] * len(limits)
    for row in reversed(range(len(limits))):
        if spread_of(items.costs[row], items) >= 1 << COST_BITS:
            high, low = divmod(most[row], 1 << _LOW_BITS)
            most[row : row + 1] = low + (len(items.starts) << _LOW_BITS), high
            shifts[row : row + 1] = 0, _LOW_BITS
            items = _in_two(items, row)
    return Rows(items, tuple(most), tuple(shifts))


def _in_two(items: Ragged, row: int) -> Ragged:
    """Low and high costs in place of a row's, and the group that carries; low costs are shifted to be 0 or more."""
    groups = len(items.starts)
    carried = np.arange(groups + 1)
    costs = np.insert(items.costs, row, items.costs[row] & (1 << _LOW_BITS) - 1, axis=0)
    costs[row + 1] >>= _LOW_BITS
    added = np.zeros((len(costs), groups + 1), dtype=np.int64)
    added[row : row + 2] = (groups - carried) << _LOW_BITS, carried
    return Ragged(
        values=np.concatenate([items.values, np.zeros(groups + 1)]),
        costs=np.hstack([costs, added]),
        starts=np.append(items.starts, len(items)),
        origin=np.append(items.origin, carried),
        slack=np.zeros(len(costs), dtype=np.int64),
    )


def bits_of(groups: int) -> int:
    """Bits of the largest value, so that a sum of as many as there are groups stays below ``2**62``."""
    return min(VALUE_BITS, COST_BITS - groups.bit_length())


def to_grains(values: Floats | Ints, grain: float) -> Ints:
    """Each value as the nearest whole number of grains (a power of two); ``2**62`` for all that is larger."""
    exponent = int(np.frexp(grain)[1]) - 1
    if exponent + COST_BITS <= 1023:
        values = np.minimum(values, np.ldexp(1.0, COST_BITS + exponent))
    return np.rint(np.ldexp(values, -exponent)).astype(np.int64)
