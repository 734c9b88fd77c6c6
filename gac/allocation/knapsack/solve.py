"""The public function: from groups to a choice with its certificate."""

import math
import operator
from collections.abc import Sequence
from typing import Literal

from gac.allocation.knapsack.deadline import Deadline
from gac.allocation.knapsack.feasibility import within_limits
from gac.allocation.knapsack.groups import Group, Solution
from gac.allocation.knapsack.instance import OutOfReachError, reduced, scaled, unit_of
from gac.allocation.knapsack.relaxation import lagrangian, relax
from gac.allocation.knapsack.search import settle
from gac.arrays import Ints
from gac.errors import GacError
from gac.plan import Certificate


def knapsack(
    groups: Sequence[Group], limits: Sequence[int], *, names: Sequence[str] = (), seconds: float = 60.0
) -> Solution:
    """Choose one item of each group so that the sum of values is smallest and every limit holds.

    >>> solution = knapsack(
    ...     [
    ...         Group("attention", values=[0.0, 0.1, 0.7], costs=[[16], [8], [4]]),
    ...         Group("mlp", values=[0.0, 0.5, 0.9], costs=[[48], [32], [24]]),
    ...     ],
    ...     limits=[40],
    ... )
    >>> solution.choice, solution.used
    ((1, 1), (40,))
    >>> solution.certificate.status, solution.certificate.value, solution.certificate.gap
    ('optimal', 0.6, 0.0)

    Costs and limits are exact integers throughout. Losses, each less its group's smallest, are compared as whole
    numbers of ``Solution.unit``: a power of two, at least 2**51 times smaller than what the first choice found loses
    (one bit less for each doubling beyond 1,024 groups). ``optimal`` means that in these integers no choice within the
    limits loses less: the gap is exactly 0.

    Args:
        groups: at least one; all with the same number of limits.
        limits: the largest allowed sum of costs, one a column of the groups' costs.
        names: what an error calls the limits (``limit 1``, ``limit 2``, ... where not given).
        seconds: after this time the search stops, and the status may be ``feasible``, with the gap that is left. A
            search that grows too large is handed to CP-SAT for the rest of the time.

    Raises:
        BudgetError: no choice is within the limits; says by how much, what is reachable, and which limit and group
            bind. Or the time was too short to find one or to prove that there is none.
        GacError: no group or no limit; groups or names with another number of limits; a limit that is no
            integer.
    """
    limits = _limits(groups, limits)
    names = _names(names, len(limits))
    deadline = Deadline.after(seconds)
    try:
        instance = reduced(groups, limits)
    except OutOfReachError:
        within_limits(groups, limits, names, deadline)
        raise AssertionError("a limit out of reach was met") from None
    relaxed, start = relax(instance.items)
    if start is None:
        start = instance.positions(within_limits(groups, limits, names, deadline))
    if not instance.items.values[start].any():
        choice, unit = instance.items.origin[start], unit_of(float(instance.items.values.max()) or 1.0, len(groups))
        return _solution(groups, choice, unit, [0.0] * len(limits), 0.0, "every group at its smallest loss")
    items, start, unit = scaled(instance.items, start)
    bound = lagrangian(items, relaxed / unit)
    outcome = settle(items, bound, start, deadline)
    method = (
        f"Lagrangian bound, {len(instance.items):,} items fixed down to {outcome.core:,}, "
        f"{outcome.search}; losses in units of {unit:.3g}"
    )
    multipliers, gap = bound.multipliers * unit / instance.divisors, (outcome.value - outcome.lower) * unit
    return _solution(groups, items.origin[outcome.choice], unit, multipliers.tolist(), gap, method)


def _limits(groups: Sequence[Group], limits: Sequence[int]) -> tuple[int, ...]:
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


def _names(names: Sequence[str], limits: int) -> tuple[str, ...]:
    if names and len(names) != limits:
        raise GacError(f"{len(names)} names for {limits} limits", "one name a limit", "Name every limit, or none.")
    return tuple(names) or tuple(f"limit {number}" for number in range(1, limits + 1))


def _solution(
    groups: Sequence[Group], choice: Ints, unit: float, multipliers: Sequence[float], gap: float, method: str
) -> Solution:
    """The choice (one item index a group) with its proof, counted again in what the groups hold."""
    chosen = list(zip(groups, choice.tolist(), strict=True))
    value = math.fsum(group.values[item] for group, item in chosen)
    used = zip(*(group.costs[item].tolist() for group, item in chosen), strict=True)
    status: Literal["optimal", "feasible"] = "feasible" if gap else "optimal"
    certificate = Certificate(status, value, value - gap, gap, tuple(multipliers), method)
    return Solution(tuple(choice.tolist()), tuple(map(sum, used)), certificate, unit)
