"""The quantisation of inputs by itself, where no norm has done it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gac.core.operations import round_inputs
from gac.profiling.operators.base import Axes, Operand, Operator, edges
from gac.schemes import SCHEMES

if TYPE_CHECKING:
    from torch import Tensor


class RoundInputs(Operator):
    """Quantise every row of ``x[m, k]`` to 8 bits with one fp32 scale, in a Triton kernel that allocates its results.

    ``quantiser`` and ``numbers`` are the ``input_quantiser`` and ``input_dtype`` of a scheme.
    """

    axes = ("m", "k")
    reads = ("m k",)
    smooth = True
    cublas = False

    def __init__(self, quantiser: str, numbers: str) -> None:
        self.quantiser, self.numbers = quantiser, numbers
        self.name = round_inputs(numbers, 1, 1).operator

    def outputs(self, axes: Axes, dtype: str) -> tuple[Operand, ...]:
        return Operand((axes["m"], axes["k"]), self.numbers), Operand((axes["m"], 1), "fp32")

    def run(self, inputs: Sequence["Tensor"], outputs: Sequence["Tensor"]) -> Sequence["Tensor"]:
        from gac.runtime.kernels.quantise_rows import quantise_rows

        quantised = quantise_rows(inputs[0], outputs[0].dtype)
        return quantised.numbers, quantised.scale

    def compare(self, inputs: Sequence["Tensor"], result: Sequence["Tensor"]) -> tuple["Tensor", "Tensor"]:
        from gac.runtime.storage.eight_bits import READERS

        numbers, scale = result
        rows = edges(len(scale), scale.device)
        expected, expected_scale = READERS[self.quantiser](inputs[0][rows])
        return numbers[rows.tolist()].float() * scale[rows], expected.float() * expected_scale


# Token by token: groups of columns are taken to last as long, they have but a few more scales.
_ROUNDINGS = [(scheme.input_quantiser, scheme.input_dtype) for scheme in SCHEMES if scheme.group is None]

OPERATORS = tuple(RoundInputs(quantiser, dtype) for quantiser, dtype in _ROUNDINGS if quantiser and dtype)
