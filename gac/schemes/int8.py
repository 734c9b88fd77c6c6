"""Weights and inputs in 8-bit integers."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from gac.schemes.base import StorageSpec
from gac.schemes.eight_bits import EightBits
from gac.schemes.integers.spec import W8A16

if TYPE_CHECKING:
    from torch import Tensor

    from gac.schemes.inputs import Inputs
    from gac.schemes.matrices import Grid, Scaled

_LARGEST = 127


class Int8(EightBits):
    """Weights quantised as in ``w8a16``, a byte each, and inputs of 8 bits too: ``scale * number``, symmetric."""

    name = "w8a8"
    dtype = "w8a8"
    meaning = "8-bit integer weights and inputs"
    input_quantiser = "int8"
    input_dtype = "int8"
    kind = "int"
    largest = W8A16.largest
    storage = StorageSpec("Integers8", {})

    def quantised(
        self, matrix: "Tensor", inputs: "Inputs | None" = None, gradients: "Tensor | None" = None
    ) -> "Tensor":
        self.check_range(matrix)
        return W8A16.quantised(matrix, inputs, gradients)

    def stored(
        self, matrix: "Tensor", inputs: "Inputs | None" = None, gradients: "Tensor | None" = None
    ) -> "dict[str, Tensor]":
        from gac.schemes.integers.torch import quantise_matrix

        self.check_range(matrix)
        integers = quantise_matrix(matrix, inputs, self.bits, None, zero=False, gradients=gradients)
        return {"weight": integers.signed, "weight_scale": integers.scale}

    def scaled(self, values: "Tensor", tensors: "Mapping[str, Tensor]") -> "Scaled":
        return W8A16.scaled(values, tensors)

    def grid(self, tensors: "Mapping[str, Tensor]", rows: int, columns: int) -> "Grid":
        from gac.schemes.integers.torch import grid_of_signed

        return grid_of_signed(tensors["weight"], tensors["weight_scale"])

    def on_grid(self, grid: "Grid") -> "dict[str, Tensor]":
        from gac.schemes.integers.torch import of_grid

        integers = of_grid(grid)
        return {"weight": integers.signed, "weight_scale": integers.scale}

    def noise(self, squares: "Tensor", peak: "Tensor") -> "Tensor":
        """Uniform within a step of 1/127 of the token's largest, which is exact; at most the feature's square."""
        return (peak / (12 * _LARGEST**2)).minimum(squares)
