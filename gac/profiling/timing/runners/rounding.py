"""Inputs that are rounded by the kernel that runs before 8-bit GEMMs."""

from collections.abc import Sequence

from torch import Tensor

from gac.profiling.operators.rounding import RoundInputs
from gac.profiling.timing.runners import Runner, edges
from gac.runtime.kernels.quantise_rows import quantise_rows
from gac.runtime.storage.eight_bits import READERS


class RoundInputsRunner(Runner):
    """One Triton kernel, which has outputs of its own; it needs a GPU."""

    devices = ("cuda",)
    operator: RoundInputs

    def run(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        found = quantise_rows(inputs[0], outputs[0].dtype)
        return found.numbers, found.scale

    def compare(self, inputs: Sequence[Tensor], result: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        numbers, scale = result
        rows = edges(len(scale), scale.device)
        expected, own = READERS[self.operator.rounding](inputs[0][rows])
        return numbers[rows.tolist()].float() * scale[rows], expected.float() * own
