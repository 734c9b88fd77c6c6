"""Lists of partial choices, and the tree that remembers how each came about."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gac.allocation.knapsack.ragged import Mask
from gac.sites import Ints


@dataclass(frozen=True, eq=False)
class States:
    """Partial choices, as deviations from the default choice.

    Attributes:
        costs: deviation under each limit, shape ``(limits, states)``.
        values: deviation of the value, shape ``(states,)``.
        reduced: sum of the reduced values, shape ``(states,)``.
        node: place in the tree of choices, shape ``(states,)``.
    """

    costs: Ints
    values: Ints
    reduced: Ints
    node: Ints

    def __len__(self) -> int:
        return len(self.values)

    def at(self, index: Ints | Mask) -> "States":
        return States(self.costs[:, index], self.values[index], self.reduced[index], self.node[index])

    @staticmethod
    def concatenated(parts: Sequence["States"]) -> "States":
        return States(
            np.concatenate([part.costs for part in parts], axis=1),
            np.concatenate([part.values for part in parts]),
            np.concatenate([part.reduced for part in parts]),
            np.concatenate([part.node for part in parts]),
        )


class Tree:
    """Which item each state added to which other state; node 0 is the default choice."""

    def __init__(self) -> None:
        self._parents = [np.zeros(1, dtype=np.int64)]
        self._items = [np.zeros(1, dtype=np.int64)]
        self._count = 1

    def root(self, limits: int) -> States:
        """The list of the default choice alone."""
        zero = np.zeros(1, dtype=np.int64)
        return States(np.zeros((limits, 1), dtype=np.int64), zero, zero, zero)

    def add(self, parents: Ints, items: Ints) -> Ints:
        """New nodes, each of one item added to a parent."""
        self._parents.append(parents)
        self._items.append(items)
        nodes = np.arange(self._count, self._count + len(items))
        self._count += len(items)
        return nodes

    def items(self, node: int) -> list[int]:
        """The items that a node deviates from the default choice by."""
        parents, items = np.concatenate(self._parents), np.concatenate(self._items)
        found = []
        while node:
            found.append(int(items[node]))
            node = int(parents[node])
        return found
