"""A rounded matrix as whole numbers and scales: what other formats of whole numbers can carry as it is."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Scaled:
    """``number * scale``, numbers on both sides of zero.

    Attributes:
        numbers: int16, shape ``(rows, columns)``.
        scale: float16, shape ``(rows, groups)``.
        size: neighbouring columns that have one scale; the last group may have fewer.
    """

    numbers: Tensor
    scale: Tensor
    size: int

    @staticmethod
    def of(values: Tensor, scale: Tensor, size: int) -> "Scaled":
        """Of values ``(rows, columns)`` in float32, which are whole numbers times the scale of their group."""
        return Scaled((values / _of_columns(scale, size, values)).round().to(torch.int16), scale, size)

    def values(self) -> Tensor:
        """The matrix ``(rows, columns)`` that they stand for, float32."""
        return self.numbers * _of_columns(self.scale, self.size, self.numbers)


def _of_columns(scale: Tensor, size: int, matrix: Tensor) -> Tensor:
    """The scale of each column of a matrix, float32, of its shape."""
    return scale.float().repeat_interleave(size, dim=1)[:, : matrix.shape[1]]
