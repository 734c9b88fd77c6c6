"""Inputs that are rounded to 8 bits before a GEMM, in a launch of its own where nothing else has rounded them."""

from gac.core.operations import round_inputs
from gac.profiling.operators.base import Axes, Operand, Operator


class RoundInputs(Operator):
    """Every row of ``x[m, k]`` becomes numbers of 8 bits, and one fp32 scale.

    Args:
        quantiser, numbers: ``input_quantiser`` and ``input_dtype`` of a scheme.
    """

    axes = ("m", "k")
    reads = ("m k",)
    smooth = True
    runner = "gac.profiling.timing.runners.rounding:RoundInputsRunner"

    def __init__(self, quantiser: str, numbers: str) -> None:
        self.rounding, self._numbers = quantiser, numbers
        self.name = round_inputs(self._numbers, 1, 1).operator

    def outputs(self, axes: Axes, dtype: str) -> tuple[Operand, ...]:
        return Operand((axes["m"], axes["k"]), self._numbers), Operand((axes["m"], 1), "fp32")
