"""What schemes have in common whose GEMMs read 8 bits on both sides. Imports no torch."""

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from gac.core.operations import Operation
from gac.runtime.limits import STEP
from gac.schemes.base import Scheme
from gac.schemes.config_groups import by_token, config_group, in_rows

if TYPE_CHECKING:
    from torch import Tensor

_SCALE_BYTES = 2


class EightBits(Scheme):
    """Weights of 8 bits with a scale for each row, inputs of 8 bits with a scale for each token, found as it comes.

    Attributes:
        kind: what compressed-tensors calls the numbers, ``int`` or ``float``.
    """

    bits = 8
    kind: ClassVar[str]
    needs = f"rows and columns that are multiples of {STEP}, and no batched GEMM"

    def runs(self, gemm: Operation) -> bool:
        axes = gemm.axes
        return "b" not in axes and not axes["k"] % STEP and not axes["n"] % STEP

    def bytes(self, rows: int, columns: int) -> int:
        return rows * (columns + _SCALE_BYTES) if columns else 0

    def config_group(self, columns: int) -> dict[str, Any] | None:
        return config_group(f"{self.kind}-quantized", in_rows(self.bits, self.kind), by_token(self.bits, self.kind))

    @abstractmethod
    def noise(self, squares: "Tensor", peak: "Tensor") -> "Tensor": ...
