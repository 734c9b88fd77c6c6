"""Linear layers: one GEMM, the low-rank pair, and pairs that share their first GEMM.

Weights lie as ``torch.nn.Linear`` keeps them, ``(out, in)``.
"""

from gac.profiling.operators.base import Axes, Operand, Operator, indivisible

_FP8_RULE = "torch._scaled_mm takes k and n that are multiples of 16 only (16-byte rows of fp8)"


def _fp8_refusal(axes: Axes) -> str | None:
    broken = indivisible(axes, ("k", "n"), 16)
    return f"{_FP8_RULE}: {broken}" if broken else None


class Linear(Operator):
    """``x[m, k] @ W[n, k].T``; in fp8 with one fp32 scale for each operand and a bf16 result."""

    name = "linear"
    axes = ("m", "k", "n")
    dtypes: tuple[str, ...] = ("bf16", "fp16", "fp8")

    def inputs(self, axes: Axes, dtype: str) -> tuple[Operand, ...]:
        matrices = Operand((axes["m"], axes["k"]), dtype), Operand((axes["n"], axes["k"]), dtype)
        return (*matrices, *self.scales(axes)) if dtype == "fp8" else matrices

    def scales(self, axes: Axes) -> tuple[Operand, Operand]:
        """The scales of x and of W.T in fp8."""
        return Operand((1, 1), "fp32"), Operand((1, 1), "fp32")

    def outputs(self, axes: Axes, dtype: str) -> tuple[Operand, ...]:
        return (Operand((axes["m"], axes["n"]), "bf16" if dtype == "fp8" else dtype),)

    def flops(self, axes: Axes) -> int:
        return 2 * axes["m"] * axes["k"] * axes["n"]

    def refusal(self, axes: Axes, dtype: str) -> str | None:
        return _fp8_refusal(axes) if dtype == "fp8" else None


class RowwiseLinear(Linear):
    """``x[m, k] @ W[n, k].T`` in fp8 with one fp32 scale a row of x and a row of W, and a bf16 result."""

    name = "linear_rowwise"
    dtypes = ("fp8",)

    def scales(self, axes: Axes) -> tuple[Operand, Operand]:
        return Operand((axes["m"], 1), "fp32"), Operand((1, axes["n"]), "fp32")


class LowRank(Operator):
    """``(x[m, k] @ A[r, k].T) @ B[n, r].T``: two linear layers in a row."""

    name = "low_rank"
    axes = ("m", "k", "r", "n")
    dtypes = ("bf16", "fp16")

    def inputs(self, axes: Axes, dtype: str) -> tuple[Operand, ...]:
        m, k, r, n = (axes[name] for name in self.axes)
        return Operand((m, k), dtype), Operand((r, k), dtype), Operand((n, r), dtype)

    def outputs(self, axes: Axes, dtype: str) -> tuple[Operand, ...]:
        return Operand((axes["m"], axes["r"]), dtype), Operand((axes["m"], axes["n"]), dtype)

    def flops(self, axes: Axes) -> int:
        return 2 * axes["m"] * axes["r"] * (axes["k"] + axes["n"])


class TritonLinear(Linear):
    """The GEMM of one row in the Triton kernel of ``gac.runtime.decode_kernel``."""

    name = "linear_triton"
    dtypes = ("bf16", "fp16")

    def unmet(self, axes: Axes) -> str | None:
        return _several_rows(axes)


class TritonLowRank(LowRank):
    """The pair of one row in two of these kernels."""

    name = "low_rank_triton"

    def unmet(self, axes: Axes) -> str | None:
        return _several_rows(axes)


def _several_rows(axes: Axes) -> str | None:
    return None if axes["m"] == 1 else "one row: m=1"


class SharedLowRank(Operator):
    """Low-rank pairs of one input: ``hidden = x[m, k] @ A[pairs * r, k].T``, then each slice of r columns @ B[n, r].T.

    It writes the hidden activations, then the result of every pair.
    """

    name = "low_rank_shared"
    axes = ("m", "k", "r", "n", "pairs")
    dtypes = ("bf16", "fp16")

    def inputs(self, axes: Axes, dtype: str) -> tuple[Operand, ...]:
        m, k, r, n, pairs = (axes[name] for name in self.axes)
        return Operand((m, k), dtype), Operand((pairs * r, k), dtype), *(Operand((n, r), dtype),) * pairs

    def outputs(self, axes: Axes, dtype: str) -> tuple[Operand, ...]:
        m, r, n, pairs = (axes[name] for name in ("m", "r", "n", "pairs"))
        return Operand((m, pairs * r), dtype), *(Operand((m, n), dtype),) * pairs

    def flops(self, axes: Axes) -> int:
        return 2 * axes["m"] * axes["pairs"] * axes["r"] * (axes["k"] + axes["n"])
