"""Linear layers with weights of 4 bits in groups along k that share a scale and a zero.

``W = (q - 8) * scale + zero`` with q in 0..15. A byte holds two neighbours along k, the earlier in its high half.
Source: PyTorch, aten/src/ATen/native/cuda/int4mm.cu.
"""

from gac.profiling.operators.base import Axes, Operand, Operator, indivisible

GROUPS = (32, 64, 128, 256)


def uncut(axes: Axes) -> str | None:
    """Why k cannot be cut into bytes and groups, so that there is no such weight; None where it can."""
    k, group = axes["k"], axes["group"]
    return f"k is cut into whole bytes and whole groups only: k = {k}, group = {group}" if k % 2 or k % group else None


class Int4Linear(Operator):
    """``x[m, k] @ W[n, k].T`` with 4-bit W, unpacked inside PyTorch's fused kernel (``torch._weight_int4pack_mm``).

    Inputs are x, the packed weight ``uint8[n, k / 2]``, and scales with zeros ``bf16[k / group, n, 2]``.
    """

    name = "int4_linear"
    axes = ("m", "k", "n", "group")
    dtypes = ("bf16",)
    writes: tuple[str, ...] = ("m n",)
    products = ("m k n",)
    runner = "gac.profiling.timing.runners.int4:FusedInt4Runner"

    def inputs(self, axes: Axes, dtype: str) -> tuple[Operand, ...]:
        m, k, n, group = (axes[name] for name in self.axes)
        return (
            Operand((m, k), dtype),
            Operand((n, -(-k // 2)), "uint8"),
            Operand((-(-k // group), n, 2), dtype),
        )

    def refusal(self, axes: Axes, dtype: str) -> str | None:
        if axes["group"] not in GROUPS:
            return f"torch._weight_int4pack_mm takes groups of 32, 64, 128 or 256 only: group = {axes['group']}"
        if broken := uncut(axes):
            return broken
        if broken := indivisible(axes, ("n",), 8):
            return f"torch._weight_int4pack_mm takes n that is a multiple of 8 only (its tile): {broken}"
        return None


class DequantisedInt4Linear(Int4Linear):
    """The same in two literal steps: W is written out in the dtype of x, then multiplied.

    It writes W, then the result; W counts once among the bytes.
    """

    name = "int4_linear_dequantised"
    writes = ("n k", "m n")
    runner = "gac.profiling.timing.runners.int4:DequantisedInt4Runner"

    def refusal(self, axes: Axes, dtype: str) -> str | None:
        return uncut(axes)
