"""A copy, which shows the bandwidth of the device."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gac.profiling.operators.base import AxisSweep, Operator, edges

if TYPE_CHECKING:
    from torch import Tensor


class Copy(Operator):
    """Copy n elements, n read and n written: it shows the bandwidth of the device.

    It multiplies by 1: ``Tensor.copy_`` would call the driver's memcpy instead of a kernel.
    """

    name = "copy"
    axes = ("n",)
    reads = writes = ("n",)
    compressed_axis = "n"
    cublas = False
    # From 2 KiB to 512 MiB: powers of two and the sizes half-way between.
    general = (AxisSweep("n", [size for power in range(10, 29) for size in (2**power, 3 * 2 ** (power - 1))], {}),)

    def run(self, inputs: Sequence["Tensor"], outputs: Sequence["Tensor"]) -> Sequence["Tensor"]:
        import torch

        torch.mul(inputs[0], 1.0, out=outputs[0])
        return outputs

    def compare(self, inputs: Sequence["Tensor"], result: Sequence["Tensor"]) -> tuple["Tensor", "Tensor"]:
        positions = edges(len(inputs[0]), inputs[0].device)
        return result[0][positions], inputs[0][positions].float()
