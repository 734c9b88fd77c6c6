"""Whole numbers of 8 bits on both sides."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from gac.schemes.base import StorageSpec
from gac.schemes.eight_bits import EightBits
from gac.schemes.integers.spec import W8A16

if TYPE_CHECKING:
    from torch import Tensor

    from gac.schemes.inputs import Inputs
    from gac.schemes.scaled import Scaled

_LARGEST = 127


class Int8(EightBits):
    """Weights as ``w8a16`` stores them, and inputs of 8 bits too: ``scale * number``, evenly on both sides of zero."""

    name = "w8a8"
    dtype = "w8a8"
    reads = "int8"
    storage = StorageSpec("Integers8", {})

    def bytes(self, rows: int, columns: int) -> int:
        return W8A16.bytes(rows, columns)

    def rounded(self, matrix: "Tensor", inputs: "Inputs | None" = None, gradients: "Tensor | None" = None) -> "Tensor":
        return W8A16.rounded(matrix, inputs, gradients)

    def stored(
        self, matrix: "Tensor", inputs: "Inputs | None" = None, gradients: "Tensor | None" = None
    ) -> "dict[str, Tensor]":
        return W8A16.stored(matrix, inputs, gradients)

    def scaled(self, values: "Tensor", held: "Mapping[str, Tensor]") -> "Scaled":
        return W8A16.scaled(values, held)

    def noise(self, squares: "Tensor", peak: "Tensor") -> "Tensor":
        """Even within a step of 1/127 of the token's largest, which is exact; no feature loses more than it is."""
        return (peak / (12 * _LARGEST**2)).minimum(squares)
