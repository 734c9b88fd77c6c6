"""The proof: widen the search round the bound until what it finds, or fails to find, settles the optimum."""

from dataclasses import dataclass, replace

import numpy as np

from gac.allocation.knapsack.cp import cp_sat
from gac.allocation.knapsack.deadline import Deadline
from gac.allocation.knapsack.growth import Core, GivenUpError, grown_lists
from gac.allocation.knapsack.join import join
from gac.allocation.knapsack.ragged import Ragged
from gac.allocation.knapsack.relaxation import Bound
from gac.arrays import Ints

_FIRST, _FINEST = 24, 16
_REACH = 2
_FAST_GROWTH, _GROWTH, _SLOW_GROWTH = 2.0, 1.3, 1.1
_CHEAP, _DEAR, _DEAREST = 1 << 12, 1 << 16, 1 << 19
_LISTS, _CP_SAT = "lists joined in the middle", "CP-SAT"


@dataclass(frozen=True, eq=False)
class Outcome:
    """The best choice found, its value and a proved lower bound; the last search's name and its number of items."""

    choice: Ints
    value: int
    lower: int
    core: int
    search: str


def settle(items: Ragged, bound: Bound, choice: Ints, deadline: Deadline, enough: int = 0) -> Outcome:
    """Search ever wider margins above the bound; where ``value`` and ``lower`` come out equal, the choice is optimal.

    A choice with a value below ``bound.lower + margin`` consists of items whose reduced values are below the margin
    (reduced-cost fixing), so searching those alone decides whether there is one. Margins grow until one
    holds the optimum or reaches the best known value. Where a search gives up, which it does after half of the time
    that is left, CP-SAT is asked once.

    Past the deadline, or with a value of ``enough`` or less, what has been found and proved so far is returned.
    """
    value, lower = _value(items, choice), bound.lower
    margin, core, work = _first_margin(items, bound, value), 0, 0
    while lower < value and value > enough and not deadline.passed:
        target = min(value, bound.lower + margin)
        near = bound.reduced < target - bound.lower
        part, core = items.keep(near), int(near.sum())
        known = min(value, bound.lower + _REACH * margin)
        found, complete, done = better(part, bound.keep(near), target, known, Deadline.after(deadline.left / 2))
        if found is not None:
            choice = np.flatnonzero(near)[found]
            value = _value(items, choice)
        if not complete and lower < value:
            if deadline.passed:
                break
            return _settle_by_cp_sat(items, bound, choice, lower, deadline.left)
        lower = min(value, target)
        margin, work = int(margin * _growth(done, work)) + 1, done
    return Outcome(choice, value, max(lower, 0), core, _LISTS)


def _settle_by_cp_sat(items: Ragged, bound: Bound, choice: Ints, lower: int, seconds: float) -> Outcome:
    """Ask CP-SAT for a choice better than this one; only a completed search is a proof, its float bound is not.

    In each group the smallest value and the lowest costs count 0, so that the sums fit int64 if they can.
    """
    value = _value(items, choice)
    near = bound.reduced < value - bound.lower
    part = items.keep(near)
    lowest = np.minimum.reduceat(part.values, part.starts)
    shifted = replace(
        part,
        values=part.values - lowest[part.group],
        costs=part.costs - part.cheapest[:, part.group],
        slack=part.slack - part.cheapest.sum(axis=1),
    )
    answer = cp_sat(shifted, seconds, hint=np.isin(np.flatnonzero(near), choice))
    if answer.choice is not None:
        found = np.flatnonzero(near)[answer.choice]
        assert (items.used(found) <= items.slack).all(), "CP-SAT broke a limit"
        if _value(items, found) < value:
            choice, value = found, _value(items, found)
    if answer.status in ("OPTIMAL", "INFEASIBLE"):
        lower = value
    return Outcome(choice, value, max(lower, 0), len(part), _CP_SAT)


def _growth(work: int, before: int) -> float:
    """How much wider the next margin is: work grows faster than the margin, the more so the more there is of it.

    Where lists are nearly as long as they may get, a wide step would be given up; a narrow one may find the optimum.
    """
    if work < _CHEAP:
        return _FAST_GROWTH
    return _GROWTH if work < min(max(_DEAR, 2 * before), _DEAREST) else _SLOW_GROWTH


def _value(items: Ragged, choice: Ints) -> int:
    return int(items.values[choice].sum())


def _first_margin(items: Ragged, bound: Bound, value: int) -> int:
    """A margin within which a few dozen items at most are no default."""
    alternatives = bound.reduced[bound.reduced > 0]
    if len(alternatives) == 0:
        return 1
    rank = min(_FIRST, len(items.starts) // 8, len(alternatives) - 1)
    return max(int(np.partition(alternatives, rank)[rank]), value - bound.lower >> _FINEST) + 1


def better(items: Ragged, bound: Bound, target: int, known: int, deadline: Deadline) -> tuple[Ints | None, bool, int]:
    """The best choice within the limits whose value is below ``target``, or failing that, perhaps one below ``known``.

    Every choice below the target has reduced values that sum to less than ``target - bound.lower``; all of those are
    enumerated, but for the ones that another one beats or equals in every cost and in value, and those that are bound
    to leave so much of the limit unused that they cannot be below the target. So if a complete search finds nothing
    below the target, there is nothing. What it finds between target and known is a better incumbent, not an optimum.
    Where a list grows too long, or the deadline passes, the search gives up.

    Returns:
        The best choice found (one item position a group) or None; whether no choice below the target was left out; and
        how many states and pairs were looked at.
    """
    default = items.first_minimum(bound.reduced)
    core = _core(items, bound, default, target, known)
    try:
        left, right, tree = grown_lists(core, deadline)
    except GivenUpError as given_up:
        return None, False, given_up.work
    best, complete, pairs = join(left, right, core, deadline)
    work = len(left) + len(right) + pairs
    if best is None:
        return None, complete, work
    choice = default.copy()
    for states, at in zip((left, right), best, strict=True):
        picked = tree.items(int(states.node[at]))
        choice[items.group[picked]] = picked
    return choice, complete, work


def _core(items: Ragged, bound: Bound, default: Ints, target: int, known: int) -> Core:
    room = target - bound.lower
    near = bound.reduced < room
    near[default] = False
    alternatives = np.flatnonzero(near)
    group = items.group[alternatives]
    instead, reduced = default[group], bound.reduced[alternatives]
    costs = items.costs[:, alternatives] - items.costs[:, instead]
    values = np.asarray(items.values[alternatives] - items.values[instead], dtype=np.int64)
    starts, free = np.flatnonzero(np.diff(group, prepend=-1)), items.slack - items.used(default)
    limits = _that_can_bind(costs, starts, free)
    return Core(
        alternatives=alternatives,
        starts=np.append(starts, len(group)),
        steps=np.vstack([costs[limits], values, reduced, np.zeros_like(values)]),
        reduced=reduced,
        free=free[limits],
        below=known - int(items.values[default].sum()),
        room=room,
        reach=known - bound.lower,
        multipliers=bound.multipliers[limits],
    )


def _that_can_bind(costs: Ints, starts: Ints, free: Ints) -> Ints:
    """The limits that some choice of the alternatives breaks, which are dear to keep track of; one at least."""
    if len(starts) == 0:
        return np.arange(len(free))
    most = np.maximum(np.maximum.reduceat(costs, starts, axis=1), 0).sum(axis=1)
    binding = np.flatnonzero(most > free)
    return binding if len(binding) else np.zeros(1, dtype=np.int64)
