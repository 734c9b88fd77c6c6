"""The proof: a search of widening margins above the Lagrangian bound, and CP-SAT where that grows too large."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from gac.allocation.knapsack.instance import Mask, Ragged
from gac.allocation.knapsack.lists import STEPS, Core, GivenUpError, Searched, Work, best_choice
from gac.allocation.knapsack.relaxation import Bound
from gac.core.arrays import Ints

_FIRST, _FINEST = 24, 16
_FAST_GROWTH, _GROWTH, _SLOW_GROWTH = 2.0, 1.3, 1.1
_CHEAP, _DEAR, _DEAREST = 1 << 12, 1 << 16, 1 << 19
_LONGER = 4


@dataclass(frozen=True, eq=False)
class Outcome:
    """The best choice, its value and a proved lower bound; the last search's name and its number of items."""

    choice: Ints
    value: int
    lower: int
    core: int
    search: str


def settle(items: Ragged, bound: Bound, choice: Ints, work: Work, enough: int = 0) -> Outcome:
    """Search ever wider margins above the bound; where ``value`` and ``lower`` come out equal, the choice is optimal.

    A choice with a value below ``bound.lower + margin`` consists of items whose reduced values are below the margin
    (reduced-cost fixing), so searching those alone decides whether there is one. Margins grow until one
    holds the optimum or reaches the best known value: the more slowly, the more work the last one took. The length of
    the next lists is not known in advance: where they are several times as long as those before, the margin shrinks.
    Where a search gives up, which it does after half of the work that is left, CP-SAT is called once.

    Once the work is spent, or with a value of ``enough`` or less, the best choice and bound so far are returned.
    """
    value, lower = items.value(choice), bound.lower
    room, least_room, many = _first_room(items, bound, value), 1, _LONGER * _CHEAP
    core = looked = 0
    while lower < value and value > enough and not work.spent:
        near = bound.reduced < min(value - bound.lower, room)
        part, core = items.keep(near), int(near.sum())
        half = Work(work.remaining / 2)
        searched = search_margin(part, bound.keep(near), value, half, room=room, least_room=least_room, many=many)
        work.steps += half.steps
        if searched.choice is not None:
            choice = np.flatnonzero(near)[searched.choice]
            value = items.value(choice)
        if not searched.room and lower < value:
            if work.spent:
                break
            return _settle_by_cp_sat(items, bound, choice, lower, work)
        lower = min(value, bound.lower + searched.room)
        growth = _SLOW_GROWTH  # lists nearly as long as they may get: a wide step would be given up
        if searched.looked < min(max(_DEAR, 2 * looked), _DEAREST):
            growth = _FAST_GROWTH if searched.looked < _CHEAP else _GROWTH
        room, least_room = int(searched.room * growth) + 1, int(searched.room * _SLOW_GROWTH) + 1
        many, looked = _LONGER * max(searched.longest, _CHEAP), searched.looked
    return Outcome(choice, value, max(lower, 0), core, "meet in the middle")


def _settle_by_cp_sat(items: Ragged, bound: Bound, choice: Ints, lower: int, work: Work) -> Outcome:
    """Ask CP-SAT for a better choice; only a completed search is a proof, its float bound is not.

    In each group the smallest value and the lowest costs count 0, so that the sums fit int64 if they can.
    """
    value = items.value(choice)
    near = bound.reduced < value - bound.lower
    part = items.keep(near)
    lowest = np.minimum.reduceat(part.values, part.starts)
    shifted = replace(
        part,
        values=part.values - lowest[part.group],
        costs=part.costs - part.cheapest[:, part.group],
        slack=part.slack - part.cheapest.sum(axis=1),
    )
    status, solution = cp_sat(shifted, work, hint=np.isin(np.flatnonzero(near), choice))
    if solution is not None:
        better = np.flatnonzero(near)[solution]
        assert (items.used(better) <= items.slack).all(), "CP-SAT broke a limit"
        if items.value(better) < value:
            choice, value = better, items.value(better)
    if status in ("OPTIMAL", "INFEASIBLE"):
        lower = value
    return Outcome(choice, value, max(lower, 0), len(part), "CP-SAT")


def _first_room(items: Ragged, bound: Bound, value: int) -> int:
    alternatives = bound.reduced[bound.reduced > 0]
    if len(alternatives) == 0:
        return 1
    rank = min(_FIRST, len(items.starts) // 8, len(alternatives) - 1)
    return max(int(np.partition(alternatives, rank)[rank]), value - bound.lower >> _FINEST) + 1


def search_margin(
    items: Ragged, bound: Bound, value: int, work: Work, *, room: int, least_room: int, many: int
) -> Searched:
    """Find the best choice within the limits and the margin whose value is below ``value``, or one a bit beyond.

    The reduced values of every choice within the margin sum to less than its room. All of those are enumerated, but
    for dominated ones, and for those that leave too much of the limits unused to be within the margin. So a complete
    search that finds nothing proves that there is nothing. A choice beyond, in ``REACH`` times the room, is a better
    incumbent, not an optimum. ``room``, ``least_room`` and ``many`` are as in ``Core``.
    """
    room, default = min(room, value - bound.lower), items.first_minimum(bound.reduced)
    near = bound.reduced < room
    near[default] = False
    alternatives = np.flatnonzero(near)
    group = items.group[alternatives]
    instead, reduced = default[group], bound.reduced[alternatives]
    costs = items.costs[:, alternatives] - items.costs[:, instead]
    values = np.asarray(items.values[alternatives] - items.values[instead], dtype=np.int64)
    starts, free = np.flatnonzero(np.diff(group, prepend=-1)), items.slack - items.used(default)
    limits = _limits_that_can_bind(costs, starts, free)
    core = Core(
        alternatives=alternatives,
        starts=np.append(starts, len(group)),
        steps=np.vstack([costs[limits], values, reduced, np.zeros_like(values)]),
        free=free[limits],
        below=value - items.value(default),
        room=room,
        least_room=least_room,
        many=many,
        reach=value - bound.lower,
        multipliers=bound.multipliers[limits],
    )
    try:
        searched = best_choice(core, work)
    except GivenUpError:
        return Searched(None, 0)
    if searched.choice is None:
        return searched
    choice = default.copy()
    choice[items.group[searched.choice]] = searched.choice
    return replace(searched, choice=choice)


def _limits_that_can_bind(costs: Ints, starts: Ints, free: Ints) -> Ints:
    if len(starts) == 0:
        return np.arange(len(free))
    most = np.maximum(np.maximum.reduceat(costs, starts, axis=1), 0).sum(axis=1)
    binding = np.flatnonzero(most > free)
    return binding if len(binding) else np.zeros(1, dtype=np.int64)


# --- OR-Tools CP-SAT ------------------------------------------------------------------------------------------------


def cp_sat(items: Ragged, work: Work, hint: Mask | None = None) -> tuple[str, Ints | None]:
    """Minimise the sum of integer values within the slack, starting from the ``hint`` (a mask of the chosen items).

    Its presolve is off: with it, version 9.15 was seen to prove a wrong optimum on an instance with huge costs.

    Returns:
        CP-SAT's status by name, ``MODEL_INVALID`` where the sum of all values, or of all costs under a limit, does not
        fit int64; and a choice (one item position a group), or None.
    """
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    picks = [model.new_bool_var(f"x{item}") for item in range(len(items))]
    for start, size in zip(items.starts.tolist(), items.sizes.tolist(), strict=True):
        model.add_exactly_one(picks[start : start + size])
    for costs, slack in zip(items.costs.tolist(), items.slack.tolist(), strict=True):
        model.add(cp_model.LinearExpr.weighted_sum(picks, costs) <= slack)
    model.minimize(cp_model.LinearExpr.weighted_sum(picks, items.values.tolist()))
    for pick, taken in zip(picks, [] if hint is None else hint.tolist(), strict=hint is not None):
        model.add_hint(pick, taken)
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time = work.remaining
    solver.parameters.num_workers = 1
    solver.parameters.cp_model_presolve = False
    solver.parameters.catch_sigint_signal = False
    with ThreadPoolExecutor(1) as thread:  # so that the main thread receives Ctrl-C
        solving = thread.submit(solver.solve, model)
        try:
            status = solving.result()
        except KeyboardInterrupt:
            solver.stop_search()
            raise
    work.steps += int(solver.response_proto.deterministic_time * STEPS)
    choice = None
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        choice = np.flatnonzero([bool(solver.boolean_value(pick)) for pick in picks])
    return solver.status_name(status), choice
