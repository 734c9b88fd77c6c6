"""The columns of a matrix in the order in which they are rounded."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

COLUMNS = 128
"""Columns whose errors reach those behind them in one product."""


@dataclass(frozen=True, eq=False)
class Layout:
    """Groups of equal size, with places that hold no column where a group is not full.

    Attributes:
        at: shape ``(groups, size)``: the column that stands there; where there is none, their number.
        width: columns that are rounded at a time; divides the size.
        count: of columns.
    """

    at: Tensor
    width: int
    count: int

    @staticmethod
    def of(inputs: Tensor, size: int) -> "Layout":
        """Within a group those of large inputs come first: there is most to make up for.

        Args:
            inputs: E[x x^T], shape ``(columns, columns)``.
            size: neighbouring columns of a group.
        """
        columns, strength = len(inputs), inputs.diagonal()
        size = min(size, columns)
        parts = -(-size // COLUMNS)
        width = -(-size // parts)
        at = torch.full((-(-columns // size), parts * width), columns, device=inputs.device)
        for own, start in zip(at, range(0, columns, size), strict=True):
            order = strength[start : start + size].argsort(descending=True, stable=True)
            own[: len(order)] = start + order
        return Layout(at, width, columns)

    def columns(self, matrix: Tensor) -> Tensor:
        """Those of a matrix ``(rows, columns)`` by group, zeros where there is none: ``(rows, groups, size)``."""
        return pad(matrix, (0, 1))[:, self.at]

    @property
    def pieces(self) -> int:
        """Of a group: so many columns are rounded at a time."""
        return self.at.shape[1] // self.width

    def in_pieces(self, values: Tensor) -> Tensor:
        """From ``(rows, groups, size)`` to ``(rows, groups * pieces, width)``."""
        return values.reshape(len(values), -1, self.width)

    def in_groups(self, values: Tensor) -> Tensor:
        """From ``(rows, groups * pieces, n)`` to ``(rows, groups, pieces * n)``."""
        return values.reshape(len(values), len(self.at), -1)

    @cached_property
    def there(self) -> Tensor:
        """The places that hold a column."""
        return (self.at.flatten() < self.count).nonzero()[:, 0]

    def back(self, values: Tensor) -> Tensor:
        """Numbers ``(rows, groups, size)`` in the order of the columns, ``(rows, columns)``."""
        found = values.new_zeros(len(values), self.count)
        found[:, self.at.flatten()[self.there]] = values.flatten(1)[:, self.there]
        return found

    def square(self, matrix: Tensor) -> Tensor:
        """A matrix ``(columns, columns)`` in this order, as the identity where there is no column."""
        found = torch.eye(self.at.numel(), dtype=matrix.dtype, device=matrix.device)
        columns = self.at.flatten()[self.there]
        found[self.there[:, None], self.there] = matrix[columns[:, None], columns]
        return found

    def parts(self, group: int) -> Iterator[tuple[slice, slice]]:
        """What is rounded at a time of a group: where in the group, and where in all."""
        size = self.at.shape[1]
        for start in range(0, size, self.width):
            yield slice(start, start + self.width), slice(group * size + start, group * size + start + self.width)
