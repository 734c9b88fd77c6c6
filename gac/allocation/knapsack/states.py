"""Lists of partial choices, and the tree that remembers how each came about."""

from dataclasses import dataclass

import numpy as np

from gac.allocation.knapsack.ragged import Mask
from gac.core.arrays import Ints


@dataclass(frozen=True, eq=False)
class States:
    """Partial choices, as deviations from the default choice.

    One table, so that picking states is one indexing; its rows are the attributes.

    Attributes:
        costs: deviation under each limit, shape ``(limits, states)``.
        values: deviation of the value, shape ``(states,)``.
        reduced: sum of the reduced values, shape ``(states,)``.
        node: place in the tree of choices, shape ``(states,)``.
    """

    table: Ints

    def __len__(self) -> int:
        return int(self.table.shape[1])

    @property
    def costs(self) -> Ints:
        costs: Ints = self.table[:-3]
        return costs

    @property
    def values(self) -> Ints:
        values: Ints = self.table[-3]
        return values

    @property
    def reduced(self) -> Ints:
        reduced: Ints = self.table[-2]
        return reduced

    @property
    def node(self) -> Ints:
        node: Ints = self.table[-1]
        return node

    def least_reduced(self, otherwise: int) -> int:
        """The smallest reduced value of a state, at most ``otherwise``."""
        return int(self.reduced.min(initial=otherwise))

    def at(self, index: Ints | Mask) -> "States":
        return States(self.table[:, index])


class Tree:
    """Which item each state added to which other state; node 0 is the default choice."""

    def __init__(self) -> None:
        self._added = [np.zeros((2, 1), dtype=np.int64)]
        self._count = 1

    def root(self, limits: int) -> States:
        """The list of the default choice alone."""
        return States(np.zeros((limits + 3, 1), dtype=np.int64))

    def add(self, parents: Ints, items: Ints) -> Ints:
        """New nodes, each of one item added to a parent."""
        self._added.append(np.stack([parents, items]))
        self._count += len(items)
        return np.arange(self._count - len(items), self._count)

    def items(self, node: int) -> list[int]:
        """The items that a node deviates from the default choice by."""
        parents, items = np.concatenate(self._added, axis=1)
        found = []
        while node:
            found.append(int(items[node]))
            node = int(parents[node])
        return found
