"""Whether limits can be met at all, and if not, by how much they fall short."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gac.allocation.knapsack.groups import Group
from gac.allocation.knapsack.instance import flatten, reduced_items, rows_of
from gac.allocation.knapsack.ragged import Ragged
from gac.allocation.knapsack.relaxation import lagrangian, relax
from gac.allocation.knapsack.search import settle
from gac.allocation.knapsack.work import Work
from gac.core.errors import BudgetError


@dataclass(frozen=True)
class _Least:
    """The choice found (one item index a group), what it takes of a limit, and a proved lower bound of that."""

    choice: tuple[int, ...]
    used: int
    lower: int


def within_limits(groups: Sequence[Group], limits: Sequence[int], names: Sequence[str], work: Work) -> tuple[int, ...]:
    """A choice within all limits: one row after the other is minimised, in exact integers, under those before it.

    Returns:
        Of the groups as ``rows_of`` has them.

    Raises:
        BudgetError: there is none; names the limit that cannot be met alone or beside the earlier ones, and what could
            be. Or the work was spent before there was a choice or a proof that there is none.
    """
    items = flatten(groups)
    for limit, most in enumerate(limits):
        alone = _cheapest(items, limit)
        if alone.used > most:
            raise _short(groups, alone.choice, limit, most, alone.used - most, names[limit], "")
    rows = rows_of(groups, limits)
    found = _cheapest(rows.items, 0)
    for row in range(1, len(rows.limits)):
        found = _least(rows.items, rows.limits, row, found.choice, work)
        if found.used > rows.limits[row]:
            limit, shift = rows.deciding.index(row), rows.shifts[row]
            beside = f" beside {' and '.join(names[:limit])}" if limit else ""
            # High costs of h + d or more are costs of more than the limit plus d - 1 times what one of them counts.
            short = (found.lower - rows.limits[row] - 1 << shift) + 1
            raise _short(groups, found.choice, limit, limits[limit], short, names[limit], beside)
    return found.choice


def _cheapest(items: Ragged, limit: int) -> _Least:
    """The choice that takes least of one limit, whatever it takes of the others."""
    used = sum(items.cheapest[limit].tolist())
    return _Least(tuple(items.origin[items.first_minimum(items.costs[limit])].tolist()), used, used)


def _least(items: Ragged, limits: Sequence[int], limit: int, known: tuple[int, ...], work: Work) -> _Least:
    """The choice that takes least of a limit within those before it, or one that takes no more than is allowed.

    The knapsack itself, with that limit's costs for losses: they are integers already, so nothing is rounded.
    """
    instance = reduced_items(replace(items, values=items.costs[limit], costs=items.costs[:limit]), limits[:limit])
    inside, start = instance.items, instance.positions(known)
    used = sum(items.costs[limit, items.starts + np.asarray(known)].tolist())
    zero = used - int(inside.values[start].sum())
    multipliers, other = relax(inside)
    if other is not None and inside.values[other].sum() < inside.values[start].sum():
        start = other
    outcome = settle(inside, lagrangian(inside, multipliers), start, work, enough=limits[limit] - zero)
    return _Least(tuple(inside.origin[outcome.choice].tolist()), zero + outcome.value, zero + outcome.lower)


def _short(
    groups: Sequence[Group], choice: Sequence[int], limit: int, most: int, short: int, name: str, beside: str
) -> BudgetError:
    """The error that says that a limit falls short, by so much at least, and what the best choice found takes."""
    used = [int(group.costs[item, limit]) for group, item in zip(groups, choice, strict=False)]
    if short <= 0:
        return BudgetError(
            f"{name} of {most}{beside}: the work was spent before a choice was found or ruled out (best {sum(used)})",
            f"a choice that takes {most} or less",
            "Raise the limit, or allow more work.",
        )
    largest = max(range(len(used)), key=used.__getitem__)
    proved = most + short == sum(used)
    reachable = f"{most + short} or more{', the smallest reachable' if proved else ''}{beside}"
    return BudgetError(
        f"{name} of {most} cannot be met{beside}: it falls short by {'' if proved else 'at least '}{short}",
        f"{reachable} (group {groups[largest].name!r} alone takes {used[largest]})",
        "Raise the limit, or add cheaper candidates.",
    )
