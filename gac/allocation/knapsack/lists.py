"""Two lists of partial choices that hold all groups between them, without dominated and hopeless ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np

from gac.allocation.knapsack.relaxation import GroupRelaxation, group_relaxation, unused_value
from gac.allocation.knapsack.states import MOST_STATES, Core, States, Tree, Work, extended
from gac.allocation.pareto import nondominated
from gac.core.arrays import Ints

_SIFT_FROM = 1 << 11
_APART = 1 << 12
_MOST_KINDS = 8
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
        left, right = _single_limit_lists(core, tree, work)
        return Lists(left, right, tree, room, max(len(left), len(right)))
    order = np.lexsort((-core.least, core.divisors)).tolist()
    halves = _Half(core, order, tree), _Half(core, order[::-1], tree)
    for _ in order:
        half = min(halves, key=len)
        room = half.take(room, work)
        longest = max(longest, len(half))
    return Lists(halves[0].states, halves[1].states, tree, room, longest)


def _single_limit_lists(core: Core, tree: Tree, work: Work) -> tuple[States, States]:
    """The shorter list takes the next group; but groups that hide a large common divisor go to the left one.

    From then on each of its states tells how much of the limit a choice with it leaves unused at least. That counts as
    part of its reduced value, and the least of them is room that the right list has not either.
    """
    room = core.room
    order, gcds = divisor_order(core.divisors, core.least)
    divisors, least = core.divisors.tolist(), core.least.tolist()
    # Most partial choices leave more unused than the room allows where the step is so wide.
    wide = (place for place, step in enumerate(gcds[: len(gcds) // 2]) if step * core.multipliers[0] >= 2 * room)
    apart = next(wide, 0)
    step, right_step = gcds[0], 0
    left, right = _with_waste(tree.root(1), core, 1, step), tree.root(1)
    spare = room - int(left.reduced.min(initial=room))
    for place, group in enumerate(order):
        if least[group] >= spare:
            continue
        if len(left) <= len(right) or (place < apart and len(left) < _APART):
            left, before = _undominated(extended(left, core, group, tree, room, work)), step
            step = gcd(right_step, gcds[place + 1])
            left = _with_waste(left, core, before, step)
            spare = room - int(left.reduced.min(initial=room))
        else:
            right = _undominated(extended(right, core, group, tree, spare, work))
            right_step = gcd(right_step, divisors[group])
    return left, right


def _with_waste(states: States, core: Core, before: int, step: int) -> States:
    """The states within the room once their reduced values have the waste of ``step``, not of the step before."""
    if step in (before, 0):
        return states
    unused, multiplier, table = core.free[0] - states.costs[0], float(core.multipliers[0]), states.table.copy()
    table[-2] += least_waste(unused, step, multiplier) - least_waste(unused, before, multiplier)
    return States(table[:, table[-2] < core.room])


def least_waste(unused: Ints, step: int, multiplier: float) -> Ints:
    """Return the least loss of partial choices that leave so much unused, if all costs to come are multiples of step.

    In the end they leave what they leave now, modulo ``step``, or more.
    """
    return unused_value(unused % step, multiplier)


def divisor_order(divisors: Ints, hardness: Ints) -> tuple[list[int], list[int]]:
    """Order the groups so that the greatest common divisor of those still to come is soon a large one.

    From the end: the commonest divisor, before it the one that has most in common with it, and so on through the few
    commonest, then the others; among equals those with the largest ``hardness`` first.

    Returns:
        The order, and the greatest common divisor of the groups from each place on (0 past the end).
    """
    kinds, counts = np.unique(divisors, return_counts=True)
    common = np.argsort(-counts, kind="stable")[:_MOST_KINDS]
    remaining = dict(zip(kinds[common].tolist(), counts[common].tolist(), strict=True))
    place, shared = np.zeros(len(divisors), dtype=np.int64), 0
    while remaining:
        kind = max(remaining, key=lambda other: (gcd(shared, other) if shared else 0, remaining[other]))
        shared = gcd(shared, kind)
        place[divisors == kind] = len(remaining)
        del remaining[kind]
    order = np.lexsort((-hardness, place))
    gcds = np.gcd.accumulate(divisors[order][::-1])[::-1]
    return order.tolist(), [*gcds.tolist(), 0]


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
