"""What a knapsack is given, looked over before anything is solved."""

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

from gac.allocation.knapsack.groups import Group
from gac.core.errors import GacError


def as_given(
    groups: Iterable[Group], limits: Iterable[int], names: Iterable[str] | None, work_limit: float
) -> tuple[tuple[Group, ...], tuple[int, ...], tuple[str, ...], float]:
    """The same as tuples, limits as Python integers, and a name for each; refused as ``knapsack`` says."""
    known = _listed("groups", groups, "Pass a list of Group.")
    for one in known:
        if not isinstance(one, Group):
            raise GacError(
                f"an entry of type {type(one).__name__} among the groups", "Group objects", "Pass a list of Group."
            )
    most = _limits(known, _listed("limits", limits, "Pass a list with one integer a limit."))
    named = (names,) if isinstance(names, str) else names
    called = () if named is None else _listed("names", named, "Name every limit, or none.")
    if called and len(called) != len(most):
        raise GacError(f"{len(called)} names for {len(most)} limits", "one name a limit", "Name every limit, or none.")
    if isinstance(work_limit, str | bool) or not _number(work_limit) >= 0:
        raise GacError(
            f"a work limit of {work_limit!r}", "a number of 0 or more", "Say how many units of work may be done."
        )
    return (
        known,
        most,
        tuple(map(str, called)) or tuple(f"limit {at + 1}" for at in range(len(most))),
        float(work_limit),
    )


def start_within(groups: tuple[Group, ...], limits: tuple[int, ...], start: Sequence[int]) -> tuple[int, ...]:
    """The choice that a search starts with; refused as ``knapsack`` says."""
    choice = tuple(start)
    expected, remedy = f"an item of each of {len(groups)} groups, within {list(limits)}", "Start without one."
    if len(choice) != len(groups):
        raise GacError(f"a start of {len(choice)} items", expected, remedy)
    chosen = [group.costs[item].tolist() for group, item in zip(groups, choice, strict=True)]
    used = [sum(row) for row in zip(*chosen, strict=True)]
    if any(taken > most for taken, most in zip(used, limits, strict=True)):
        raise GacError(f"a start that takes {used}", expected, remedy)
    return choice


def _listed(what: str, given: Iterable[Any], remedy: str) -> tuple[Any, ...]:
    try:
        return tuple(given)
    except TypeError:
        raise GacError(f"{what} of {given!r}", "several, one after the other", remedy) from None


def _number(given: Any) -> float:
    try:
        return float(given)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _limits(groups: tuple[Group, ...], limits: tuple[Any, ...]) -> tuple[int, ...]:
    if not groups or not limits:
        raise GacError(
            f"{len(groups)} groups and {len(limits)} limits", "one of each at least", "Give a group and a limit."
        )
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
        raise GacError(
            f"limits {list(limits)}", "integers", "Round the limits down to whole units (parameters, ns, bytes)."
        ) from None
