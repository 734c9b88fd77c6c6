"""Two lists of partial choices, all groups between them, without dominated and hopeless ones; and their join."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd

import numpy as np

from gac.allocation.knapsack.relaxation import GroupRelaxation, unused_value
from gac.allocation.pareto import nondominated
from gac.core.arrays import Floats, Ints

STEPS = 1 << 21
"""Steps of a unit of work, which takes a core about a second."""
REACH = 2
MOST_STATES = 1 << 18
MOST_CHILDREN = 1 << 20

States = Ints
"""Partial choices as deviations from the default one, a column each: costs, then the rows VALUE, REDUCED and NODE."""
VALUE, REDUCED, NODE = -3, -2, -1

_SIFT_FROM = 1 << 11
_APART = 1 << 12
_MOST_KINDS = 8
_BLOCK = 1 << 17
_LARGEST = 2.0**61
MOST_PAIRS = 1 << 26
_BATCH = 1 << 21
_CLASS = 256
_UP = 1 + 2.0**-40


class GivenUpError(Exception):
    """A list grew beyond ``MOST_STATES``, or the work is spent."""


@dataclass
class Work:
    """Units of work that may be done, and the steps done: counted, not timed, so that slow machines choose the same."""

    limit: float
    steps: int = 0

    @property
    def remaining(self) -> float:
        return self.limit - self.steps / STEPS

    @property
    def spent(self) -> bool:
        return self.remaining <= 0

    def __str__(self) -> str:
        return f"{self.steps / STEPS:.3g} of {self.limit:g} units of work"


@dataclass(frozen=True, eq=False)
class Core:
    """Items as deviations from the default choice (in each group the item of reduced value 0), and the margin.

    Attributes:
        alternatives: positions of the other items, shape ``(n,)``, group after group.
        starts: position in ``alternatives`` of each group's first, with the end appended; only groups that have one.
        steps: what each alternative adds to a state, ``(limits + 3, n)``; costs only under limits that can bind.
        free: what the default choice leaves of each limit that can bind; negative where it breaks one.
        below: the deviation of a choice's value must be smaller.
        room: only choices whose reduced values sum to less are sure to be considered.
        least_room: room that is never given up.
        many: states of a list beyond which, under several limits, the room shrinks.
        reach: a choice whose deviation is just ``below`` exceeds the bound by as much.
        multipliers: the bound's, of each of these limits.
    """

    alternatives: Ints
    starts: Ints
    steps: States
    free: Ints
    below: int
    room: int
    least_room: int
    many: int
    reach: int
    multipliers: Floats

    @property
    def root(self) -> States:
        return np.zeros((len(self.free) + 3, 1), dtype=np.int64)

    @property
    def reduced(self) -> Ints:
        reduced: Ints = self.steps[REDUCED]
        return reduced

    @cached_property
    def least(self) -> Ints:
        return np.minimum.reduceat(self.reduced, self.starts[:-1]) if len(self.reduced) else self.reduced

    @cached_property
    def gcds(self) -> Ints:
        """The greatest common divisor of all costs under each limit; 1 where they are 0."""
        gcds: Ints = np.maximum(np.gcd.reduce(self.steps[: len(self.free)], axis=1), 1)
        return gcds

    @cached_property
    def coarsest(self) -> int:
        """The limit under which the greatest common divisor of all costs is worth most."""
        return int(np.argmax(self.multipliers * self.gcds))

    @cached_property
    def divisors(self) -> Ints:
        """The greatest common divisor of each group's costs under the coarsest limit."""
        return np.gcd.reduceat(self.steps[self.coarsest], self.starts[:-1]) if len(self.reduced) else self.reduced

    def within(self, room: int) -> "Core":
        spared = max(0, self.reach - REACH * room)
        return replace(self, room=room, reach=self.reach - spared, below=self.below - spared)


class Tree:
    """The item that each state added to another one; node 0 is the default choice."""

    def __init__(self) -> None:
        self._added = [np.zeros((2, 1), dtype=np.int64)]
        self._count = 1

    def add(self, parents: Ints, items: Ints) -> Ints:
        self._added.append(np.stack([parents, items]))
        self._count += len(items)
        return np.arange(self._count - len(items), self._count)

    def items(self, node: int) -> list[int]:
        parents, items = np.concatenate(self._added, axis=1)
        path = []
        while node:
            path.append(int(items[node]))
            node = int(parents[node])
        return path


def _extended(states: States, core: Core, group: int, tree: Tree, room: int, work: Work) -> States:
    """The states (with the group's default), and each of them with each alternative that leaves room."""
    first, end = core.starts[group : group + 2].tolist()
    children = (end - first) * int(states.shape[1])
    if children > MOST_CHILDREN:
        children = int(np.searchsorted(np.sort(states[REDUCED]), room - core.reduced[first:end]).sum())
    if work.spent or children > MOST_CHILDREN:
        raise GivenUpError
    parts = [states]
    width = max(1, _BATCH // max(1, states.shape[1]))
    for start in range(first, end, width):
        batch = slice(start, min(end, start + width))
        which, parent = np.nonzero(states[REDUCED] < room - core.reduced[batch, None])
        if len(which):
            item = batch.start + which
            added = states[:, parent] + core.steps[:, item]
            added[NODE] = tree.add(states[NODE, parent], core.alternatives[item])
            parts.append(added)
    grown = np.concatenate(parts, axis=1) if len(parts) > 1 else states
    work.steps += grown[:VALUE].size
    return grown


@dataclass(frozen=True, eq=False)
class Searched:
    """Result of the search of one margin.

    Attributes:
        choice: the best one (one item position a group), or None.
        room: every better choice, except ``choice``, exceeds the bound by this or more; 0 where the search gave up.
        looked: the number of states and pairs that were examined.
        longest: states of the longest list.
    """

    choice: Ints | None
    room: int
    looked: int = 0
    longest: int = 0


def best_choice(core: Core, work: Work) -> Searched:
    """Find the best choice within the room, in lists that hold between them every such choice, or a better one.

    The shorter list takes its next group. Under several limits the left one goes from groups with fine steps in cost to
    coarse ones, the right one the other way: what is coarse remains for the left list for long, which knows early
    what does not fit.

    Returns:
        As its choice the items that it takes instead of the default ones; as room 0 where the join is incomplete.

    Raises:
        GivenUpError: a list is too long, or the work is spent.
    """
    tree, room = Tree(), core.room
    if len(core.free) == 1:
        left, right = _single_limit_lists(core, tree, work)
        longest = max(left.shape[1], right.shape[1])
    else:
        order, longest = np.lexsort((-core.least, core.divisors)).tolist(), 0
        halves = _Half(core, order, tree), _Half(core, order[::-1], tree)
        for _ in order:
            half = min(halves, key=len)
            room = half.take(room, work)
            longest = max(longest, len(half))
        left, right = (half.states for half in halves)
    core, best, complete, pairs, items = core.within(room), None, True, 0, None
    if left.shape[1] and right.shape[1]:
        join = _join_single if len(core.free) == 1 else _join_several
        best, complete, pairs = join(left, right, core, work)
    if best is not None:
        path = [*tree.items(int(left[NODE, best[0]])), *tree.items(int(right[NODE, best[1]]))]
        items = np.array(path, dtype=np.int64)
    return Searched(items, room if complete else 0, left.shape[1] + right.shape[1] + pairs, longest)


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
    left, right = _with_waste(core.root, core, 1, step), core.root
    spare = room - int(left[REDUCED].min(initial=room))
    for place, group in enumerate(order):
        if least[group] >= spare:
            continue
        if left.shape[1] <= right.shape[1] or (place < apart and left.shape[1] < _APART):
            left, before = _undominated(_extended(left, core, group, tree, room, work)), step
            step = gcd(right_step, gcds[place + 1])
            left = _with_waste(left, core, before, step)
            spare = room - int(left[REDUCED].min(initial=room))
        else:
            right = _undominated(_extended(right, core, group, tree, spare, work))
            right_step = gcd(right_step, divisors[group])
    return left, right


def _with_waste(states: States, core: Core, before: int, step: int) -> States:
    """The states within the room once their reduced values have the waste of ``step``, not of the step before."""
    if step in (before, 0):
        return states
    unused, multiplier, states = core.free[0] - states[0], float(core.multipliers[0]), states.copy()
    states[REDUCED] += least_waste(unused, step, multiplier) - least_waste(unused, before, multiplier)
    return states[:, states[REDUCED] < core.room]


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


def _checked_length(states: States) -> States:
    if states.shape[1] > MOST_STATES:
        raise GivenUpError
    return states


def _undominated(states: States) -> States:
    order = np.lexsort((states[VALUE], states[0]))
    values = states[VALUE, order]
    fresh = np.ones(len(order), dtype=np.bool_)
    fresh[1:] = values[1:] < np.minimum.accumulate(values)[:-1]
    return _checked_length(states[:, order[fresh]])


class _Half:
    """A list that takes one group after the other, and the group relaxations of those that it lacks.

    The relaxation of the coarsest limit tells its steps apart, and is there from the start. The one of all limits has
    wider cells, but few choices come to the right one under all of them. It is made once the list is long.

    Dominated states are dear to find. Instances with many equal costs have so many that their lists stay short; where
    a look finds few, the next is put off until the list is twice as long.
    """

    def __init__(self, core: Core, order: Sequence[int], tree: Tree) -> None:
        self.states = core.root
        self._core, self._tree, self._remaining, self._sift_from = core, tree, list(order), _SIFT_FROM
        coarsest, self._priced = np.array([core.coarsest]), np.flatnonzero(core.multipliers)
        self._relaxations = [self._relaxation(coarsest, core.gcds[coarsest])]

    def __len__(self) -> int:
        return int(self.states.shape[1])

    def take(self, room: int, work: Work) -> int:
        """Extend the list by its next group; return the room, less where the list has more than ``many`` states."""
        core = self._core
        grown = _extended(self.states, core, self._remaining.pop(0), self._tree, room, work)
        grown = grown[:, self._bound(grown) < room]
        if grown.shape[1] >= _SIFT_FROM and len(self._relaxations) == 1 < len(self._priced):
            self._relaxations.append(self._joint_relaxation(room))
            grown = grown[:, self._bound(grown) < room]
        if grown.shape[1] >= min(self._sift_from, MOST_STATES):
            grown = self._sifted(grown, work)
        if grown.shape[1] > core.many and room > core.least_room:
            bound = self._bound(grown)
            room = max(core.least_room, int(np.partition(bound, core.many)[core.many]))
            grown = grown[:, bound < room]
        self.states = _checked_length(grown)
        return room

    def _bound(self, states: States) -> Ints:
        bound: Ints = states[REDUCED]
        for relaxation in self._relaxations:
            added = relaxation.lower_bound(states[:VALUE], len(self._remaining))
            bound = np.maximum(bound, states[REDUCED] + added)
        return bound

    def _sifted(self, states: States, work: Work) -> States:
        points = states[:REDUCED].T
        work.steps += points.size
        size = max(_BLOCK >> 2 * (points.shape[1] - 3), _SIFT_FROM)
        mask = np.ones(len(points), dtype=np.bool_)
        for start in range(0, len(points), size):
            if work.spent:
                break
            mask[start : start + size] = nondominated(points[start : start + size])
        count = int(mask.sum())
        self._sift_from = max(_SIFT_FROM, 2 * count if 4 * count >= 3 * len(mask) else count)
        return states[:, mask]

    def _joint_relaxation(self, room: int) -> GroupRelaxation:
        """Of all limits with a multiplier; a cell spans about what the room allows to leave unused."""
        gcds = self._core.gcds[self._priced]
        most = np.minimum(room / self._core.multipliers[self._priced], _LARGEST)
        return self._relaxation(self._priced, np.maximum(most / gcds, 1).astype(np.int64) * gcds)

    def _relaxation(self, limits: Ints, widths: Ints) -> GroupRelaxation:
        core = self._core
        groups = [slice(*core.starts[group : group + 2].tolist()) for group in self._remaining]
        costs, free, multipliers = core.steps[limits], core.free[limits], core.multipliers[limits]
        return GroupRelaxation(limits, costs, core.reduced, groups, free, multipliers, widths)


# --- the join -------------------------------------------------------------------------------------------------------


Joined = tuple[tuple[int, int] | None, bool, int]
"""The positions in left and right of the pair whose costs sum to at most ``free`` with the smallest sum of values, if
that is below ``below``; true if the join is complete; and the pairs that were looked at."""


def _join_single(left: States, right: States, core: Core, work: Work) -> Joined:
    order = np.argsort(right[0], kind="stable")
    values = right[VALUE, order]
    lowest = np.minimum.accumulate(values)
    fitting = np.searchsorted(right[0, order], core.free[0] - left[0], side="right")
    fits = np.flatnonzero(fitting)
    total = left[VALUE, fits] + lowest[fitting[fits] - 1]
    if total.min(initial=core.below) >= core.below:
        return None, True, left.shape[1]
    best = int(total.argmin())
    partner = np.flatnonzero(values[: fitting[fits[best]]] == lowest[fitting[fits[best]] - 1])[0]
    return (int(fits[best]), int(order[partner])), True, left.shape[1]


def _join_several(left: States, right: States, core: Core, work: Work) -> Joined:
    """Only the pairs that use nearly all of the limit whose use is tightest; incomplete once there are too many.

    A choice with reduced values R that leaves u of a limit unused has a value of at least bound + R + multiplier * u,
    so u < (reach - R) / multiplier. The right list is cut into classes of similar R, which keeps that window narrow.
    """
    best, below, pairs = None, core.below, 0
    tightest = int(np.argmax(core.multipliers * (np.ptp(left[:VALUE], axis=1) + np.ptp(right[:VALUE], axis=1))))
    multiplier = float(core.multipliers[tightest])
    by_reduced = np.argsort(right[REDUCED], kind="stable")
    for members in np.array_split(by_reduced, max(1, right.shape[1] // _CLASS)):
        members = members[np.argsort(right[tightest, members], kind="stable")]
        least = int(right[REDUCED, members].min()) + left[REDUCED]
        rows = np.flatnonzero(least < core.room)
        most = core.free[tightest] - left[tightest, rows]
        first, end = _window(right[tightest, members], most, core.reach - least[rows], multiplier)
        pairs += int((end - first).sum())
        work.steps += left.shape[1] + int((end - first).sum())
        if pairs > MOST_PAIRS or work.spent:
            return best, False, pairs
        for a, b in _pairs(rows, first, end):
            b = members[b]
            total = left[VALUE, a] + right[VALUE, b]
            better = np.flatnonzero(total < below)
            a, b, total = a[better], b[better], total[better]
            fits = np.flatnonzero((left[:VALUE, a] + right[:VALUE, b] <= core.free[:, None]).all(axis=0))
            if len(fits):
                first_best = fits[total[fits].argmin()]
                best, below = (int(a[first_best]), int(b[first_best])), int(total[first_best])
    return best, True, pairs


def _window(costs: Ints, most: Ints, spare: Ints, multiplier: float) -> tuple[Ints, Ints]:
    """Bounds of the rising ``costs`` that are at most ``most``, and leave no more unused than ``spare`` is worth."""
    end = np.searchsorted(costs, most, side="right")
    if multiplier == 0.0:
        return np.zeros_like(end), end
    unused = spare / multiplier * _UP + 1
    first = np.searchsorted(costs, most - np.minimum(unused, _LARGEST).astype(np.int64), side="left")
    return np.where(unused < _LARGEST, first, 0), end


def _pairs(rows: Ints, first: Ints, end: Ints) -> Iterator[tuple[Ints, Ints]]:
    ends = np.cumsum(end - first)
    start = 0
    while start < len(rows):
        done = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, done + _BATCH, side="right")))
        sizes = (end - first)[start:stop]
        offsets = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        yield np.repeat(rows[start:stop], sizes), np.repeat(first[start:stop], sizes) + offsets
        start = stop
