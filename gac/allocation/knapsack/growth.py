"""Two lists of partial choices that hold all groups between them, each without what another one beats.

Divisors of the costs tell how much of a limit a partial choice is bound to leave unused; under several limits, so do
all sums that the groups to come can still add (``outlook``).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd

import numpy as np

from gac.allocation.knapsack.deadline import Deadline
from gac.allocation.knapsack.outlook import least_worth, outlook
from gac.allocation.knapsack.states import States, Tree
from gac.allocation.pareto import front
from gac.arrays import Floats, Ints

MOST_STATES = 1 << 18
MOST_CHILDREN = 1 << 20
_SIFT_FROM = 1 << 11
_APART = 1 << 12
_BLOCK = 1 << 17
_BATCH = 1 << 21
_MOST_KINDS = 8


class GivenUpError(Exception):
    """A list grew beyond ``MOST_STATES``, or the deadline passed; ``work`` is how many states there were by then."""

    def __init__(self, work: int) -> None:
        super().__init__(f"given up at {work} states")
        self.work = work


@dataclass(frozen=True, eq=False)
class Core:
    """Items as deviations from the default choice (in each group the item of reduced value 0), and what is wanted.

    Attributes:
        alternatives: positions of the items that are no default, shape ``(n,)``, group after group.
        starts: position in ``alternatives`` of each group's first, with the end appended; only groups that have one.
        steps: what each adds to a state's costs (under the limits that can bind), value and reduced values, and a row
            for its node, shape ``(limits + 3, n)``.
        reduced: reduced values, shape ``(n,)``.
        free: what the default choice leaves of each limit that can bind; negative where it breaks one.
        below: the deviation of a choice's value must be smaller.
        room: only choices whose reduced values sum to less are sure to be considered.
        reach: a choice whose deviation is just ``below`` exceeds the bound by as much.
        multipliers: the bound's, of each of these limits.
    """

    alternatives: Ints
    starts: Ints
    steps: Ints
    reduced: Ints
    free: Ints
    below: int
    room: int
    reach: int
    multipliers: Floats

    @cached_property
    def least(self) -> Ints:
        """The smallest reduced value of each group."""
        return np.minimum.reduceat(self.reduced, self.starts[:-1]) if len(self.reduced) else self.reduced

    @cached_property
    def coarsest(self) -> int:
        """The limit under which the greatest common divisor of all costs is worth most."""
        return int(np.argmax(self.multipliers * np.gcd.reduce(self.steps[: len(self.free)], axis=1)))

    @cached_property
    def divisors(self) -> Ints:
        """The greatest common divisor of each group's costs under the coarsest limit."""
        return np.gcd.reduceat(self.steps[self.coarsest], self.starts[:-1]) if len(self.reduced) else self.reduced


def grown_lists(core: Core, deadline: Deadline) -> tuple[States, States, Tree]:
    """The lists, and the tree that tells their choices.

    Raises:
        GivenUpError: a list is too long, or the deadline passed.
    """
    tree = Tree()
    grow = _under_one_limit if len(core.free) == 1 else _under_several_limits
    return *grow(core, tree, deadline), tree


def _under_one_limit(core: Core, tree: Tree, deadline: Deadline) -> tuple[States, States]:
    """The shorter list takes the next group; but what stands in the way of a large common divisor goes to the left.

    From then on each state there tells how much of the limit a choice with it is bound to waste. That counts as part
    of its reduced value, and what the least of them comes to is room that the right list has not got either.
    """
    room = core.room
    order, coming = by_divisor(core.divisors, core.least)
    divisors, least = core.divisors.tolist(), core.least.tolist()
    # Most partial choices waste more than the room there is where the step is so wide.
    wide = (place for place, step in enumerate(coming[: len(coming) // 2]) if step * core.multipliers[0] >= 2 * room)
    apart = next(wide, 0)
    step, by_right = coming[0], 0
    left, right = _wasting(tree.root(1), core, 1, step), tree.root(1)
    spare = room - left.least_reduced(room)
    for place, group in enumerate(order):
        if least[group] >= spare:
            continue
        if len(left) <= len(right) or (place < apart and len(left) < _APART):
            left, before = _undominated(_extended(left, core, group, tree, room, deadline)), step
            step = gcd(by_right, coming[place + 1])
            left = _wasting(left, core, before, step)
            spare = room - left.least_reduced(room)
        else:
            right = _undominated(_extended(right, core, group, tree, spare, deadline))
            by_right = gcd(by_right, divisors[group])
    return left, right


def _wasting(states: States, core: Core, before: int, step: int) -> States:
    """The states with room left once their reduced values tell what ``step`` wastes, not what the one before did."""
    if step in (before, 0):
        return states
    unused, multiplier, table = core.free[0] - states.costs[0], float(core.multipliers[0]), states.table.copy()
    table[-2] += wasted(unused, step, multiplier) - wasted(unused, before, multiplier)
    return States(table[:, table[-2] < core.room])


def wasted(unused: Ints, step: int, multiplier: float) -> Ints:
    """What partial choices that leave so much ``unused`` lose at least if all costs to come are multiples of ``step``.

    In the end they leave what they leave now, modulo ``step``, or more; and a choice has a value of at least the bound,
    plus its reduced values, plus ``multiplier`` times what it leaves.
    """
    return least_worth(unused % step, multiplier)


def _under_several_limits(core: Core, tree: Tree, deadline: Deadline) -> tuple[States, States]:
    """The shorter list takes its next group: the left one from the fine steps on, the right one from the coarse ones.

    So what is coarse remains for the left list for long, and it knows early what does not fit.
    """
    order = np.lexsort((-core.least, core.divisors)).tolist()
    left, right = _Half(core, order, tree), _Half(core, order[::-1], tree)
    for _ in order:
        min(left, right, key=len).take(deadline)
    return left.states, right.states


class _Half:
    """Under several limits, a list that takes one group after the other, and the outlook on those that it lacks.

    Dominated states are dear to find. Instances with many equal costs have so many that their lists stay short; where
    a look finds few, the next is put off until the list is twice as long.
    """

    def __init__(self, core: Core, order: Sequence[int], tree: Tree) -> None:
        self.states = tree.root(len(core.free))
        self._core, self._order, self._tree, self._taken, self._sift_from = core, order, tree, 0, _SIFT_FROM
        groups, limit = [slice(*core.starts[group : group + 2].tolist()) for group in order], core.coarsest
        free, multiplier = int(core.free[limit]), float(core.multipliers[limit])
        self._outlook = outlook(core.steps[limit], core.reduced, groups, free, multiplier)

    def __len__(self) -> int:
        return len(self.states)

    def take(self, deadline: Deadline) -> None:
        """Extend the list by the next group; without states that have no room for what the others are bound to add."""
        core = self._core
        grown = _extended(self.states, core, self._order[self._taken], self._tree, core.room, deadline)
        self._taken += 1
        grown = grown.at(grown.reduced + self._outlook.added(grown.costs[core.coarsest], self._taken) < core.room)
        if (before := len(grown)) >= min(self._sift_from, MOST_STATES):
            grown = _sifted(grown, deadline)
            self._sift_from = max(_SIFT_FROM, len(grown) if 4 * len(grown) < 3 * before else 2 * len(grown))
        self.states = _short(grown)


def _short(states: States) -> States:
    if len(states) > MOST_STATES:
        raise GivenUpError(len(states))
    return states


def _extended(states: States, core: Core, group: int, tree: Tree, room: int, deadline: Deadline) -> States:
    """The states themselves (the group keeps its default), and each of them with each alternative that leaves room."""
    first, end = core.starts[group : group + 2].tolist()
    if deadline.passed or _children(states, core.reduced[first:end], room) > MOST_CHILDREN:
        raise GivenUpError(len(states))
    parts = [states.table]
    width = max(1, _BATCH // max(1, len(states)))
    for start in range(first, end, width):
        batch = slice(start, min(end, start + width))
        which, parent = np.nonzero(states.reduced < room - core.reduced[batch, None])
        if len(which) == 0:
            continue
        item = batch.start + which
        added = states.table[:, parent] + core.steps[:, item]
        added[-1] = tree.add(states.node[parent], core.alternatives[item])
        parts.append(added)
    return States(np.concatenate(parts, axis=1)) if len(parts) > 1 else states


def _children(states: States, reduced: Ints, room: int) -> int:
    """How many states a group adds at most; counted only where that could be too many."""
    if len(reduced) * len(states) <= MOST_CHILDREN:
        return len(reduced) * len(states)
    return int(np.searchsorted(np.sort(states.reduced), room - reduced).sum())


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
    """One limit: by rising cost, only states with a smaller value than all cheaper ones.

    Raises:
        GivenUpError: they are too many.
    """
    order = np.lexsort((states.values, states.costs[0]))
    values = states.values[order]
    fresh = np.ones(len(order), dtype=np.bool_)
    fresh[1:] = values[1:] < np.minimum.accumulate(values)[:-1]
    return _short(states.at(order[fresh]))


def by_divisor(divisors: Ints, hardness: Ints) -> tuple[list[int], list[int]]:
    """An order of the groups in which the greatest common divisor of those still to come is soon a large one.

    From the end: the commonest divisor, before it the one that has most in common with it, and so on through the few
    commonest, then the others; among equals those with the largest ``hardness`` first.

    Returns:
        The order, and the greatest common divisor of the groups from each place on (0 past the end).
    """
    kinds, counts = np.unique(divisors, return_counts=True)
    common = np.argsort(-counts, kind="stable")[:_MOST_KINDS]
    left = dict(zip(kinds[common].tolist(), counts[common].tolist(), strict=True))
    place, shared = np.zeros(len(divisors), dtype=np.int64), 0
    while left:
        kind = max(left, key=lambda one: (gcd(shared, one) if shared else 0, left[one]))
        shared = gcd(shared, kind)
        place[divisors == kind] = len(left)
        del left[kind]
    order = np.lexsort((-hardness, place))
    coming = np.gcd.accumulate(divisors[order][::-1])[::-1]
    return order.tolist(), [*coming.tolist(), 0]
