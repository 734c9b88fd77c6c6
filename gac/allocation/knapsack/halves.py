"""Under several limits, two lists of partial choices, each without what others beat or what is bound to lose too much.

Common divisors of the costs, and all sums that the groups to come can still add, tell what that is (``outlook``).
"""

from collections.abc import Sequence

import numpy as np

from gac.allocation.knapsack.core import Core
from gac.allocation.knapsack.extension import MOST_STATES, extended, short
from gac.allocation.knapsack.outlook import Outlook, outlook
from gac.allocation.knapsack.states import States, Tree
from gac.allocation.knapsack.work import Work
from gac.allocation.pareto import front
from gac.core.arrays import Ints

_SIFT_FROM = 1 << 11
_BLOCK = 1 << 17
_LARGEST = 2.0**61


def grown_halves(core: Core, tree: Tree, work: Work) -> tuple[States, States, int, int]:
    """The shorter list takes its next group: the left one from the fine steps on, the right one from the coarse ones.

    So what is coarse remains for the left list for long, and it knows early what does not fit.

    Returns:
        Both lists, what is left of the room, and how many states the longest list had.
    """
    order = np.lexsort((-core.least, core.divisors)).tolist()
    left, right = _Half(core, order, tree), _Half(core, order[::-1], tree)
    room, longest = core.room, 0
    for _ in order:
        half = min(left, right, key=len)
        room = half.take(room, work)
        longest = max(longest, len(half))
    return left.states, right.states, room, longest


class _Half:
    """A list that takes one group after the other, and the outlooks on those that it lacks.

    The outlook on the coarsest limit tells its steps apart, and is there from the start. The one on all limits has
    wider cells, but few choices come to the right one under all of them. It is made once the list is long.

    Dominated states are dear to find. Instances with many equal costs have so many that their lists stay short; where
    a look finds few, the next is put off until the list is twice as long.
    """

    def __init__(self, core: Core, order: Sequence[int], tree: Tree) -> None:
        self.states = tree.root(len(core.free))
        self._core, self._tree, self._coming, self._sift_from = core, tree, list(order), _SIFT_FROM
        coarsest, self._priced = np.array([core.coarsest]), np.flatnonzero(core.multipliers)
        self._outlooks = [self._outlook(coarsest, core.gcds[coarsest])]

    def __len__(self) -> int:
        return len(self.states)

    def take(self, room: int, work: Work) -> int:
        """Extend the list by the next group; without states that have no room for what the others are bound to add.

        Returns:
            The room; where the list has more than ``many`` states, only as much as leaves so many of them.
        """
        core = self._core
        grown = extended(self.states, core, self._coming.pop(0), self._tree, room, work)
        grown = grown.at(self._bound(grown) < room)
        if len(grown) >= _SIFT_FROM and len(self._outlooks) == 1 < len(self._priced):
            self._outlooks.append(self._joint_outlook(room))
            grown = grown.at(self._bound(grown) < room)
        if len(grown) >= min(self._sift_from, MOST_STATES):
            grown = self._undominated(grown, work)
        if len(grown) > core.many and room > core.least_room:
            bound = self._bound(grown)
            room = max(core.least_room, int(np.partition(bound, core.many)[core.many]))
            grown = grown.at(bound < room)
        self.states = short(grown)
        return room

    def _bound(self, states: States) -> Ints:
        """How far above the instance's bound every choice with these states is."""
        bound, coming = states.reduced, len(self._coming)
        for ahead in self._outlooks:
            bound = np.maximum(bound, states.reduced + ahead.added(states.costs, coming))
        return bound

    def _undominated(self, states: States, work: Work) -> States:
        """Less what others beat; says how long the list may get before the next look."""
        kept = _sifted(states, work)
        few = 4 * len(kept) >= 3 * len(states)
        self._sift_from = max(_SIFT_FROM, 2 * len(kept) if few else len(kept))
        return kept

    def _joint_outlook(self, room: int) -> Outlook:
        """On all limits that it costs something to leave unused; a cell spans about what there is room to leave."""
        gcds = self._core.gcds[self._priced]
        most = np.minimum(room / self._core.multipliers[self._priced], _LARGEST)
        return self._outlook(self._priced, np.maximum(most / gcds, 1).astype(np.int64) * gcds)

    def _outlook(self, limits: Ints, widths: Ints) -> Outlook:
        core = self._core
        groups = [slice(*core.starts[group : group + 2].tolist()) for group in self._coming]
        costs, free, multipliers = core.steps[limits], core.free[limits], core.multipliers[limits]
        return outlook(limits, costs, core.reduced, groups, free, multipliers, widths)


def _sifted(states: States, work: Work) -> States:
    """Several limits: without the states that one of the same block (half a second's work) beats or equals."""
    points = np.vstack([states.costs, states.values]).T
    work.steps += points.size
    size = max(_BLOCK >> 2 * (points.shape[1] - 3), _SIFT_FROM)
    kept = np.ones(len(points), dtype=np.bool_)
    for start in range(0, len(points), size):
        if work.spent:
            break
        kept[start : start + size] = front(points[start : start + size])
    return states.at(kept)
