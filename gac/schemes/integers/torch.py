"""A matrix as whole numbers of few bits."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gac.runtime.plain.modeling_gac import dequantise
from gac.schemes.feedback.rounding import rounded
from gac.schemes.grid import Grid
from gac.schemes.inputs import Inputs
from gac.schemes.integers.grids import fitted
from gac.schemes.integers.whole import Whole


@dataclass(frozen=True, eq=False)
class Numbers:
    """A matrix as whole numbers: ``scale * (number - zero)``.

    Attributes:
        numbers: uint8, shape ``(rows, columns)``.
        scale: float16, of 8 significant bits, shape ``(rows, groups)``.
        zero: uint8, shape ``(rows, groups)``.
        size: neighbouring columns that have one scale; the last group may have fewer.
    """

    numbers: Tensor
    scale: Tensor
    zero: Tensor
    size: int

    @property
    def signed(self) -> Tensor:
        """Numbers of 8 bits less the zero in their middle, int8 ``(rows, columns)``."""
        return (self.numbers.short() - 128).to(torch.int8)

    def values(self, dtype: torch.dtype) -> Tensor:
        """The matrix ``(rows, columns)`` that they stand for: exact in float32, then rounded to the dtype."""
        return dequantise(self.numbers, self.scale, self.zero, self.size, dtype)


def of_grid(grid: Grid) -> Numbers:
    """A grid's numbers as they are stored."""
    return Numbers(grid.numbers.to(torch.uint8), grid.scale.half(), grid.zero.to(torch.uint8), grid.size)


def grid_of_signed(signed: Tensor, scale: Tensor) -> Grid:
    """Of ``Numbers.signed`` and the scale of each row."""
    zero = torch.full_like(scale, 128, dtype=torch.float32)
    return Grid(signed.float() + 128, scale.float(), zero, max(signed.shape[1], 1), Whole(255, zero=False))


def round_matrix(
    matrix: Tensor, inputs: Inputs | None, bits: int, group: int | None, zero: bool, gradients: Tensor | None = None
) -> Numbers:
    """The matrix ``(rows, columns)`` as it is stored.

    Args:
        inputs: None: every number by itself.
        group: columns that have one scale; None: all.
        gradients: E[g g^T] of the gradients of what it makes, shape ``(rows, rows)``; None: errors of all outputs count
            alike, and add up.
    """
    rows, columns = matrix.shape
    size, work = group or max(columns, 1), matrix.detach().double()
    if inputs is not None and matrix.numel():
        numbers, scale, zeros = rounded(work, inputs, Whole(2**bits - 1, zero), size, gradients)
    else:
        groups = torch.nn.functional.pad(work, (0, -columns % size)).view(rows, -1, size)
        grid = fitted(groups, groups.new_ones(size), 2**bits - 1, zero)
        numbers, scale, zeros = grid.numbers(groups), grid.scale[..., 0], grid.zero[..., 0]
        numbers = numbers.reshape(rows, -1)[:, :columns]
    return Numbers(numbers.to(torch.uint8), scale.half(), zeros.to(torch.uint8), size)
