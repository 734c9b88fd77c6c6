"""A stored matrix as numbers of a format with scales and zero points: what training through rounding moves it on."""

from dataclasses import dataclass

from torch import Tensor

from gac.schemes.feedback.levels import Levels


@dataclass(frozen=True, eq=False)
class Grid:
    """``scale * (number - zero)``, everything in float32.

    Attributes:
        numbers: shape ``(rows, columns)``.
        scale: shape ``(rows, groups)``.
        zero: shape ``(rows, groups)``.
        size: neighbouring columns that have one scale; the last group may have fewer.
        levels: what a number can be.
    """

    numbers: Tensor
    scale: Tensor
    zero: Tensor
    size: int
    levels: Levels

    def values(self) -> Tensor:
        """The matrix ``(rows, columns)`` that they stand for."""
        columns = self.numbers.shape[1]
        scale, zero = (one.repeat_interleave(self.size, 1)[:, :columns] for one in (self.scale, self.zero))
        return (self.numbers - zero) * scale

    @property
    def rescales(self) -> bool:
        """Whether another scale is another grid: of floating-point numbers it moves the smallest ones alone."""
        return not self.levels.floating
