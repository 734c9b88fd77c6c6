"""Copying, which says what bandwidth the device has."""

from gac.profiling.operators.base import Axes, Operand, Operator


class Copy(Operator):
    """Copies n elements: n read and n written."""

    name = "copy"
    axes = ("n",)
    dtypes = ("bf16", "fp16")

    def inputs(self, axes: Axes, dtype: str) -> tuple[Operand, ...]:
        return (Operand((axes["n"],), dtype),)

    def outputs(self, axes: Axes, dtype: str) -> tuple[Operand, ...]:
        return (Operand((axes["n"],), dtype),)

    def flops(self, axes: Axes) -> int:
        return 0
