"""What schemes have in common whose GEMMs read 8 bits on both sides. Imports no torch."""

from abc import abstractmethod
from typing import TYPE_CHECKING

from gac.operations import Operation
from gac.schemes.base import Scheme

if TYPE_CHECKING:
    from torch import Tensor

STEP = 16
"""Of what rows and columns are multiples: so PyTorch's FP8 GEMM wants it, and vLLM's of either kind."""


class EightBits(Scheme):
    """Weights of 8 bits with a scale for each row, inputs of 8 bits with a scale for each token, found as it comes."""

    bits = 8
    needs = f"rows and columns that are multiples of {STEP}, and no batched GEMM"

    def runs(self, gemm: Operation) -> bool:
        axes = gemm.axes
        return "b" not in axes and not axes["k"] % STEP and not axes["n"] % STEP

    @abstractmethod
    def bytes(self, rows: int, columns: int) -> int: ...

    @abstractmethod
    def noise(self, squares: "Tensor", peak: "Tensor") -> "Tensor": ...
