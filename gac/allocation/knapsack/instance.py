"""Reduced instances: flat arrays, costs from 0, common divisors out, and sums that fit int64."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from gac.allocation.knapsack.groups import Group
from gac.core.arrays import Floats, Ints

VALUE_BITS = 52
COST_BITS = 62
FINEST = -1074
"""Every float is a whole number of ``2**-1074``."""

_LOW_BITS = 32

Mask = NDArray[np.bool_]


class OutOfReachError(Exception):
    """No choice is within some limit, even if it is the only one."""


@dataclass(frozen=True, eq=False)
class Ragged:
    """Items of all groups, group after group.

    Attributes:
        values: loss of each item, shape ``(items,)``: float64, or int64 once scaled.
        costs: cost of each item under each limit, shape ``(limits, items)``.
        starts: position of each group's first item, shape ``(groups,)``.
        origin: index of each item in its original group, shape ``(items,)``.
        slack: limit minus the zero of the costs, shape ``(limits,)``.
    """

    values: Floats | Ints
    costs: Ints
    starts: Ints
    origin: Ints
    slack: Ints

    def __len__(self) -> int:
        return len(self.values)

    @cached_property
    def sizes(self) -> Ints:
        return np.diff(self.starts, append=len(self.values))

    @cached_property
    def group(self) -> Ints:
        return np.repeat(np.arange(len(self.starts)), self.sizes)

    @cached_property
    def cheapest(self) -> Ints:
        """Lowest cost in each group, shape ``(limits, groups)``."""
        return np.minimum.reduceat(self.costs, self.starts, axis=1)

    def keep(self, mask: Mask) -> "Ragged":
        if mask.all():
            return self
        sizes = np.add.reduceat(mask, self.starts, dtype=np.int64)
        assert sizes.all(), "a group lost its last item"
        starts = np.cumsum(sizes) - sizes
        return replace(
            self, values=self.values[mask], costs=self.costs[:, mask], starts=starts, origin=self.origin[mask]
        )

    def used(self, choice: Ints) -> Ints:
        used: Ints = self.costs[:, choice].sum(axis=1)
        return used

    def value(self, choice: Ints) -> int:
        return int(self.values[choice].sum())

    def first_minimum(self, values: Floats | Ints) -> Ints:
        """Return the position of each group's smallest entry, the first of equal ones, shape ``(groups,)``."""
        lowest = np.minimum.reduceat(values, self.starts)
        positions = np.flatnonzero(values == lowest[self.group])
        _, first = np.unique(self.group[positions], return_index=True)
        minima: Ints = positions[first]
        return minima


@dataclass(frozen=True, eq=False)
class Reduced:
    """The instance that is solved: ``items`` with costs from 0 divided by ``divisors``, values from 0 in each group."""

    items: Ragged
    divisors: Ints

    def positions(self, choice: Sequence[int]) -> Ints:
        """Return the item positions of a choice (an original index a group) within the limits."""
        positions = np.flatnonzero(np.asarray(choice)[self.items.group] == self.items.origin)
        assert len(positions) == len(choice), "a choice within the limits was left out"
        return positions


def reduced_items(items: Ragged, limits: Sequence[int]) -> Reduced:
    """Subtract each group's lowest cost and smallest value, and divide each limit by the costs' gcd.

    Items that break a limit even with the cheapest items of all other groups are dropped. Under a limit that no choice
    breaks all costs become 0, so that the search does not distinguish choices by it. Sums of costs fit int64.

    Raises:
        OutOfReachError: a limit cannot be met even if it is the only one.
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
    largest = [largest_sum(row, items) for row in costs]
    for row, most in enumerate(largest):
        if most <= room[row] // int(divisors[row]):
            costs[row], largest[row] = 0, 0
    lowest = np.minimum.reduceat(items.values, items.starts)
    slack = np.array([min(r // d, most) for r, d, most in zip(room, divisors.tolist(), largest, strict=True)])
    return Reduced(replace(items, values=items.values - lowest[items.group], costs=costs, slack=slack), divisors)


def flatten(groups: Sequence[Group]) -> Ragged:
    sizes = np.array([len(group.values) for group in groups])
    starts = np.cumsum(sizes) - sizes
    values = np.concatenate([group.values for group in groups])
    costs = np.ascontiguousarray(np.concatenate([group.costs for group in groups]).T)
    origin = np.arange(len(values)) - np.repeat(starts, sizes)
    return Ragged(values, costs, starts, origin, np.zeros(len(costs), dtype=np.int64))


def largest_sum(costs: Floats | Ints, items: Ragged) -> int:
    largest: int = sum(np.maximum.reduceat(costs, items.starts).tolist())
    return largest


@dataclass(frozen=True, eq=False)
class Rows:
    """Items and limits such that no sum of costs exceeds int64.

    A limit whose sums might is split into two rows, with an extra group. Write a cost as ``high * B + low`` and the
    limit as ``h * B + l``, with B = ``2**32``. Item k of the extra group, 0 <= k <= groups, adds k to the high costs
    and takes ``k * B`` from the low ones. There is a k with ``sum(low) - k * B <= l`` and ``sum(high) + k <= h`` if
    and only if ``sum(cost) <= limit``: the sum of the two inequalities is that one; conversely k = ``h - sum(high)``,
    or the largest k where that is larger, will do, since ``sum(low)`` is less than B times the number of groups.

    ``shifts``: bits that a row's costs are shifted by: 0, or 32 for high costs. The low ones are in the row before.
    """

    items: Ragged
    limits: tuple[int, ...]
    shifts: tuple[int, ...]

    @property
    def deciding(self) -> list[int]:
        """The row that decides each original limit: its own, or that of its high costs."""
        return [row for row, after in enumerate((*self.shifts[1:], 0)) if not after]

    def extend(self, choice: Sequence[int]) -> tuple[int, ...]:
        """Append the items of the extra groups to a choice within the original limits."""
        positions = self.items.starts[: len(choice)] + np.asarray(choice)
        split = [row for row in reversed(range(len(self.shifts))) if self.shifts[row]]
        rest = [self.limits[row] - int(self.items.costs[row, positions].sum()) for row in split]
        return (*choice, *(min(most, len(choice) + extra) for extra, most in enumerate(rest)))


def rows_of(groups: Sequence[Group], limits: Sequence[int]) -> Rows:
    """Flatten the groups, and split limits whose sums may exceed int64."""
    items, most, shifts = flatten(groups), list(limits), [0] * len(limits)
    for row in reversed(range(len(limits))):
        if largest_sum(items.costs[row], items) >= 1 << COST_BITS:
            high, low = divmod(most[row], 1 << _LOW_BITS)
            most[row : row + 1] = low + (len(items.starts) << _LOW_BITS), high
            shifts[row : row + 1] = 0, _LOW_BITS
            items = _split_row(items, row)
    return Rows(items, tuple(most), tuple(shifts))


def _split_row(items: Ragged, row: int) -> Ragged:
    """Replace a row's costs by low and high ones, and add the carrying group; low costs are shifted to be >= 0."""
    groups = len(items.starts)
    carries = np.arange(groups + 1)
    costs = np.insert(items.costs, row, items.costs[row] & (1 << _LOW_BITS) - 1, axis=0)
    costs[row + 1] >>= _LOW_BITS
    added = np.zeros((len(costs), groups + 1), dtype=np.int64)
    added[row : row + 2] = (groups - carries) << _LOW_BITS, carries
    return Ragged(
        values=np.concatenate([items.values, np.zeros(groups + 1)]),
        costs=np.hstack([costs, added]),
        starts=np.append(items.starts, len(items)),
        origin=np.append(items.origin, carries),
        slack=np.zeros(len(costs), dtype=np.int64),
    )


def bits_of(groups: int) -> int:
    return min(VALUE_BITS, COST_BITS - groups.bit_length())


def to_grains(values: Floats | Ints, grain: float) -> Ints:
    """Round each value to the nearest whole number of grains (a power of two); larger ones become ``2**62``."""
    exponent = int(np.frexp(grain)[1]) - 1
    if exponent + COST_BITS <= 1023:
        values = np.minimum(values, np.ldexp(1.0, COST_BITS + exponent))
    return np.rint(np.ldexp(values, -exponent)).astype(np.int64)
