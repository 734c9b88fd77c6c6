"""Arguments of ``knapsack``, checked, and the instance that is solved: costs from 0 whose sums fit int64."""

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gac.core.arguments import is_number, is_whole
from gac.core.arrays import Floats, Ints
from gac.core.errors import GacError
from gac.plan.plan import Certificate

VALUE_BITS = 52
COST_BITS = 62
FINEST = -1074
"""Every float is a whole number of ``2**-1074``."""

_LOW_BITS = 32

Mask = NDArray[np.bool_]


@dataclass(frozen=True, eq=False, init=False)
class Group:
    """Items of which exactly one is chosen.

    Attributes:
        name: the group's name in errors.
        values: loss of each item (minimised), float64, shape ``(items,)``; anything NumPy can convert is accepted.
        costs: cost of each item under each limit, int64, shape ``(items, limits)``.

    Raises:
        GacError: a name that is no string; no item; a value that is negative, NaN or infinite; a cost that is negative
            or no integer; shapes that do not fit. The group's name is in the message.
    """

    name: str
    values: Floats
    costs: Ints

    def __init__(
        self, name: str, values: Floats | Sequence[float], costs: Ints | Sequence[Sequence[int]] | Sequence[Ints]
    ) -> None:
        _check(isinstance(name, str), f"a group named {name!r}", "a string", "Give every group a name.")
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "values", _values(f"group {name!r} has", values))
        object.__setattr__(self, "costs", _costs(f"group {name!r} has", costs, len(self.values)))


@dataclass(frozen=True)
class Solution:
    """A choice (an item a group), its cost under each limit, and its proof.

    Attributes:
        unit: the certificate holds within half of this power of two, see ``knapsack``.
        grain: the smaller power of two that losses were counted in.
    """

    choice: tuple[int, ...]
    used: tuple[int, ...]
    certificate: Certificate
    unit: float
    grain: float


def _check(holds: Any, stated: str, expected: str, remedy: str) -> None:
    if not holds:
        raise GacError(stated, expected, remedy)


def _array(problem: str, raw: Any) -> Any:
    try:
        return np.asarray(raw)
    except ValueError:
        expected, remedy = "one entry an item, all of one length", "Give every item a value, and a cost a limit."
        raise GacError(f"{problem} that make no array: their lengths differ", expected, remedy) from None


def _values(group: str, raw: Any) -> Floats:
    values = _array(f"{group} values", raw)
    stated = f"{group} values of shape {values.shape} and type {values.dtype}"
    numbers = values.size and values.ndim == 1 and values.dtype.kind in "iuf"
    _check(numbers, stated, "one number an item, and one item at least", "Give a one-dimensional array of losses.")
    values = np.ascontiguousarray(values, dtype=np.float64)
    for item in np.flatnonzero(~((values >= 0) & np.isfinite(values)))[:1]:
        remedy = "Remove the item, or shift the group's losses so that the smallest is 0."
        raise GacError(f"{group} value {values[item]} at item {item}", "finite losses, 0 or more", remedy)
    return values


def _costs(group: str, raw: Any, items: int) -> Ints:
    costs = _array(f"{group} costs", raw)
    stated = f"{group} costs of shape {costs.shape} for {items} items"
    rows = costs.ndim == 2 and len(costs) == items
    _check(rows, stated, f"shape ({items}, limits)", "Give one row an item and one column a limit.")
    integers = costs.dtype.kind == "i" or (costs.dtype.kind == "u" and (costs <= np.iinfo(np.int64).max).all())
    remedy = "Round the costs up to whole units (parameters, ns, bytes) first."
    _check(integers, f"{group} costs of type {costs.dtype}", "integers that fit int64", remedy)
    costs = np.ascontiguousarray(costs, dtype=np.int64)
    for item, limit in np.argwhere(costs < 0)[:1].tolist():
        remedy = "Correct the cost; an unknown cost cannot be limited."
        raise GacError(f"{group} cost {costs[item, limit]} at item {item}, limit {limit}", "costs of 0 or more", remedy)
    return costs


def parse_instance(
    groups: Iterable[Group],
    limits: Iterable[int],
    names: Iterable[str] | None,
    work_limit: float,
    start: Sequence[int] | None,
) -> tuple[tuple[Group, ...], tuple[int, ...], tuple[str, ...]]:
    """Check the arguments of ``knapsack``; return groups, limits as Python integers, and a name for each limit."""
    groups, bounds = _as_tuple("groups", groups), _as_tuple("limits", limits)
    several = (names,) if isinstance(names, str) else names
    labels = () if several is None else _as_tuple("names", several)
    for group in groups:
        stated = f"an entry of type {type(group).__name__} among the groups"
        _check(isinstance(group, Group), stated, "Group objects", "Pass a list of Group.")
    stated = f"{len(groups)} groups and {len(bounds)} limits"
    _check(groups and bounds, stated, "one of each at least", "Give a group and a limit.")
    for group in groups:
        stated = f"group {group.name!r} has costs under {group.costs.shape[1]} limits"
        expected, remedy = f"{len(bounds)}, as many as there are limits", "Give one column of costs a limit."
        _check(group.costs.shape[1] == len(bounds), stated, expected, remedy)
    remedy = "Round the limits down to whole units (parameters, ns, bytes)."
    _check(all(map(is_whole, bounds)), f"limits {list(bounds)}", "integers", remedy)
    stated, remedy = f"{len(labels)} names for {len(bounds)} limits", "Name every limit, or none."
    _check(len(labels) in (0, len(bounds)), stated, "one name a limit", remedy)
    positive = is_number(work_limit) and (0 <= work_limit <= sys.float_info.max or work_limit == math.inf)
    remedy = "Give the number of units of work that may be done."
    _check(positive, f"a work limit of {work_limit!r}", "a number of 0 or more", remedy)
    if start is not None:
        expected, remedy = f"an item of each of {len(groups)} groups, within {list(bounds)}", "Start without one."
        _check(len(start) == len(groups), f"a start of {len(start)} items", expected, remedy)
        used = costs_of(groups, start)
        within = all(cost <= limit for cost, limit in zip(used, bounds, strict=True))
        _check(within, f"a start that costs {list(used)}", expected, remedy)
    labels = labels or tuple(f"limit {number + 1}" for number in range(len(bounds)))
    return groups, tuple(map(int, bounds)), tuple(map(str, labels))


def costs_of(groups: Sequence[Group], choice: Sequence[int]) -> tuple[int, ...]:
    rows = [group.costs[item].tolist() for group, item in zip(groups, choice, strict=True)]
    return tuple(map(sum, zip(*rows, strict=True)))


def _as_tuple(name: str, raw: Iterable[Any]) -> tuple[Any, ...]:
    try:
        return tuple(raw)
    except TypeError:
        raise GacError(f"{name} of {raw!r}", "several, one after the other", "Pass a list.") from None


# --- flat arrays ------------------------------------------------------------------------------------------------------


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
        slack: each limit less the lowest costs of all groups, which costs count from, shape ``(limits,)``.
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

    def positions(self, choice: Sequence[int]) -> Ints:
        """Return the item positions of a choice: an original index a group."""
        positions = np.flatnonzero(np.asarray(choice)[self.group] == self.origin)
        assert len(positions) == len(choice), "a choice within the limits was left out"
        return positions

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


def reduced_items(items: Ragged, limits: Sequence[int]) -> tuple[Ragged, Ints]:
    """Return items with costs and values from 0 in each group, and the gcds that each limit's costs are divided by.

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
    return replace(items, values=items.values - lowest[items.group], costs=costs, slack=slack), divisors


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


def to_grains(values: Floats | Ints, grain: float) -> Ints:
    """Round each value to the nearest whole number of grains (a power of two); larger ones become ``2**62``."""
    exponent = int(np.frexp(grain)[1]) - 1
    if exponent + COST_BITS <= 1023:
        values = np.minimum(values, np.ldexp(1.0, COST_BITS + exponent))
    return np.rint(np.ldexp(values, -exponent)).astype(np.int64)
