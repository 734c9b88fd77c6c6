"""The values of a number format, and how its scales are fitted."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

if TYPE_CHECKING:
    from gac.schemes.feedback.order import Order


class Levels(ABC):
    """Values of a number with scale 1.

    Attributes:
        most: the largest.
        floating: 8-bit floating point (e4m3) from ``-most`` on, not integers from 0 on.
    """

    most: int
    floating: ClassVar[bool]

    @property
    def least(self) -> int:
        return -self.most if self.floating else 0

    @abstractmethod
    def nearest_(self, units: Tensor) -> Tensor:
        """Round float64 numbers to the nearest values, in place."""

    @abstractmethod
    def fitted(self, values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Scales and zero points of least error for values ``(..., rows, columns)``, both ``(..., rows, 1)``, float64.

        Args:
            weights: of squared errors, by column, shape ``(..., columns)``.
        """

    def improved(
        self, order: "Order", targets: Tensor, numbers: Tensor, scale: Tensor, zeros: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Numbers and scales with a smaller error of the product with the inputs; by default as they are.

        Args:
            targets: the matrix, ``(groups, rows, size)``, as are ``numbers``; ``scale`` and ``zeros`` have size 1.
        """
        return numbers, scale
