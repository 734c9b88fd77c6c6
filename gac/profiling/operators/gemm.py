"""Linear layers: one GEMM, the low-rank pair, and pairs that share their first GEMM; and a copy.

Weights are stored as in ``torch.nn.Linear``: ``(out, in)``.
"""

from gac.profiling.operators.base import Axes, Operand, Operator, indivisible

_RUNNERS = "gac.profiling.timing.runners.gemm"
_FP8_RULE = "torch._scaled_mm takes k and n that are multiples of 16 only (16-byte rows of fp8)"


class Linear(Operator):
    """``x[m, k] @ W[n, k].T``; in fp8 with one fp32 scale for each operand and a bf16 result."""

    name = "linear"
    axes = ("m", "k", "n")
    dtypes: tuple[str, ...] = ("bf16", "fp16", "fp8")
    stored = True
    reads, writes, products = ("m k", "n k"), ("m n",), ("m k n",)
    runner = f"{_RUNNERS}:LinearRunner"

    def inputs(self, axes: Axes, dtype: str) -> tuple[Operand, ...]:
        matrices = super().inputs(axes, dtype)
        return (*matrices, *self.scales(axes)) if dtype == "fp8" else matrices

    def scales(self, axes: Axes) -> tuple[Operand, Operand]:
        """The scales of x and of W.T in fp8."""
        return Operand((1, 1), "fp32"), Operand((1, 1), "fp32")

    def outputs(self, axes: Axes, dtype: str) -> tuple[Operand, ...]:
        return super().outputs(axes, "bf16" if dtype == "fp8" else dtype)

    def refusal(self, axes: Axes, dtype: str) -> str | None:
        broken = indivisible(axes, ("k", "n"), 16)
        return f"{_FP8_RULE}: {broken}" if dtype == "fp8" and broken else super().refusal(axes, dtype)


class RowwiseLinear(Linear):
    """``x[m, k] @ W[n, k].T`` in fp8 with one fp32 scale a row of x and a row of W, and a bf16 result."""

    name = "linear_rowwise"
    dtypes = ("fp8",)
    stored = False

    def scales(self, axes: Axes) -> tuple[Operand, Operand]:
        return Operand((axes["m"], 1), "fp32"), Operand((1, axes["n"]), "fp32")


class LowRank(Operator):
    """``(x[m, k] @ A[r, k].T) @ B[n, r].T``: two linear layers in a row."""

    name = "low_rank"
    stored = True
    axes = ("m", "k", "r", "n")
    reads, writes, products = ("m k", "r k", "n r"), ("m r", "m n"), ("m k r", "m r n")
    runner = f"{_RUNNERS}:LowRankRunner"


class SharedLowRank(Operator):
    """Low-rank pairs of one input: ``hidden = x[m, k] @ A[pairs * r, k].T``, then each slice of r columns @ B[n, r].T.

    It writes the hidden activations, then the result of every pair.
    """

    name = "low_rank_shared"
    axes = ("m", "k", "r", "n", "pairs")
    products = ("m k r pairs", "m r n pairs")
    runner = f"{_RUNNERS}:LowRankRunner"

    def inputs(self, axes: Axes, dtype: str) -> tuple[Operand, ...]:
        m, k, r, n, pairs = (axes[name] for name in self.axes)
        return Operand((m, k), dtype), Operand((pairs * r, k), dtype), *(Operand((n, r), dtype),) * pairs

    def outputs(self, axes: Axes, dtype: str) -> tuple[Operand, ...]:
        m, r, n, pairs = (axes[name] for name in ("m", "r", "n", "pairs"))
        return Operand((m, pairs * r), dtype), *(Operand((m, n), dtype),) * pairs


class Copy(Operator):
    """Copies n elements, n read and n written: it says what bandwidth the device has."""

    name = "copy"
    axes = ("n",)
    reads = writes = ("n",)
    runner = f"{_RUNNERS}:CopyRunner"
