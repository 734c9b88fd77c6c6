"""What is searched: items as deviations from a default choice, and how far above the bound to look."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from gac.core.arrays import Floats, Ints

REACH = 2


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
        least_room: room that is never given up.
        many: states of a list beyond which, under several limits, the room shrinks.
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
    least_room: int
    many: int
    reach: int
    multipliers: Floats

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
        """The same with so much room, and with a reach of no more than ``REACH`` times that."""
        spared = max(0, self.reach - REACH * room)
        return replace(self, room=room, reach=self.reach - spared, below=self.below - spared)
