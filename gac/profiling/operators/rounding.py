"""Inputs that are rounded to 8 bits before a GEMM, in a launch of its own where nothing else has rounded them."""

from gac.core.operations import round_inputs
from gac.profiling.operators.base import Axes, Operand, Operator
from gac.schemes import Scheme

NUMBERS = {"float8": "fp8", "int8": "int8"}
"""What a scheme's ``reads`` rounds to."""


class RoundInputs(Operator):
    """Every row of ``x[m, k]`` becomes numbers of 8 bits, and one fp32 scale.

    Args:
        reads: what rounds them, as a scheme says it.
    """

    axes = ("m", "k")
    reads = ("m k",)
    smooth = True
    runner = "gac.profiling.timing.runners.rounding:RoundInputsRunner"

    def __init__(self, reads: str) -> None:
        self.rounding, self._numbers = reads, NUMBERS[reads]
        self.name = round_inputs(self._numbers, 1, 1).operator

    def outputs(self, axes: Axes, dtype: str) -> tuple[Operand, ...]:
        return Operand((axes["m"], axes["k"]), self._numbers), Operand((axes["m"], 1), "fp32")


def rounded_to(scheme: Scheme) -> str | None:
    """The numbers to which a scheme rounds its inputs; None: it reads 16 bits."""
    return None if scheme.reads is None else NUMBERS.get(scheme.reads)
