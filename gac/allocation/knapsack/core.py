"""Exact search among the few items near the bound: two lists of partial choices, grown and then joined."""

from dataclasses import dataclass

import numpy as np

from gac.allocation.knapsack.bounds import Bound
from gac.allocation.knapsack.join import join
from gac.allocation.knapsack.ragged import Ragged
from gac.allocation.knapsack.states import States, Tree
from gac.allocation.pareto import front
from gac.sites import Floats, Ints

MOST_STATES = 1 << 18
MOST_CHILDREN = 1 << 20
_SIFT_FROM = 1 << 11
_BATCH = 1 << 21


@dataclass(frozen=True, eq=False)
class Core:
    """Items as deviations from the default choice (the item of each group whose reduced value is 0).

    Attributes:
        alternatives: positions of the items that are no default, shape ``(n,)``, group after group.
        starts: position in ``alternatives`` of each group's first, with the end appended; only groups that have one.
        costs: deviation under each limit, shape ``(limits, n)``.
        values: deviation of the value, shape ``(n,)``.
        reduced: reduced values, shape ``(n,)``.
        room: states whose reduced values sum to less are listed.
        reach: a choice that is looked for exceeds the bound by less.
        free: what the default choice leaves of each limit; negative where it breaks one.
        below: the deviation of a choice's value must be smaller.
        multipliers: the bound's.
    """

    alternatives: Ints
    starts: Ints
    costs: Ints
    values: Ints
    reduced: Ints
    room: int
    reach: int
    free: Ints
    below: int
    multipliers: Floats


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


def better(items: Ragged, bound: Bound, target: int, known: int) -> Found:
    """The best choice within the limits whose value is below ``target``, or failing that, perhaps one below ``known``.

    Every choice below the target has reduced values that sum to less than ``target - bound.lower``; all of those are
    enumerated, but for the ones that another one beats or equals in every cost and in value. So if a complete search
    finds nothing below the target, there is nothing. What it finds between target and known is a better incumbent,
    not an optimum. Where a list outgrows ``MOST_STATES`` the search gives up.
    """
    default = items.first_minimum(bound.reduced)
    core = _core(items, bound, default, target, known)
    tree = Tree()
    lists = [_Growing(tree.root(len(core.free)), _SIFT_FROM)] * 2
    for group in _hardest_first(core):
        shorter, longer = sorted(lists, key=lambda growing: len(growing.states))
        grown = _grown(shorter, core, group, tree)
        if grown is None:
            return Found(None, False, len(shorter.states) + len(longer.states))
        lists = [grown, longer]
    left, right = (growing.states for growing in lists)
    joined = join(left, right, core.free, core.below, core.room, core.reach, core.multipliers)
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
    instead = default[group]
    return Core(
        alternatives=alternatives,
        starts=np.append(np.flatnonzero(np.diff(group, prepend=-1)), len(group)),
        costs=items.costs[:, alternatives] - items.costs[:, instead],
        values=np.asarray(items.values[alternatives] - items.values[instead], dtype=np.int64),
        reduced=bound.reduced[alternatives],
        room=room,
        reach=known - bound.lower,
        free=items.slack - items.used(default),
        below=known - int(items.values[default].sum()),
        multipliers=bound.multipliers,
    )


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


def _grown(growing: _Growing, core: Core, group: int, tree: Tree) -> _Growing | None:
    """The list after one more group, without dominated states; None where it is too long.

    Under several limits dominated states are dear to find. Instances with many equal costs have so many that their
    lists stay short; where the first look finds few, the next is put off until the list would otherwise be too long.
    """
    if _children(growing.states, core, group) > MOST_CHILDREN:
        return None
    states, sift_from = _extended(growing.states, core, group, tree), growing.sift_from
    if len(core.free) == 1:
        states = _undominated(states)
    elif len(states) >= sift_from or len(states) > MOST_STATES:
        before = len(states)
        states = states.at(front(np.vstack([states.costs, states.values]).T))
        sift_from = len(states) if 4 * len(states) < 3 * before else MOST_STATES
    return _Growing(states, sift_from) if len(states) <= MOST_STATES else None


def _children(states: States, core: Core, group: int) -> int:
    """How many states the group adds."""
    reduced = core.reduced[core.starts[group] : core.starts[group + 1]]
    return int(np.searchsorted(np.sort(states.reduced), core.room - reduced).sum())


def _extended(states: States, core: Core, group: int, tree: Tree) -> States:
    """The states themselves (the group keeps its default), and each of them with each alternative that leaves room."""
    first, end = core.starts[group : group + 2].tolist()
    parts = [states]
    for batch in _batches(first, end, len(states)):
        which, parent = np.nonzero(states.reduced < core.room - core.reduced[batch, None])
        item = batch.start + which
        parts.append(
            States(
                states.costs[:, parent] + core.costs[:, item],
                states.values[parent] + core.values[item],
                states.reduced[parent] + core.reduced[item],
                tree.add(states.node[parent], core.alternatives[item]),
            )
        )
    return States.concatenated(parts)


def _batches(first: int, end: int, states: int) -> list[slice]:
    width = max(1, _BATCH // states)
    return [slice(start, min(end, start + width)) for start in range(first, end, width)]


def _undominated(states: States) -> States:
    """One limit: by rising cost, only states with a smaller value than all cheaper ones."""
    states = states.at(np.lexsort((states.values, states.costs[0])))
    lowest = np.minimum.accumulate(states.values)
    return states.at(np.append(True, states.values[1:] < lowest[:-1]))
