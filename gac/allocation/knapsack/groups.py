"""Groups of items, a choice with its proof, and the checks of what ``knapsack`` is called with."""

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
        if not isinstance(name, str):
            raise GacError(f"a group named {name!r}", "a string", "Give every group a name.")
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "values", _values(name, values))
        object.__setattr__(self, "costs", _costs(name, costs, len(self.values)))


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


def _array(name: str, kind: str, raw: Any) -> NDArray[Any]:
    try:
        return np.asarray(raw)
    except ValueError:
        raise GacError(
            f"group {name!r} has {kind} that make no array: their lengths differ",
            "one entry an item, all of one length",
            "Give every item one value and one cost under each limit.",
        ) from None


def _values(name: str, raw: Any) -> Floats:
    values = _array(name, "values", raw)
    if values.size == 0 or values.ndim != 1 or values.dtype.kind not in "iuf":
        raise GacError(
            f"group {name!r} has values of shape {values.shape} and type {values.dtype}",
            "one number an item, and one item at least",
            "Give every group a one-dimensional array of losses.",
        )
    values = np.ascontiguousarray(values, dtype=np.float64)
    wrong = np.flatnonzero(~((values >= 0) & np.isfinite(values)))
    if len(wrong):
        raise GacError(
            f"group {name!r} has value {values[wrong[0]]} at item {wrong[0]}",
            "finite losses, 0 or more",
            "Remove the item, or shift the group's losses so that the smallest is 0.",
        )
    return values


def _costs(name: str, raw: Any, items: int) -> Ints:
    costs = _array(name, "costs", raw)
    if costs.ndim != 2 or len(costs) != items:
        raise GacError(
            f"group {name!r} has costs of shape {costs.shape} for {items} items",
            f"shape ({items}, limits)",
            "Give one row an item and one column a limit.",
        )
    if costs.dtype.kind not in "iu" or (costs.dtype.kind == "u" and (costs > np.iinfo(np.int64).max).any()):
        raise GacError(
            f"group {name!r} has costs of type {costs.dtype}",
            "integers that fit int64",
            "Round the costs up to whole units (parameters, ns, bytes) first.",
        )
    costs = np.ascontiguousarray(costs, dtype=np.int64)
    wrong = np.argwhere(costs < 0)
    if len(wrong):
        item, limit = wrong[0].tolist()
        raise GacError(
            f"group {name!r} has cost {costs[item, limit]} at item {item}, limit {limit}",
            "costs of 0 or more",
            "Correct the cost; an unknown cost cannot be limited.",
        )
    return costs


def parse_instance(
    groups: Iterable[Group], limits: Iterable[int], names: Iterable[str] | None, work_limit: float
) -> tuple[tuple[Group, ...], tuple[int, ...], tuple[str, ...], float]:
    """Return the arguments of ``knapsack`` as tuples, limits as Python integers, and a name for each limit."""
    listed = _as_tuple("groups", groups, "Pass a list of Group.")
    for group in listed:
        if not isinstance(group, Group):
            kind = type(group).__name__
            raise GacError(f"an entry of type {kind} among the groups", "Group objects", "Pass a list of Group.")
    bounds = _limits(listed, _as_tuple("limits", limits, "Pass a list with one integer a limit."))
    several = (names,) if isinstance(names, str) else names
    labels = () if several is None else _as_tuple("names", several, "Name every limit, or none.")
    if labels and len(labels) != len(bounds):
        stated = f"{len(labels)} names for {len(bounds)} limits"
        raise GacError(stated, "one name a limit", "Name every limit, or none.")
    if isinstance(work_limit, str | bool) or not _as_number(work_limit) >= 0:
        remedy = "Give the number of units of work that may be done."
        raise GacError(f"a work limit of {work_limit!r}", "a number of 0 or more", remedy)
    numbered = tuple(f"limit {number + 1}" for number in range(len(bounds)))
    return listed, bounds, tuple(map(str, labels)) or numbered, float(work_limit)


def check_start(groups: tuple[Group, ...], limits: tuple[int, ...], start: Sequence[int]) -> None:
    expected, remedy = f"an item of each of {len(groups)} groups, within {list(limits)}", "Start without one."
    if len(start) != len(groups):
        raise GacError(f"a start of {len(start)} items", expected, remedy)
    chosen = [group.costs[item].tolist() for group, item in zip(groups, start, strict=True)]
    used = [sum(row) for row in zip(*chosen, strict=True)]
    if any(cost > limit for cost, limit in zip(used, limits, strict=True)):
        raise GacError(f"a start that costs {used}", expected, remedy)


def _as_tuple(name: str, raw: Iterable[Any], remedy: str) -> tuple[Any, ...]:
    try:
        return tuple(raw)
    except TypeError:
        raise GacError(f"{name} of {raw!r}", "several, one after the other", remedy) from None


def _as_number(raw: Any) -> float:
    try:
        return float(raw)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _limits(groups: tuple[Group, ...], limits: tuple[Any, ...]) -> tuple[int, ...]:
    if not groups or not limits:
        stated = f"{len(groups)} groups and {len(limits)} limits"
        raise GacError(stated, "one of each at least", "Give a group and a limit.")
    for group in groups:
        if group.costs.shape[1] != len(limits):
            raise GacError(
                f"group {group.name!r} has costs under {group.costs.shape[1]} limits",
                f"{len(limits)}, as many as there are limits",
                "Give one column of costs a limit.",
            )
    try:
        return tuple(operator.index(limit) for limit in limits)
    except TypeError:
        remedy = "Round the limits down to whole units (parameters, ns, bytes)."
        raise GacError(f"limits {list(limits)}", "integers", remedy) from None
