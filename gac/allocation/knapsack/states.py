"""Partial choices: the core that is searched, lists of states, and the work that is counted."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from gac.core.arrays import Floats, Ints

STEPS = 1 << 21
"""Steps of a unit of work, which takes a core about a second."""
REACH = 2
MOST_STATES = 1 << 18
MOST_CHILDREN = 1 << 20
_BATCH = 1 << 21

States = Ints
"""Partial choices as deviations from the default one, a column each: costs, then the rows VALUE, REDUCED and NODE."""
VALUE, REDUCED, NODE = -3, -2, -1


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
        """The default choice."""
        return np.zeros((len(self.free) + 3, 1), dtype=np.int64)

    @property
    def reduced(self) -> Ints:
        reduced: Ints = self.steps[REDUCED]
        return reduced

    @cached_property
    def least(self) -> Ints:
        """The smallest reduced value of each group."""
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


def check_length(states: States) -> States:
    """Return the states; raise ``GivenUpError`` where they are too many."""
    if states.shape[1] > MOST_STATES:
        raise GivenUpError
    return states


def extended(states: States, core: Core, group: int, tree: Tree, room: int, work: Work) -> States:
    """Return the states (with the group's default), and each of them with each alternative that leaves room."""
    first, end = core.starts[group : group + 2].tolist()
    if work.spent or _children(states, core.reduced[first:end], room) > MOST_CHILDREN:
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


def _children(states: States, reduced: Ints, room: int) -> int:
    if (most := len(reduced) * int(states.shape[1])) <= MOST_CHILDREN:
        return most
    return int(np.searchsorted(np.sort(states[REDUCED]), room - reduced).sum())
