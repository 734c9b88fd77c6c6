"""Stored matrices as numbers and scales."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gac.schemes.feedback.levels import Levels


@dataclass(frozen=True, eq=False)
class Scaled:
    """Integers ``number * scale``, on both sides of zero, which other formats can store as they are.

    Attributes:
        numbers: int16, shape ``(rows, columns)``.
        scale: float16, shape ``(rows, groups)``.
        size: neighbouring columns with one scale; the last group may have fewer.
    """

    numbers: Tensor
    scale: Tensor
    size: int

    @staticmethod
    def of(values: Tensor, scale: Tensor, size: int) -> "Scaled":
        """From values ``(rows, columns)`` in float32, which are integers times the scale of their group."""
        return Scaled((values / _by_column(scale, size, values)).round().to(torch.int16), scale, size)

    def values(self) -> Tensor:
        """The matrix ``(rows, columns)``, float32."""
        return self.numbers * _by_column(self.scale, self.size, self.numbers)


@dataclass(frozen=True, eq=False)
class Grid:
    """``scale * (number - zero)``, everything in float32; training through quantisation moves the numbers.

    Attributes:
        numbers: shape ``(rows, columns)``.
        scale: shape ``(rows, groups)``.
        zero: shape ``(rows, groups)``.
        size: neighbouring columns with one scale; the last group may have fewer.
        levels: the values of a number.
    """

    numbers: Tensor
    scale: Tensor
    zero: Tensor
    size: int
    levels: Levels

    def values(self) -> Tensor:
        """The matrix ``(rows, columns)``."""
        scale, zero = (_by_column(values, self.size, self.numbers) for values in (self.scale, self.zero))
        return (self.numbers - zero) * scale

    @property
    def rescales(self) -> bool:
        """True if another scale is another grid; for floating-point numbers only the smallest ones change."""
        return not self.levels.floating


def _by_column(of_groups: Tensor, size: int, matrix: Tensor) -> Tensor:
    return of_groups.float().repeat_interleave(size, dim=1)[:, : matrix.shape[1]]
