"""Whether limits can be met at all, and if not, by how much they fall short."""

from collections.abc import Callable, Sequence

import numpy as np

from gac.allocation.knapsack.groups import Group, Solution
from gac.errors import BudgetError

Solve = Callable[[Sequence[Group], Sequence[int]], Solution]


def within_limits(
    groups: Sequence[Group], limits: Sequence[int], names: Sequence[str], solve: Solve
) -> tuple[int, ...]:
    """A choice within all limits: one limit after the other is minimised exactly under those before it.

    Args:
        solve: the knapsack itself, called with fewer limits and a cost for the loss.

    Raises:
        BudgetError: there is none; names the limit that cannot be met beside the earlier ones, and what could be.
    """
    choice = tuple(int(group.costs[:, 0].argmin()) for group in groups)
    for limit, (name, most) in enumerate(zip(names, limits, strict=True)):
        if limit:
            choice = solve([_costs_as_losses(group, limit) for group in groups], limits[:limit]).choice
        used = [int(group.costs[item, limit]) for group, item in zip(groups, choice, strict=True)]
        if sum(used) > most:
            raise _short(groups, name, most, used, names[:limit])
    return choice


def _costs_as_losses(group: Group, limit: int) -> Group:
    return Group(group.name, group.costs[:, limit].astype(np.float64), group.costs[:, :limit])


def _short(groups: Sequence[Group], name: str, limit: int, used: Sequence[int], kept: Sequence[str]) -> BudgetError:
    smallest = sum(used)
    largest = max(range(len(used)), key=used.__getitem__)
    beside = f" beside {' and '.join(kept)}" if kept else ""
    share = f"group {groups[largest].name!r} alone takes {used[largest]}"
    return BudgetError(
        f"{name} of {limit} cannot be met{beside}: it falls short by {smallest - limit}",
        f"{smallest} or more, the smallest reachable{beside} ({share})",
        "Raise the limit, or add cheaper candidates.",
    )
