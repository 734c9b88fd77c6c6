"""Two lists of partial choices that hold all groups between them, without dominated and hopeless ones."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gac.allocation.knapsack.relaxation import GroupRelaxation, group_relaxation
from gac.allocation.knapsack.states import MOST_STATES, Core, States, Tree, Work, extended
from gac.allocation.pareto import nondominated
from gac.core.arrays import Ints

_SIFT_FROM = 1 << 11
_BLOCK = 1 << 17
_LARGEST = 2.0**61


@dataclass(frozen=True, eq=False)
class Lists:
    """Both lists, the tree of their choices, the room that is left, and the length of the longest list."""

    left: States
    right: States
    tree: Tree
    room: int
    longest: int


def grown_lists(core: Core, work: Work) -> Lists:
    """Return lists that hold between them every choice within the room, or a better one.

    The shorter list takes its next group. Under several limits the left one goes from groups with fine steps in cost to
    coarse ones, the right one the other way: what is coarse remains for the left list for long, which knows early
    what does not fit.

    Raises:
        GivenUpError: a list is too long, or the work is spent.
    """
    tree, room, longest = Tree(), core.room, 0
    if len(core.free) == 1:
        left, right = tree.root(1), tree.root(1)
        for group in np.argsort(-core.least, kind="stable").tolist():
            if len(left) <= len(right):
                left = _undominated(extended(left, core, group, tree, room, work))
            else:
                right = _undominated(extended(right, core, group, tree, room, work))
        return Lists(left, right, tree, room, max(len(left), len(right)))
    order = np.lexsort((-core.least, core.divisors)).tolist()
    halves = _Half(core, order, tree), _Half(core, order[::-1], tree)
    for _ in order:
        half = min(halves, key=len)
        room = half.take(room, work)
        longest = max(longest, len(half))
    return Lists(halves[0].states, halves[1].states, tree, room, longest)


def _undominated(states: States) -> States:
    order = np.lexsort((states.values, states.costs[0]))
    values = states.values[order]
    fresh = np.ones(len(order), dtype=np.bool_)
    fresh[1:] = values[1:] < np.minimum.accumulate(values)[:-1]
    return states.pick(order[fresh]).check_length()


class _Half:
    """A list that takes one group after the other, and the group relaxations of those that it lacks.

    The relaxation of the coarsest limit tells its steps apart, and is there from the start. The one of all limits has
    wider cells, but few choices come to the right one under all of them. It is made once the list is long.

    Dominated states are dear to find. Instances with many equal costs have so many that their lists stay short; where
    a look finds few, the next is put off until the list is twice as long.
    """

    def __init__(self, core: Core, order: Sequence[int], tree: Tree) -> None:
        self.states = tree.root(len(core.free))
        self._core, self._tree, self._remaining, self._sift_from = core, tree, list(order), _SIFT_FROM
        coarsest, self._priced = np.array([core.coarsest]), np.flatnonzero(core.multipliers)
        self._relaxations = [self._relaxation(coarsest, core.gcds[coarsest])]

    def __len__(self) -> int:
        return len(self.states)

    def take(self, room: int, work: Work) -> int:
        """Extend the list by its next group; return the room, less where the list has more than ``many`` states."""
        core = self._core
        grown = extended(self.states, core, self._remaining.pop(0), self._tree, room, work)
        grown = grown.pick(self._bound(grown) < room)
        if len(grown) >= _SIFT_FROM and len(self._relaxations) == 1 < len(self._priced):
            self._relaxations.append(self._joint_relaxation(room))
            grown = grown.pick(self._bound(grown) < room)
        if len(grown) >= min(self._sift_from, MOST_STATES):
            grown = self._sifted(grown, work)
        if len(grown) > core.many and room > core.least_room:
            bound = self._bound(grown)
            room = max(core.least_room, int(np.partition(bound, core.many)[core.many]))
            grown = grown.pick(bound < room)
        self.states = grown.check_length()
        return room

    def _bound(self, states: States) -> Ints:
        bound = states.reduced
        for relaxation in self._relaxations:
            bound = np.maximum(bound, states.reduced + relaxation.lower_bound(states.costs, len(self._remaining)))
        return bound

    def _sifted(self, states: States, work: Work) -> States:
        points = np.vstack([states.costs, states.values]).T
        work.steps += points.size
        size = max(_BLOCK >> 2 * (points.shape[1] - 3), _SIFT_FROM)
        mask = np.ones(len(points), dtype=np.bool_)
        for start in range(0, len(points), size):
            if work.spent:
                break
            mask[start : start + size] = nondominated(points[start : start + size])
        rest = states.pick(mask)
        few = 4 * len(rest) >= 3 * len(states)
        self._sift_from = max(_SIFT_FROM, 2 * len(rest) if few else len(rest))
        return rest

    def _joint_relaxation(self, room: int) -> GroupRelaxation:
        """Of all limits with a multiplier; a cell spans about what the room allows to leave unused."""
        gcds = self._core.gcds[self._priced]
        most = np.minimum(room / self._core.multipliers[self._priced], _LARGEST)
        return self._relaxation(self._priced, np.maximum(most / gcds, 1).astype(np.int64) * gcds)

    def _relaxation(self, limits: Ints, widths: Ints) -> GroupRelaxation:
        core = self._core
        groups = [slice(*core.starts[group : group + 2].tolist()) for group in self._remaining]
        costs, free, multipliers = core.steps[limits], core.free[limits], core.multipliers[limits]
        return group_relaxation(limits, costs, core.reduced, groups, free, multipliers, widths)
