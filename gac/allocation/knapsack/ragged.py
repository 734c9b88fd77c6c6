"""Groups of items kept end to end in flat arrays: the data that every step of the knapsack works on."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from gac.core.arrays import Floats, Ints

Mask = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Ragged:
    """Items of all groups, group after group.

    Attributes:
        values: loss of each item, shape ``(items,)``: float64 as given, int64 once scaled.
        costs: cost of each item under each limit, shape ``(limits, items)``.
        starts: position of each group's first item, shape ``(groups,)``.
        origin: index that the item had in its group as given, shape ``(items,)``.
        slack: what each limit leaves above the costs' zero, shape ``(limits,)``.
    """

    values: Floats | Ints
    costs: Ints
    starts: Ints
    origin: Ints
    slack: Ints

    def __len__(self) -> int:
        return len(self.values)

    @cached_property
    def sizes(self) -> Ints:
        """Items in each group."""
        return np.diff(self.starts, append=len(self.values))

    @cached_property
    def group(self) -> Ints:
        """Group of each item."""
        return np.repeat(np.arange(len(self.starts)), self.sizes)

    @cached_property
    def cheapest(self) -> Ints:
        """Lowest cost in each group, shape ``(limits, groups)``."""
        return np.minimum.reduceat(self.costs, self.starts, axis=1)

    def keep(self, mask: Mask) -> "Ragged":
        """The items under the mask; every group keeps one at least."""
        if mask.all():
            return self
        sizes = np.add.reduceat(mask, self.starts, dtype=np.int64)
        assert sizes.all(), "a group lost its last item"
        starts = np.cumsum(sizes) - sizes
        return replace(
            self, values=self.values[mask], costs=self.costs[:, mask], starts=starts, origin=self.origin[mask]
        )

    def used(self, choice: Ints) -> Ints:
        """Cost of a choice (one item position a group) under each limit."""
        used: Ints = self.costs[:, choice].sum(axis=1)
        return used

    def first_minimum(self, values: Floats | Ints) -> Ints:
        """Position of each group's smallest entry; the first one where they tie. Shape ``(groups,)``."""
        lowest = np.minimum.reduceat(values, self.starts)
        at = np.flatnonzero(values == lowest[self.group])
        _, first = np.unique(self.group[at], return_index=True)
        found: Ints = at[first]
        return found
