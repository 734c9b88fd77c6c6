"""The public function: from groups to a choice with its certificate."""

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Literal

from gac.allocation.knapsack.feasibility import within_limits
from gac.allocation.knapsack.given import as_given, start_within
from gac.allocation.knapsack.groups import Group, Solution
from gac.allocation.knapsack.instance import OutOfReachError, reduced_items, rows_of
from gac.allocation.knapsack.refine import Refined, refined
from gac.allocation.knapsack.work import Work
from gac.core.arrays import Ints
from gac.core.errors import GacError
from gac.plan.plan import Certificate


def knapsack(
    groups: Iterable[Group],
    limits: Iterable[int],
    *,
    names: Iterable[str] | None = None,
    work_limit: float = 60.0,
    start: Sequence[int] | None = None,
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

    Costs and limits are exact integers throughout, of any size. A loss is the exact number that its float stands for.
    Each, less its group's smallest, is compared as a whole number of grains (``Solution.grain``, a power of two), and
    is at most one grain off: half of one in float64's subtraction, since it has 52 bits at most, and half in rounding.
    In these integers the search is exact: where the status is ``optimal``, no choice within the limits has a smaller
    sum, and what are multiples of the grain are told apart exactly.

    So a choice of n groups has a loss of less than ``2 * n`` grains above the least. ``Solution.unit`` is more than
    ``8 * n`` grains, and 8 times the spacing of floats at ``value`` or more. Hence ``value``, if ``optimal``, and
    ``lower_bound`` always, exceed the least loss by less than half a unit: by less than a quarter for the grains, and
    by 3/16 at most for what is rounded to floats. The grain is refined until the solution has 44 bits in it (one less
    for each doubling from 1,024 groups on), until it is the finest of floats, or until the work is done.

    Args:
        groups: at least one; all with the same number of limits.
        limits: the largest allowed sum of costs, one a column of the groups' costs.
        names: what an error calls the limits (``limit 1``, ``limit 2``, ... where not given).
        work_limit: units of work after which the search stops. They are counted, not timed, so the answer is the same
            on every machine; one takes about a second. The status may then be ``feasible``, with the gap that is left.
            CP-SAT gets the rest of the work where a search grows too large.
        start: a choice within the limits, where one is known: the search need not find its first one.

    Raises:
        BudgetError: no choice is within the limits; says by how much, what is reachable, and which limit and group
            bind. Or the work limit was too low to find one or to prove that there is none.
        GacError: no group or no limit; groups or names with another number of limits; a limit that is no integer;
            a work limit below 0; a start beyond the limits; losses that sum up to more than a float holds.
    """
    groups, limits, names, work_limit = as_given(groups, limits, names, work_limit)
    known = None if start is None else start_within(groups, limits, start)
    work, rows = Work(work_limit), rows_of(groups, limits)
    try:
        instance = reduced_items(rows.items, rows.limits)
        rows = replace(rows, items=instance.items)  # large instances: memory that is freed is used again, and warm
    except OutOfReachError:
        within_limits(groups, limits, names, work)
        raise AssertionError("a limit out of reach was met") from None

    def first() -> Ints:
        return instance.positions(within_limits(groups, limits, names, work) if known is None else rows.all(known))

    found = refined(instance.items, first, work)
    multipliers = [
        _as_float(Fraction(multiplier) * Fraction(found.grain) / (int(divisor) << shift))
        for multiplier, divisor, shift in zip(found.multipliers, instance.divisors, rows.shifts, strict=True)
    ]
    return _solution(groups, found, [multipliers[row] for row in rows.deciding], len(instance.items), work)


def _solution(
    groups: Sequence[Group], found: Refined, multipliers: Sequence[float], items: int, work: Work
) -> Solution:
    """The choice (one item index a group) with its proof, counted again in what the groups hold."""
    choice = tuple(found.choice[: len(groups)].tolist())
    chosen = list(zip(groups, choice, strict=True))
    try:
        value = math.fsum(group.values[item] for group, item in chosen)
    except OverflowError:
        raise GacError(
            f"losses of {float(max(group.values[item] for group, item in chosen)):.3g} and others in the best choice",
            "a sum that a float holds, below 1.8e308",
            "Give the losses in a larger unit.",
        ) from None
    used = zip(*(group.costs[item].tolist() for group, item in chosen), strict=True)
    outcome, unit = found.outcome, max(math.ldexp(found.grain, len(groups).bit_length() + 3), 8 * math.ulp(value))
    lower = max(0.0, value - _as_float((outcome.value - outcome.lower) * Fraction(found.grain)))
    status: Literal["optimal", "feasible"] = "optimal" if lower == value else "feasible"
    method = "every group at its smallest loss"
    if outcome.search:
        fixed = f"{items:,} items fixed down to {outcome.core:,}"
        method = f"Lagrangian bound, {fixed}, {outcome.search}; proved within {unit:.3g}; {work}"
    certificate = Certificate(status, value, lower, value - lower, tuple(multipliers), method)
    return Solution(choice, tuple(map(sum, used)), certificate, unit, found.grain)


def _as_float(number: Fraction) -> float:
    """The nearest float; the largest where it is beyond."""
    return float(min(number, Fraction(sys.float_info.max)))
