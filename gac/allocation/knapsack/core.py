"""Exact search among the few items near the bound: two lists of partial choices, grown and then joined."""

from dataclasses import dataclass

import numpy as np

from gac.allocation.knapsack.bounds import Bound
from gac.allocation.knapsack.deadline import Deadline
from gac.allocation.knapsack.join import Wanted, join
from gac.allocation.knapsack.ragged import Ragged
from gac.allocation.knapsack.states import States, Tree
from gac.allocation.pareto import front
from gac.sites import Ints

MOST_STATES = 1 << 18
MOST_CHILDREN = 1 << 20
_SIFT_FROM = 1 << 11
_BLOCK = 1 << 17
_BATCH = 1 << 21


@dataclass(frozen=True, eq=False)
class Core:
    """Items as deviations from the default choice (the item of each group whose reduced value is 0).

    Attributes:
        alternatives: positions of the items that are no default, shape ``(n,)``, group after group.
        starts: position in ``alternatives`` of each group's first, with the end appended; only groups that have one.
        steps: what each adds to a state's costs (under the limits that can bind), value and reduced values, and a row
            for its node, shape ``(limits + 3, n)``.
        reduced: reduced values, shape ``(n,)``.
        wanted: which choices are looked for.
    """

    alternatives: Ints
    starts: Ints
    steps: Ints
    reduced: Ints
    wanted: Wanted


@dataclass(frozen=True, eq=False)
class Found:
    """What a search came to.

    Attributes:
        choice: the best choice found (one item position a group), or None.
        complete: no choice below the target was left out.
        work: how many states and pairs were looked at.
    """

    choice: Ints | None
    complete: bool
    work: int


def better(items: Ragged, bound: Bound, target: int, known: int, deadline: Deadline) -> Found:
    """The best choice within the limits whose value is below ``target``, or failing that, perhaps one below ``known``.

    Every choice below the target has reduced values that sum to less than ``target - bound.lower``; all of those are
    enumerated, but for the ones that another one beats or equals in every cost and in value. So if a complete search
    finds nothing below the target, there is nothing. What it finds between target and known is a better incumbent,
    not an optimum. Where a list outgrows ``MOST_STATES``, or the deadline passes, the search gives up.
    """
    default = items.first_minimum(bound.reduced)
    core = _core(items, bound, default, target, known)
    tree = Tree()
    lists = [_Growing(tree.root(len(core.wanted.free)), _SIFT_FROM)] * 2
    for group in _hardest_first(core):
        shorter, longer = sorted(lists, key=lambda growing: len(growing.states))
        grown = _grown(shorter, core, group, tree, deadline)
        if grown is None:
            return Found(None, False, len(shorter.states) + len(longer.states))
        lists = [grown, longer]
    left, right = (growing.states for growing in lists)
    joined = join(left, right, core.wanted, deadline)
    work = len(left) + len(right) + joined.pairs
    if joined.best is None:
        return Found(None, joined.complete, work)
    choice = default.copy()
    for states, at in zip((left, right), joined.best, strict=True):
        picked = tree.items(int(states.node[at]))
        choice[items.group[picked]] = picked
    return Found(choice, joined.complete, work)


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
        wanted=Wanted(
            free=free[limits],
            below=known - int(items.values[default].sum()),
            room=room,
            reach=known - bound.lower,
            multipliers=bound.multipliers[limits],
        ),
    )


def _that_can_bind(costs: Ints, starts: Ints, free: Ints) -> Ints:
    """The limits that some choice of the alternatives breaks, which are dear to keep track of; one at least."""
    if len(starts) == 0:
        return np.arange(len(free))
    most = np.maximum(np.maximum.reduceat(costs, starts, axis=1), 0).sum(axis=1)
    binding = np.flatnonzero(most > free)
    return binding if len(binding) else np.zeros(1, dtype=np.int64)


def _hardest_first(core: Core) -> list[int]:
    """Groups by their least reduced value, the largest first: lists stay short until the last groups."""
    if len(core.alternatives) == 0:
        return []
    least = np.minimum.reduceat(core.reduced, core.starts[:-1])
    order: list[int] = np.argsort(-least, kind="stable").tolist()
    return order


@dataclass(frozen=True, eq=False)
class _Growing:
    """A list, and the length from which it is worth looking for dominated states under several limits."""

    states: States
    sift_from: int


def _grown(growing: _Growing, core: Core, group: int, tree: Tree, deadline: Deadline) -> _Growing | None:
    """The list after one more group, without dominated states; None where it is too long, or past the deadline.

    Under several limits dominated states are dear to find. Instances with many equal costs have so many that their
    lists stay short; where the first look finds few, the next is put off until the list would otherwise be too long.
    """
    if deadline.passed or _children(growing.states, core, group) > MOST_CHILDREN:
        return None
    states, sift_from = _extended(growing.states, core, group, tree), growing.sift_from
    if len(core.wanted.free) == 1:
        states = _undominated(states)
    elif len(states) >= sift_from or len(states) > MOST_STATES:
        before = len(states)
        states = _sifted(states, deadline)
        sift_from = len(states) if 4 * len(states) < 3 * before else MOST_STATES
    return _Growing(states, sift_from) if len(states) <= MOST_STATES else None


def _children(states: States, core: Core, group: int) -> int:
    """How many states the group adds at most; counted only where that could be too many."""
    reduced = core.reduced[core.starts[group] : core.starts[group + 1]]
    if len(reduced) * len(states) <= MOST_CHILDREN:
        return len(reduced) * len(states)
    return int(np.searchsorted(np.sort(states.reduced), core.wanted.room - reduced).sum())


def _extended(states: States, core: Core, group: int, tree: Tree) -> States:
    """The states themselves (the group keeps its default), and each of them with each alternative that leaves room."""
    first, end = core.starts[group : group + 2].tolist()
    parts = [states.table]
    for batch in _batches(first, end, len(states)):
        which, parent = np.nonzero(states.reduced < core.wanted.room - core.reduced[batch, None])
        item = batch.start + which
        added = states.table[:, parent] + core.steps[:, item]
        added[-1] = tree.add(states.node[parent], core.alternatives[item])
        parts.append(added)
    return States(np.concatenate(parts, axis=1))


def _batches(first: int, end: int, states: int) -> list[slice]:
    width = max(1, _BATCH // states)
    return [slice(start, min(end, start + width)) for start in range(first, end, width)]


def _sifted(states: States, deadline: Deadline) -> States:
    """Several limits: without the states that one of the same block (half a second's work) beats or equals."""
    points = np.vstack([states.costs, states.values]).T
    size = max(_BLOCK >> 2 * (points.shape[1] - 3), _SIFT_FROM)
    kept = np.ones(len(points), dtype=np.bool_)
    for start in range(0, len(points), size):
        if deadline.passed:
            break
        kept[start : start + size] = front(points[start : start + size])
    return states.at(kept)


def _undominated(states: States) -> States:
    """One limit: by rising cost, only states with a smaller value than all cheaper ones."""
    order = np.lexsort((states.values, states.costs[0]))
    values = states.values[order]
    fresh = np.ones(len(order), dtype=np.bool_)
    fresh[1:] = values[1:] < np.minimum.accumulate(values)[:-1]
    return states.at(order[fresh])
