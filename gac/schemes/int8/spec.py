"""Whole numbers of 8 bits on both sides."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from gac.schemes.base import StorageSpec
from gac.schemes.eight_bits import EightBits
from gac.schemes.integers.spec import W8A16

if TYPE_CHECKING:
    from torch import Tensor

    from gac.schemes.grid import Grid
    from gac.schemes.inputs import Inputs
    from gac.schemes.scaled import Scaled

_LARGEST = 127


class Int8(EightBits):
    """Weights as ``w8a16`` rounds them, a byte each, and inputs of 8 bits too: ``scale * number``.

    Numbers lie evenly on both sides of zero.
    """

    name = "w8a8"
    dtype = "w8a8"
    reads = "int8"
    kind = "int"
    largest = W8A16.largest
    storage = StorageSpec("Integers8", {})

    def rounded(self, matrix: "Tensor", inputs: "Inputs | None" = None, gradients: "Tensor | None" = None) -> "Tensor":
        self.check_range(matrix)
        return W8A16.rounded(matrix, inputs, gradients)

    def stored(
        self, matrix: "Tensor", inputs: "Inputs | None" = None, gradients: "Tensor | None" = None
    ) -> "dict[str, Tensor]":
        from gac.schemes.integers.torch import round_matrix

        self.check_range(matrix)
        found = round_matrix(matrix, inputs, self.bits, None, zero=False, gradients=gradients)
        return {"weight": found.signed, "weight_scale": found.scale}

    def scaled(self, values: "Tensor", held: "Mapping[str, Tensor]") -> "Scaled":
        return W8A16.scaled(values, held)

    def grid(self, held: "Mapping[str, Tensor]", rows: int, columns: int) -> "Grid":
        from gac.schemes.integers.torch import grid_of_signed

        return grid_of_signed(held["weight"], held["weight_scale"])

    def on_grid(self, grid: "Grid") -> "dict[str, Tensor]":
        from gac.schemes.integers.torch import of_grid

        found = of_grid(grid)
        return {"weight": found.signed, "weight_scale": found.scale}

    def noise(self, squares: "Tensor", peak: "Tensor") -> "Tensor":
        """Even within a step of 1/127 of the token's largest, which is exact; no feature loses more than it is."""
        return (peak / (12 * _LARGEST**2)).minimum(squares)
