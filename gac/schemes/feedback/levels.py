"""The numbers that a format has, and how scales are fitted to what they stand for."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

if TYPE_CHECKING:
    from gac.schemes.feedback.order import Order


class Levels(ABC):
    """What a number can be where its scale is one.

    Attributes:
        most: the largest.
        floating: whether they are 8-bit floating point (e4m3) from ``-most`` on, and not whole numbers from 0 on.
    """

    most: int
    floating: ClassVar[bool]

    @property
    def least(self) -> int:
        """The smallest."""
        return -self.most if self.floating else 0

    @abstractmethod
    def nearest_(self, units: Tensor) -> Tensor:
        """Float64 numbers to the nearest that there are, in place."""

    @abstractmethod
    def fitted(self, values: Tensor, weighs: Tensor) -> tuple[Tensor, Tensor]:
        """Scales and zero points of least error for values ``(..., rows, columns)``, both ``(..., rows, 1)``, float64.

        Args:
            weighs: how much a squared error counts, by column, shape ``(..., columns)``.
        """

    def improved(
        self, order: "Order", targets: Tensor, numbers: Tensor, scale: Tensor, zeros: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Numbers and scales that lose less of the product with the inputs; unless a format says how, as they are.

        Args:
            targets: the matrix, ``(groups, rows, size)``, as are ``numbers``; ``scale`` and ``zeros`` have size 1.
        """
        return numbers, scale
