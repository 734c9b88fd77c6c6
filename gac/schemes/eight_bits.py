"""Common to schemes with 8-bit weights and 8-bit inputs. Imports no torch."""

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from gac.core.operations import Operation
from gac.runtime.limits import STEP
from gac.schemes.base import Scheme, config_arguments, config_group

if TYPE_CHECKING:
    from torch import Tensor

_SCALE_BYTES = 2


class EightBits(Scheme):
    """Weights of 8 bits with a scale for each row, inputs of 8 bits with a scale for each token, found as tokens come.

    Attributes:
        kind: of the numbers in compressed-tensors, ``int`` or ``float``.
    """

    bits = 8
    kind: ClassVar[str]
    shape_requirement = f"rows and columns that are multiples of {STEP}, and no batched GEMM"

    def supports(self, gemm: Operation) -> bool:
        axes = gemm.axes
        return "b" not in axes and not axes["k"] % STEP and not axes["n"] % STEP

    def bytes(self, rows: int, columns: int) -> int:
        return rows * (columns + _SCALE_BYTES) if columns else 0

    def config_group(self, columns: int) -> dict[str, Any] | None:
        weights, inputs = (config_arguments(self.bits, self.kind, strategy) for strategy in ("channel", "token"))
        return config_group(f"{self.kind}-quantized", weights, inputs)

    @abstractmethod
    def noise(self, squares: "Tensor", peak: "Tensor") -> "Tensor": ...
