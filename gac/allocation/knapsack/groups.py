"""Groups of items, a choice with its proof, and the checks of what ``knapsack`` is called with."""

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gac.core.arguments import is_number, is_whole
from gac.core.arrays import Floats, Ints
from gac.core.errors import GacError
from gac.plan.plan import Certificate


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
    groups: Iterable[Group], limits: Iterable[int], names: Iterable[str] | None, work_limit: float
) -> tuple[tuple[Group, ...], tuple[int, ...], tuple[str, ...], float]:
    """Return the arguments of ``knapsack`` as tuples, limits as Python integers, and a name for each limit."""
    listed, bounds = _as_tuple("groups", groups), _as_tuple("limits", limits)
    several = (names,) if isinstance(names, str) else names
    labels = () if several is None else _as_tuple("names", several)
    wrong = next((type(group).__name__ for group in listed if not isinstance(group, Group)), None)
    _check(wrong is None, f"an entry of type {wrong} among the groups", "Group objects", "Pass a list of Group.")
    stated = f"{len(listed)} groups and {len(bounds)} limits"
    _check(listed and bounds, stated, "one of each at least", "Give a group and a limit.")
    for group in listed:
        stated = f"group {group.name!r} has costs under {group.costs.shape[1]} limits"
        expected, remedy = f"{len(bounds)}, as many as there are limits", "Give one column of costs a limit."
        _check(group.costs.shape[1] == len(bounds), stated, expected, remedy)
    remedy = "Round the limits down to whole units (parameters, ns, bytes)."
    _check(all(map(is_whole, bounds)), f"limits {list(bounds)}", "integers", remedy)
    stated, remedy = f"{len(labels)} names for {len(bounds)} limits", "Name every limit, or none."
    _check(len(labels) in (0, len(bounds)), stated, "one name a limit", remedy)
    remedy = "Give the number of units of work that may be done."
    positive = is_number(work_limit) and (0 <= work_limit <= sys.float_info.max or work_limit == math.inf)
    _check(positive, f"a work limit of {work_limit!r}", "a number of 0 or more", remedy)
    numbered = tuple(f"limit {number + 1}" for number in range(len(bounds)))
    return listed, tuple(map(int, bounds)), tuple(map(str, labels)) or numbered, float(work_limit)


def check_start(groups: tuple[Group, ...], limits: tuple[int, ...], start: Sequence[int]) -> None:
    expected, remedy = f"an item of each of {len(groups)} groups, within {list(limits)}", "Start without one."
    _check(len(start) == len(groups), f"a start of {len(start)} items", expected, remedy)
    used = costs_of(groups, start)
    within = all(cost <= limit for cost, limit in zip(used, limits, strict=True))
    _check(within, f"a start that costs {list(used)}", expected, remedy)


def costs_of(groups: Sequence[Group], choice: Sequence[int]) -> tuple[int, ...]:
    """Sum the costs of a choice under each limit, in Python's integers."""
    rows = [group.costs[item].tolist() for group, item in zip(groups, choice, strict=True)]
    return tuple(map(sum, zip(*rows, strict=True)))


def _as_tuple(name: str, raw: Iterable[Any]) -> tuple[Any, ...]:
    try:
        return tuple(raw)
    except TypeError:
        raise GacError(f"{name} of {raw!r}", "several, one after the other", "Pass a list.") from None
