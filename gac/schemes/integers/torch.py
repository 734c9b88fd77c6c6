"""Rounding a matrix to few bits, so that what it makes of its inputs changes least.

GPTQ (arXiv 2210.17323): the columns are rounded one after the other, and what each one's rounding does to the output is
made up for by those that follow. With A = E[x x^T] and U^T U = A^-1, U upper triangular, the error e of column j takes
``e U[j, k] / U[j, j]`` from every column k behind it, and then costs ``(e / U[j, j])^2``. Each group's scale and zero
point are fitted when its first column comes, to the numbers as they are then: the range is narrowed in steps, and the
least of these costs wins.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gac.linalg import cholesky, damped
from gac.runtime.packed import dequantise

NARROWED = torch.linspace(1, 0.5, 21, dtype=torch.float64).tolist()[1:]
"""Parts of a group's range that are tried after the whole one, which wins where several are as good."""
DAMPING = 1e-2
TINY = torch.finfo(torch.float16).tiny
BLOCK = 128
"""Columns whose errors reach those behind the block in one product."""


@dataclass(frozen=True, eq=False)
class Numbers:
    """A matrix as whole numbers: ``scale * (number - zero)``.

    Attributes:
        numbers: uint8, shape ``(rows, columns)``.
        scale: float16, shape ``(rows, groups)``.
        zero: uint8, shape ``(rows, groups)``.
        size: neighbouring columns that have one scale; the last group may have fewer.
    """

    numbers: Tensor
    scale: Tensor
    zero: Tensor
    size: int

    def values(self, dtype: torch.dtype) -> Tensor:
        """The matrix ``(rows, columns)`` that they stand for: exact in float32, then rounded to the dtype."""
        return dequantise(self.numbers, self.scale, self.zero, self.size, dtype)


@dataclass(frozen=True, eq=False)
class Grid:
    """What some columns can be: ``scale * (number - zero)``, each a number a row, shape ``(rows, 1)``.

    Attributes:
        most: the largest number; the least is 0.
    """

    scale: Tensor
    zero: Tensor
    most: int

    def numbers(self, values: Tensor) -> Tensor:
        """Of the nearest that there are, of values ``(rows, columns)``, in their dtype."""
        return (values / self.scale).round_().add_(self.zero).clamp_(0, self.most)

    def nearest(self, values: Tensor) -> Tensor:
        """The nearest that there is, of values ``(rows, columns)``."""
        return self.numbers(values).sub_(self.zero).mul_(self.scale)


def fitted(values: Tensor, weighs: Tensor, bits: int, zero: bool) -> Grid:
    """The grid of least error for values ``(rows, columns)``.

    Args:
        weighs: how much a squared error counts, by column.
        zero: whether there is a zero point; without one the range is as long on both sides of zero.
    """
    most = 2**bits - 1
    low, high = values.amin(1, keepdim=True).clamp_max(0), values.amax(1, keepdim=True).clamp_min(0)
    if not zero:
        high = torch.maximum(high, -low)
        low = -high
    best = _grid(low, high, most, zero)
    least = _costs(best, values, weighs)
    for part in NARROWED:
        grid = _grid(part * low, part * high, most, zero)
        costs = _costs(grid, values, weighs)
        better = costs < least
        least = torch.where(better, costs, least)
        best = Grid(torch.where(better, grid.scale, best.scale), torch.where(better, grid.zero, best.zero), most)
    return best


def _costs(grid: Grid, values: Tensor, weighs: Tensor) -> Tensor:
    """What rounding to the grid costs each row, shape ``(rows, 1)``."""
    return ((grid.nearest(values) - values).square_() @ weighs)[:, None]


def _grid(low: Tensor, high: Tensor, most: int, zero: bool) -> Grid:
    """With a scale that 16 bits hold."""
    if not zero:  # one number fewer, so that there are as many on both sides
        scale = (2 * high / (most - 1)).half().double().clamp_min(TINY)
        return Grid(scale, torch.full_like(scale, (most + 1) // 2), most)
    scale = ((high - low) / most).half().double().clamp_min(TINY)
    return Grid(scale, (-low / scale).round().clamp(0, most), most)


def round_matrix(matrix: Tensor, inputs: Tensor | None, bits: int, group: int | None, zero: bool) -> Numbers:
    """The matrix ``(rows, columns)`` as it is stored.

    Args:
        inputs: E[x x^T] of what it is multiplied with, shape ``(columns, columns)``; None: every number by itself.
        group: columns that have one scale; None: all.
    """
    rows, columns = matrix.shape
    size = group or max(columns, 1)
    work = matrix.detach().double()
    if inputs is not None:
        return _with_feedback(work.clone(), damped(inputs, DAMPING), bits, size, zero)
    found = _Collected(rows, columns, size, work)
    for at in range(0, columns, size):
        part = work[:, at : at + size]
        grid = fitted(part, part.new_ones(part.shape[1]), bits, zero)
        found.grid(at, grid)
        found.numbers[:, at : at + size] = grid.numbers(part)
    return found.all()


class _Collected:
    """What was rounded so far."""

    def __init__(self, rows: int, columns: int, size: int, like: Tensor) -> None:
        groups = -(-columns // size)
        self.size = size
        self.numbers = like.new_zeros(rows, columns, dtype=torch.uint8)
        self.scale = like.new_zeros(rows, groups, dtype=torch.float16)
        self.zero = like.new_zeros(rows, groups, dtype=torch.uint8)

    def grid(self, at: int, grid: Grid) -> None:
        """Of the group that begins at a column."""
        self.scale[:, at // self.size], self.zero[:, at // self.size] = grid.scale[:, 0], grid.zero[:, 0]

    def all(self) -> Numbers:
        return Numbers(self.numbers, self.scale, self.zero, self.size)


def _with_feedback(work: Tensor, moment: Tensor, bits: int, size: int, zero: bool) -> Numbers:
    """Column by column; ``work`` is used up."""
    inverse = torch.cholesky_inverse(cholesky(moment))
    upper = cholesky(inverse).T  # U^T U = A^-1
    weighs, grid = upper.diagonal() ** -2, None
    columns = work.shape[1]
    collected = _Collected(len(work), columns, size, work)
    for start in range(0, columns, BLOCK):
        stop = min(start + BLOCK, columns)
        errors = torch.zeros_like(work[:, start:stop])
        for at in range(start, stop):
            if at % size == 0:
                group = slice(at, min(at + size, columns))
                grid = fitted(_made_up(work, errors, upper, start, at, group), weighs[group], bits, zero)
                collected.grid(at, grid)
            assert grid is not None
            found = grid.numbers(work[:, at : at + 1])
            collected.numbers[:, at] = found[:, 0]
            errors[:, at - start] = (work[:, at] - ((found - grid.zero) * grid.scale)[:, 0]) / upper[at, at]
            work[:, at + 1 : stop] -= errors[:, at - start, None] * upper[at, at + 1 : stop]
        work[:, stop:] -= errors @ upper[start:stop, stop:]
    return collected.all()


def _made_up(work: Tensor, errors: Tensor, upper: Tensor, start: int, at: int, group: slice) -> Tensor:
    """The columns of a group as they are now, those behind the block too, to which its errors have not come yet."""
    found, stop = work[:, group].clone(), min(start + BLOCK, work.shape[1])
    if group.stop > stop:
        found[:, stop - group.start :] -= errors[:, : at - start] @ upper[start:at, stop : group.stop]
    return found
