"""The public function ``knapsack``: integer losses as fine as needed, infeasible limits, and the certificate."""

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Literal

import numpy as np

from gac.allocation.knapsack.instance import (
    COST_BITS,
    FINEST,
    VALUE_BITS,
    Group,
    OutOfReachError,
    Ragged,
    Solution,
    costs_of,
    flatten,
    parse_instance,
    reduced_items,
    rows_of,
    to_grains,
)
from gac.allocation.knapsack.lists import Work
from gac.allocation.knapsack.relaxation import lagrangian, relax
from gac.allocation.knapsack.search import Outcome, settle
from gac.core.arrays import Floats, Ints
from gac.core.errors import BudgetError, GacError
from gac.plan.plan import Certificate

_FAR = 2.0**-20
_FINE = 8
_TAME, _UNSEEN = 400, 2.0**-1000
_UP = 1 + 2.0**-40


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
    In these integers the search is exact, and multiples of the grain are told apart exactly. The status is
    ``optimal`` where the bound in float64 is ``value``.

    So a choice of n groups has a loss of less than ``2 * n`` grains above the least. ``Solution.unit`` is more than
    ``8 * n`` grains, and 8 times the spacing of floats at ``value`` or more. Hence ``value``, if ``optimal``, and
    ``lower_bound`` always, exceed the least loss by less than half a unit: by less than a quarter for the grains, and
    by 3/16 at most for what is rounded to floats. The grain is refined until the solution has 44 bits in it (one less
    for each doubling from 1,024 groups on), until it is the finest of floats, or until the work is done.

    Args:
        groups: at least one; all with the same number of limits.
        limits: the largest allowed sum of costs, one a column of the groups' costs.
        names: names of the limits in errors (default ``limit 1``, ``limit 2``, ...).
        work_limit: units of work after which the search stops. They are counted, not timed, so the answer is the same
            on every machine; one takes about a second. The status may then be ``feasible``, with the gap that is left.
            CP-SAT gets the rest of the work where a search grows too large.
        start: a choice within the limits, if one is known.

    Raises:
        BudgetError: no choice is within the limits; states by how much, what is reachable, and which limit and group
            bind. Or the work limit was too low to find one or to prove that there is none.
        GacError: no group or no limit; groups or names with another number of limits; a limit that is no integer;
            a work limit below 0; a start beyond the limits; losses that sum up to more than a float holds.
    """
    groups, limits, names = parse_instance(groups, limits, names, work_limit, start)
    work, rows = Work(float(work_limit)), rows_of(groups, limits)
    known = None if start is None else rows.extend(start)
    try:
        items, divisors = reduced_items(rows.items, rows.limits)
        rows = replace(rows, items=items)  # large instances: memory that is freed is used again, and warm
    except OutOfReachError:
        feasible_choice(groups, limits, names, work)
        raise AssertionError("a limit out of reach was met") from None

    def first() -> Ints:
        return items.positions(feasible_choice(groups, limits, names, work) if known is None else known)

    outcome, grain, by_row = _refine(items, first, work)
    multipliers = [
        _as_float(Fraction(multiplier) * Fraction(grain) / (int(divisor) << shift))
        for multiplier, divisor, shift in zip(by_row, divisors, rows.shifts, strict=True)
    ]
    return _solution(groups, outcome, grain, [multipliers[row] for row in rows.deciding], len(items), work)


def _refine(items: Ragged, first: Callable[[], Ints], work: Work) -> tuple[Outcome, float, Floats]:
    """The best choice within the limits (original item indices), the grain, and the multipliers in grains.

    ``items`` has costs from 0 and float values from 0. Each round knows a better choice than the one before. It drops
    the items that alone lose more than that whole choice, and makes the grain so small that the choice has 52 bits.
    Where the relaxation cannot tell the choice from 0 among items so large, or the optimum has 8 bits less than the
    choice had, another round follows.
    ``first`` finds a choice where the relaxation finds none.
    """
    start: Ints | None = None
    bits = min(VALUE_BITS, COST_BITS - len(items.starts).bit_length())
    while True:
        largest = items.values.max()
        top = int(np.frexp(largest)[1])
        top = top if abs(top) > _TAME else 0
        normal = replace(items, values=np.ldexp(items.values, -top)) if top else items
        multipliers, relaxed = relax(normal)
        if start is None or (relaxed is not None and normal.values[relaxed].sum() < normal.values[start].sum()):
            start = relaxed
        if start is None:
            start = first()
        if not items.values[start].any():
            return Outcome(items.origin[start], 0, 0, 0, ""), 2.0**FINEST, np.zeros(len(items.costs))
        total = float(normal.values[start].sum())
        near = normal.values <= max(total * _UP, _UNSEEN)
        items, start = items.keep(near), (np.cumsum(near) - 1)[start]
        if total < _FAR * np.ldexp(largest, -top):
            continue
        exponent = max(top + int(np.frexp(total)[1]) - bits, FINEST)
        scaled = replace(items, values=to_grains(items.values, 2.0**exponent))
        bound = lagrangian(scaled, np.ldexp(multipliers, top - exponent))
        outcome = settle(scaled, bound, start, work)
        start = outcome.choice
        if exponent == FINEST or outcome.value >> bits - _FINE or work.spent:
            return replace(outcome, choice=items.origin[start]), 2.0**exponent, bound.multipliers


def _solution(
    groups: Sequence[Group], outcome: Outcome, grain: float, multipliers: Sequence[float], items: int, work: Work
) -> Solution:
    choice = tuple(outcome.choice[: len(groups)].tolist())
    chosen = list(zip(groups, choice, strict=True))
    try:
        value = math.fsum(group.values[item] for group, item in chosen)
    except OverflowError:
        raise GacError(
            f"losses of {float(max(group.values[item] for group, item in chosen)):.3g} and others in the best choice",
            "a sum that a float holds, below 1.8e308",
            "Give the losses in a larger unit.",
        ) from None
    unit = max(math.ldexp(grain, len(groups).bit_length() + 3), 8 * math.ulp(value))
    lower = max(0.0, value - _as_float((outcome.value - outcome.lower) * Fraction(grain)))
    status: Literal["optimal", "feasible"] = "optimal" if lower == value else "feasible"
    method = "every group at its smallest loss"
    if outcome.search:
        fixed = f"{items:,} items fixed down to {outcome.core:,}"
        method = f"Lagrangian bound, {fixed}, {outcome.search}; proved within {unit:.3g}; {work}"
    certificate = Certificate(status, value, lower, value - lower, tuple(multipliers), method)
    return Solution(choice, costs_of(groups, choice), certificate, unit, grain)


def _as_float(number: Fraction) -> float:
    return float(min(number, Fraction(sys.float_info.max)))


# --- feasibility ----------------------------------------------------------------------------------------------------


def feasible_choice(
    groups: Sequence[Group], limits: Sequence[int], names: Sequence[str], work: Work
) -> tuple[int, ...]:
    """Find a choice within all limits: one row after the other is minimised, in exact integers, under those before it.

    Raises:
        BudgetError: there is none; names the limit that cannot be met alone or together with the earlier ones. Or the
            work was spent before there was a choice or a proof that there is none.
    """
    items = flatten(groups)
    for limit, most in enumerate(limits):
        choice, used = _cheapest(items, limit)
        if used > most:
            raise _infeasible(groups, choice, limit, most, used - most, names[limit], "")
    rows = rows_of(groups, limits)
    choice, _ = _cheapest(rows.items, 0)
    for row in range(1, len(rows.limits)):
        choice, used, lower = _least(rows.items, rows.limits, row, choice, work)
        if used > rows.limits[row]:
            limit, shift = rows.deciding.index(row), rows.shifts[row]
            earlier = f" beside {' and '.join(names[:limit])}" if limit else ""
            # High costs of h + d or more are costs of more than the limit plus d - 1 times what one of them counts.
            short = (lower - rows.limits[row] - 1 << shift) + 1
            raise _infeasible(groups, choice, limit, limits[limit], short, names[limit], earlier)
    return choice


def _cheapest(items: Ragged, limit: int) -> tuple[tuple[int, ...], int]:
    choice = items.origin[items.first_minimum(items.costs[limit])]
    return tuple(choice.tolist()), sum(items.cheapest[limit].tolist())


def _least(
    items: Ragged, limits: Sequence[int], limit: int, known: tuple[int, ...], work: Work
) -> tuple[tuple[int, ...], int, int]:
    """The choice with the lowest cost under a limit within those before it, or one within that limit; cost and bound.

    The knapsack itself, with that limit's costs for losses: they are integers already, so nothing is rounded.
    """
    inside, _ = reduced_items(replace(items, values=items.costs[limit], costs=items.costs[:limit]), limits[:limit])
    start = inside.positions(known)
    used = sum(items.costs[limit, items.starts + np.asarray(known)].tolist())
    zero = used - inside.value(start)
    multipliers, other = relax(inside)
    if other is not None and inside.values[other].sum() < inside.values[start].sum():
        start = other
    outcome = settle(inside, lagrangian(inside, multipliers), start, work, enough=limits[limit] - zero)
    return tuple(inside.origin[outcome.choice].tolist()), zero + outcome.value, zero + outcome.lower


def _infeasible(
    groups: Sequence[Group], choice: Sequence[int], limit: int, most: int, short: int, name: str, earlier: str
) -> BudgetError:
    used = [int(group.costs[item, limit]) for group, item in zip(groups, choice, strict=False)]
    if short <= 0:
        return BudgetError(
            f"{name} of {most}{earlier}: the work was spent before a choice was found or ruled out (best {sum(used)})",
            f"a choice that costs {most} or less",
            "Raise the limit, or allow more work.",
        )
    largest = max(range(len(used)), key=used.__getitem__)
    proved = most + short == sum(used)
    reachable = f"{most + short} or more{', the smallest reachable' if proved else ''}{earlier}"
    return BudgetError(
        f"{name} of {most} cannot be met{earlier}: it falls short by {'' if proved else 'at least '}{short}",
        f"{reachable} (group {groups[largest].name!r} alone takes {used[largest]})",
        "Raise the limit, or add cheaper candidates.",
    )
