"""The proof: widen the search round the bound until what it finds, or fails to find, settles the optimum."""

from dataclasses import dataclass, replace

import numpy as np

from gac.allocation.knapsack.core import Core
from gac.allocation.knapsack.cp import cp_sat
from gac.allocation.knapsack.extension import GivenUpError
from gac.allocation.knapsack.growth import grown_lists
from gac.allocation.knapsack.join import join
from gac.allocation.knapsack.ragged import Ragged
from gac.allocation.knapsack.relaxation import Bound
from gac.allocation.knapsack.work import Work
from gac.core.arrays import Ints

_FIRST, _FINEST = 24, 16
_FAST_GROWTH, _GROWTH, _SLOW_GROWTH = 2.0, 1.3, 1.1
_CHEAP, _DEAR, _DEAREST = 1 << 12, 1 << 16, 1 << 19
_LONGER = 4
_LISTS, _CP_SAT = "lists joined in the middle", "CP-SAT"


@dataclass(frozen=True, eq=False)
class Outcome:
    """The best choice found, its value and a proved lower bound; the last search's name and its number of items."""

    choice: Ints
    value: int
    lower: int
    core: int
    search: str


@dataclass(frozen=True)
class Margin:
    """How far above the bound to look.

    Attributes:
        room: choices that exceed the bound by less are looked for.
        least_room: room that is not given up, however long a list gets.
        many: states of a list beyond which the room shrinks.
    """

    room: int
    least_room: int
    many: int


@dataclass(frozen=True, eq=False)
class Found:
    """What a search found.

    Attributes:
        choice: the best one (one item position a group), or None.
        room: there is no other choice that exceeds the bound by less and has a smaller value; 0 where it gave up.
        looked: how many states and pairs were looked at in the end.
        longest: states of the longest list.
    """

    choice: Ints | None
    room: int
    looked: int = 0
    longest: int = 0


def settle(items: Ragged, bound: Bound, choice: Ints, work: Work, enough: int = 0) -> Outcome:
    """Search ever wider margins above the bound; where ``value`` and ``lower`` come out equal, the choice is optimal.

    A choice with a value below ``bound.lower + margin`` consists of items whose reduced values are below the margin
    (reduced-cost fixing), so searching those alone decides whether there is one. Margins grow until one
    holds the optimum or reaches the best known value. How long the lists of a wider one get is not known before: where
    they are several times as long as those before, the margin shrinks. Where a search gives up, which it does after
    half of the work that is left, CP-SAT is asked once.

    Once the work is spent, or with a value of ``enough`` or less, what has been found and proved so far is returned.
    """
    value, lower = _value(items, choice), bound.lower
    margin, core, looked = Margin(_first_room(items, bound, value), 1, _LONGER * _CHEAP), 0, 0
    while lower < value and value > enough and not work.spent:
        near = bound.reduced < min(value - bound.lower, margin.room)
        part, core = items.keep(near), int(near.sum())
        half = Work(work.left / 2)
        found = better(part, bound.keep(near), value, margin, half)
        work.steps += half.steps
        if found.choice is not None:
            choice = np.flatnonzero(near)[found.choice]
            value = _value(items, choice)
        if not found.room and lower < value:
            if work.spent:
                break
            return _settle_by_cp_sat(items, bound, choice, lower, work)
        lower = min(value, bound.lower + found.room)
        margin, looked = _wider(found, looked), found.looked
    return Outcome(choice, value, max(lower, 0), core, _LISTS)


def _settle_by_cp_sat(items: Ragged, bound: Bound, choice: Ints, lower: int, work: Work) -> Outcome:
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
    answer = cp_sat(shifted, work, hint=np.isin(np.flatnonzero(near), choice))
    if answer.choice is not None:
        found = np.flatnonzero(near)[answer.choice]
        assert (items.used(found) <= items.slack).all(), "CP-SAT broke a limit"
        if _value(items, found) < value:
            choice, value = found, _value(items, found)
    if answer.status in ("OPTIMAL", "INFEASIBLE"):
        lower = value
    return Outcome(choice, value, max(lower, 0), len(part), _CP_SAT)


def _wider(found: Found, before: int) -> Margin:
    """The next margin, after a search and the work of the one before it.

    Work grows faster than the margin, the more so the more there is of it. Where lists are nearly as long as they may
    get, a wide step would be given up; a narrow one may find the optimum.
    """
    if found.looked < _CHEAP:
        growth = _FAST_GROWTH
    else:
        growth = _GROWTH if found.looked < min(max(_DEAR, 2 * before), _DEAREST) else _SLOW_GROWTH
    return Margin(
        room=int(found.room * growth) + 1,
        least_room=int(found.room * _SLOW_GROWTH) + 1,
        many=_LONGER * max(found.longest, _CHEAP),
    )


def _value(items: Ragged, choice: Ints) -> int:
    return int(items.values[choice].sum())


def _first_room(items: Ragged, bound: Bound, value: int) -> int:
    """Room within which a few dozen items at most are no default."""
    alternatives = bound.reduced[bound.reduced > 0]
    if len(alternatives) == 0:
        return 1
    rank = min(_FIRST, len(items.starts) // 8, len(alternatives) - 1)
    return max(int(np.partition(alternatives, rank)[rank]), value - bound.lower >> _FINEST) + 1


def better(items: Ragged, bound: Bound, value: int, margin: Margin, work: Work) -> Found:
    """The best choice within the limits and the margin whose value is below ``value``, or perhaps one a bit beyond.

    The reduced values of every choice within the margin sum to less than its room; all of those are
    enumerated, but for the ones that another one beats or equals in every cost and in value, and those that are bound
    to leave so much of the limits unused that they are not within the margin. So if a complete search finds nothing
    there, there is nothing. What it finds beyond, in ``REACH`` times the room, is a better incumbent, not an optimum.
    Where a list grows too long, or the work is spent, the search gives up.
    """
    default = items.first_minimum(bound.reduced)
    core = _core(items, bound, default, value, margin)
    try:
        grown = grown_lists(core, work)
    except GivenUpError:
        return Found(None, 0)
    best, complete, pairs = join(grown.left, grown.right, core.within(grown.room), work)
    room, looked = grown.room if complete else 0, len(grown.left) + len(grown.right) + pairs
    if best is None:
        return Found(None, room, looked, grown.longest)
    choice = default.copy()
    for states, at in zip((grown.left, grown.right), best, strict=True):
        picked = grown.tree.items(int(states.node[at]))
        choice[items.group[picked]] = picked
    return Found(choice, room, looked, grown.longest)


def _core(items: Ragged, bound: Bound, default: Ints, value: int, margin: Margin) -> Core:
    room = min(margin.room, value - bound.lower)
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
        below=value - int(items.values[default].sum()),
        room=room,
        least_room=margin.least_room,
        many=margin.many,
        reach=value - bound.lower,
        multipliers=bound.multipliers[limits],
    )


def _that_can_bind(costs: Ints, starts: Ints, free: Ints) -> Ints:
    """The limits that some choice of the alternatives breaks, which are dear to keep track of; one at least."""
    if len(starts) == 0:
        return np.arange(len(free))
    most = np.maximum(np.maximum.reduceat(costs, starts, axis=1), 0).sum(axis=1)
    binding = np.flatnonzero(most > free)
    return binding if len(binding) else np.zeros(1, dtype=np.int64)
