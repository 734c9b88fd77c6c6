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
MOST_CHILDREN = 1 << 21
_BEAM = 1 << 11
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
        room: the reduced values of a choice must sum to less.
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
    free: Ints
    below: int
    multipliers: Floats


@dataclass(frozen=True, eq=False)
class Found:
    """What a search came to.

    Attributes:
        choice: the best choice below the target (one item position a group), or None.
        complete: nothing was left out, so that the choice is optimal, or there is none below the target.
        work: how many states and pairs were looked at.
    """

    choice: Ints | None
    complete: bool
    work: int


def better(items: Ragged, bound: Bound, target: int) -> Found:
    """The best choice within the limits whose value is below ``target``.

    Every such choice has reduced values that sum to less than ``target - bound.lower``; all of those are enumerated,
    but for the ones that another one beats or equals in every cost and in value. A list that outgrows ``MOST_STATES``
    is cut to a beam, and the search is then not complete.
    """
    default = items.first_minimum(bound.reduced)
    core = _core(items, bound, default, target)
    tree = Tree()
    left = right = tree.root(len(core.free))
    complete = True
    for group in _hardest_first(core):
        shorter, longer = sorted((left, right), key=len)
        grown, whole = _grown(shorter, core, group, tree, complete)
        left, right, complete = grown, longer, complete and whole
    joined = join(left, right, core.free, core.below, core.room, core.multipliers)
    complete &= joined.complete
    work = len(left) + len(right) + joined.pairs
    if joined.best is None:
        return Found(None, complete, work)
    choice = default.copy()
    for states, at in zip((left, right), joined.best, strict=True):
        picked = tree.items(int(states.node[at]))
        choice[items.group[picked]] = picked
    return Found(choice, complete, work)


def _core(items: Ragged, bound: Bound, default: Ints, target: int) -> Core:
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
        free=items.slack - items.used(default),
        below=target - int(items.values[default].sum()),
        multipliers=bound.multipliers,
    )


def _hardest_first(core: Core) -> list[int]:
    """Groups by their least reduced value, the largest first: lists stay short until the last groups."""
    if len(core.alternatives) == 0:
        return []
    least = np.minimum.reduceat(core.reduced, core.starts[:-1])
    order: list[int] = np.argsort(-least, kind="stable").tolist()
    return order


def _grown(states: States, core: Core, group: int, tree: Tree, complete: bool) -> tuple[States, bool]:
    """The list after one more group, and whether it is whole; dominated states go where that is cheap or must be."""
    whole = _children(states, core, group) <= MOST_CHILDREN
    grown = _extended(states if whole else _beam(states), core, group, tree)
    if len(core.free) == 1:
        grown = _undominated(grown)
    elif complete and MOST_STATES < len(grown) <= 2 * MOST_STATES:
        grown = grown.at(front(np.vstack([grown.costs, grown.values]).T))
    if len(grown) <= MOST_STATES:
        return grown, whole
    return _beam(grown), False


def _children(states: States, core: Core, group: int) -> int:
    """How many states the group adds."""
    reduced = core.reduced[core.starts[group] : core.starts[group + 1]]
    return int(np.searchsorted(np.sort(states.reduced), core.room - reduced).sum())


def _beam(states: States) -> States:
    """A few states to go on with: half of them nearest the bound, half spread over the rest."""
    half = _BEAM // 2
    order = np.argsort(states.reduced, kind="stable")
    return states.at(np.append(order[:half], order[half :: len(order) // half + 1]))


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
