"""8-bit floating point on both sides: a sign, 4 bits of exponent and 3 of mantissa (e4m3, arXiv 2209.05433)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from gac.schemes.base import StorageSpec
from gac.schemes.eight_bits import EightBits

if TYPE_CHECKING:
    from torch import Tensor

    from gac.schemes.inputs import Inputs
    from gac.schemes.matrices import Grid

_LARGEST = 448
_RELATIVE = 7.0e-4
"""Mean squared error of a normal number, over its mean square. A number in [1, 2) moves by up to 1/16, evenly: by a
variance of 1/768. Over its square that is 1/768 * 3 / (8 ln 2) where mantissas are spread as logarithms are."""
_SUBNORMAL = 2**-18 / 12
"""That of numbers below 2^-6, which are a multiple of 2^-9."""


class Float8(EightBits):
    """Floating point of 8 bits for weights and inputs: ``scale * number``, both sides scaled to use the whole range.

    A row of weights has a scale of 16 bits (bfloat16). A token's has 32; it is found as the token comes.
    """

    name = "fp8"
    dtype = "fp8_dynamic"  # fp8 alone are GEMMs of quantised inputs
    meaning = "8-bit floating-point weights and inputs"
    input_quantiser = "float8"
    input_dtype = "fp8"
    kind = "float"
    storage = StorageSpec("Floats8", {})

    def quantised(
        self, matrix: "Tensor", inputs: "Inputs | None" = None, gradients: "Tensor | None" = None
    ) -> "Tensor":
        from gac.schemes.float8.torch import quantise_matrix

        return quantise_matrix(matrix, inputs, gradients).values(matrix.dtype)

    def stored(
        self, matrix: "Tensor", inputs: "Inputs | None" = None, gradients: "Tensor | None" = None
    ) -> "dict[str, Tensor]":
        from gac.schemes.float8.torch import quantise_matrix

        floats = quantise_matrix(matrix, inputs, gradients)
        return {"weight": floats.numbers, "weight_scale": floats.scale[:, : matrix.shape[1]]}

    def grid(self, tensors: "Mapping[str, Tensor]", rows: int, columns: int) -> "Grid":
        from gac.schemes.float8.torch import grid_of

        return grid_of(tensors["weight"], tensors["weight_scale"])

    def on_grid(self, grid: "Grid") -> "dict[str, Tensor]":
        from gac.schemes.float8.torch import FLOAT8

        return {"weight": grid.numbers.to(FLOAT8), "weight_scale": grid.scale.bfloat16()}

    def noise(self, squares: "Tensor", peak: "Tensor") -> "Tensor":
        """A fraction of each feature's square, whatever the others are; a token's largest is exact."""
        return (_RELATIVE * squares + _SUBNORMAL / _LARGEST**2 * peak).minimum(squares)
