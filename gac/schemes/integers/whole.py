"""Whole numbers from 0 on, rounded with feedback."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gac.schemes.feedback.levels import Levels
from gac.schemes.feedback.order import Order
from gac.schemes.integers import descent
from gac.schemes.integers.grids import fitted


@dataclass(frozen=True)
class Whole(Levels):
    """From 0 to ``most``.

    Attributes:
        zero: whether there are zero points; without, the zero is in the middle.
    """

    most: int
    zero: bool
    floating: ClassVar[bool] = False

    def nearest_(self, units: Tensor) -> Tensor:
        return units.round_().clamp_(0, self.most)

    def fitted(self, values: Tensor, weighs: Tensor) -> tuple[Tensor, Tensor]:
        grid = fitted(values, weighs, self.most, self.zero)
        return grid.scale, grid.zero

    def improved(
        self, order: Order, targets: Tensor, numbers: Tensor, scale: Tensor, zeros: Tensor
    ) -> tuple[Tensor, Tensor]:
        return descent.improved(self, order, targets, numbers, scale, zeros)
