"""Inputs that are quantised to 8 bits before a GEMM, in a launch of its own where no norm has quantised them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gac.core.operations import round_inputs
from gac.profiling.operators.base import Axes, Operand, Operator, edges
from gac.schemes import Scheme

if TYPE_CHECKING:
    from torch import Tensor

"""The dtype of each ``Scheme.reads``."""


class RoundInputs(Operator):
    """Quantise every row of ``x[m, k]`` to 8 bits with one fp32 scale, in a Triton kernel that allocates its results.

    Args:
        reads: the ``reads`` of a scheme.
    """

    axes = ("m", "k")
    reads = ("m k",)
    smooth = True
    devices = ("cuda",)

    def __init__(self, quantiser: str, numbers: str) -> None:
        self.rounding, self._numbers = quantiser, numbers
        self.name = round_inputs(self._numbers, 1, 1).operator

    def outputs(self, axes: Axes, dtype: str) -> tuple[Operand, ...]:
        return Operand((axes["m"], axes["k"]), self._numbers), Operand((axes["m"], 1), "fp32")

    def run(self, inputs: Sequence["Tensor"], outputs: Sequence["Tensor"]) -> Sequence["Tensor"]:
        from gac.runtime.kernels.quantise_rows import quantise_rows

        quantised = quantise_rows(inputs[0], outputs[0].dtype)
        return quantised.numbers, quantised.scale

    def compare(self, inputs: Sequence["Tensor"], result: Sequence["Tensor"]) -> tuple["Tensor", "Tensor"]:
        from gac.runtime.storage.eight_bits import READERS

        numbers, scale = result
        rows = edges(len(scale), scale.device)
        expected, expected_scale = READERS[self.rounding](inputs[0][rows])
        return numbers[rows.tolist()].float() * scale[rows], expected.float() * expected_scale


def rounded_to(scheme: Scheme) -> str | None:
    """Return the numbers to which a scheme quantises its inputs; None: it reads 16 bits."""
    return None if scheme.input_quantiser is None else scheme.input_dtype
