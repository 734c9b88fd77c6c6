"""Matrices as numbers and scales, and their quantisation."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import pad

from gac.schemes.feedback.levels import Levels, fitted_to_blocks
from gac.schemes.feedback.order import Inputs
from gac.schemes.feedback.rounding import quantise


@dataclass(frozen=True, eq=False)
class Grid:
    """``scale * (number - zero)``, everything in float32; training through quantisation moves the numbers.

    Attributes:
        numbers: shape ``(rows, columns)``.
        scale, zero: shape ``(rows, groups)``.
        size: neighbouring columns with one scale; the last group may have fewer.
        levels: the values of a number.
    """

    numbers: Tensor
    scale: Tensor
    zero: Tensor
    size: int
    levels: Levels

    @property
    def signed(self) -> Tensor:
        return self.numbers - self._by_column(self.zero)

    def values(self) -> Tensor:
        return self.signed * self._by_column(self.scale)

    def _by_column(self, of_groups: Tensor) -> Tensor:
        return of_groups.repeat_interleave(self.size, dim=1)[:, : self.numbers.shape[1]]


def quantise_matrix(
    matrix: Tensor,
    inputs: Inputs | None,
    levels: Levels,
    group: int | None,
    gradients: Tensor | None = None,
    height: int = 1,
) -> Grid:
    """The quantised matrix ``(rows, columns)``; without ``inputs`` every number by itself.

    ``group`` columns of ``height`` rows have one scale, or all columns. Without ``gradients``, E[g g^T] of those of its
    output, ``(rows, rows)``, errors of all outputs count alike, and add up.
    """
    rows, columns = matrix.shape
    size, work = group or max(columns, 1), matrix.detach().double()
    if inputs is not None and matrix.numel():
        numbers, scale, zeros = quantise(work, inputs, levels, size, gradients, height)
    else:
        groups = pad(work, (0, -columns % size)).view(rows, -(-columns // size), size)
        scale, zeros = fitted_to_blocks(levels, groups, height)
        numbers = levels.rounded(groups, scale, zeros).flatten(1)[:, :columns]
        scale, zeros = scale[..., 0], zeros[..., 0]
    return Grid(numbers.float(), scale.float(), zeros.float(), size, levels)
