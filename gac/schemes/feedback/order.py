"""The order in which the columns of a matrix are quantised, and the compensation of each one's error by later ones."""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from gac.core.linalg import cholesky, damped, identity_like

T = TypeVar("T")
DAMPING = 1e-2
"""Of A and of G, see ``gac.core.linalg.damped``."""
COLUMNS = 128
"""Columns whose errors reach later columns in one product."""


@dataclass(frozen=True, eq=False)
class Inputs:
    """Statistics of the inputs of a matrix ``(rows, columns)``, shared by several matrices and schemes.

    Attributes:
        moment: E[x x^T], shape ``(columns, columns)``.
        thorough: optimise the result; a price alone does not need it.
    """

    moment: Tensor
    thorough: bool = True
    _results: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    def once(self, key: Hashable, make: Callable[[Tensor], T]) -> T:
        if key not in self._results:
            self._results[key] = make(self.moment)
        return cast(T, self._results[key])


@dataclass(frozen=True, eq=False)
class Layout:
    """Columns in groups of equal size, padded where a group is not full.

    Attributes:
        columns: the column at each position, shape ``(groups, size)``; ``count`` where there is none.
        width: columns that are quantised at a time; divides the size.
        count: number of columns.
    """

    columns: Tensor
    width: int
    count: int

    @staticmethod
    def of(inputs: Tensor, size: int) -> "Layout":
        """Columns in groups of ``size``, those of large inputs first: their errors need most compensation."""
        columns, strength = len(inputs), inputs.diagonal()
        size = min(size, columns)
        parts = -(-size // COLUMNS)
        width = -(-size // parts)
        grouped = torch.full((-(-columns // size), parts * width), columns, device=inputs.device)
        for group, start in zip(grouped, range(0, columns, size), strict=True):
            order = strength[start : start + size].argsort(descending=True, stable=True)
            group[: len(order)] = start + order
        return Layout(grouped, width, columns)

    def grouped(self, matrix: Tensor) -> Tensor:
        """The columns of a matrix ``(rows, columns)`` by group, padded with zeros: ``(rows, groups, size)``."""
        return pad(matrix, (0, 1))[:, self.columns]

    @cached_property
    def filled(self) -> Tensor:
        return (self.columns.flatten() < self.count).nonzero()[:, 0]

    def ungrouped(self, values: Tensor) -> Tensor:
        """Numbers ``(rows, groups, size)`` in the order of the matrix, ``(rows, columns)``."""
        matrix = values.new_zeros(len(values), self.count)
        matrix[:, self.columns.flatten()[self.filled]] = values.flatten(1)[:, self.filled]
        return matrix

    def square(self, matrix: Tensor) -> Tensor:
        """A matrix ``(columns, columns)`` in this order, padded with the identity."""
        square = torch.eye(self.columns.numel(), dtype=matrix.dtype, device=matrix.device)
        columns = self.columns.flatten()[self.filled]
        square[self.filled[:, None], self.filled] = matrix[columns[:, None], columns]
        return square

    def parts(self, group: int) -> Iterator[tuple[slice, slice]]:
        """The pieces of a group: their positions in the group, and in all."""
        size = self.columns.shape[1]
        for start in range(0, size, self.width):
            yield slice(start, start + self.width), slice(group * size + start, group * size + start + self.width)


@dataclass(frozen=True, eq=False)
class Order:
    """The order in which columns are quantised, and what A implies for it.

    Attributes:
        moment: A, damped, in this order, shape ``(size, size)``.
        ahead: share of a column's error that each later one compensates, ``U[j, k] / U[j, j]``, shape ``(size, size)``.
        weights: of a squared error of each column after compensation by later ones, by group.
    """

    layout: Layout
    moment: Tensor
    ahead: Tensor
    weights: Tensor

    @staticmethod
    def of(moment: Tensor, size: int) -> "Order":
        """From A, shape ``(columns, columns)``, in groups of so many columns."""
        layout = Layout.of(moment, size)
        square = layout.square(firm(moment))
        root = root_of(square)
        return Order(layout, square, ahead_of(root), (root.diagonal() ** -2).view(layout.columns.shape))


def firm(moment: Tensor) -> Tensor:
    return damped(moment, DAMPING)


def root_of(moment: Tensor) -> Tensor:
    """U, upper triangular, with U^T U the inverse of a moment ``(size, size)``.

    With R R^T the moment and R upper triangular, U is the inverse of R.
    """
    upper = cholesky(moment.flip(0, 1)).flip(0, 1)
    root: Tensor = torch.linalg.solve_triangular(upper, identity_like(upper), upper=True)
    return root


def ahead_of(root: Tensor) -> Tensor:
    """U, its rows over its diagonal, above the diagonal."""
    return (root / root.diagonal()[:, None]).triu(1)
