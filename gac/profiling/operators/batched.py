"""Batched GEMMs: heads of one dim, and three ways to run heads of different dims."""

from itertools import groupby
from typing import Literal

from gac.profiling.operators.base import Axes, Operand, Operator

ROUNDING = 8
_RUNNERS = "gac.profiling.timing.runners.gemm"


class BatchedGemm(Operator):
    """``x[b, m, k] @ W[b, n, k].T`` for every b."""

    name = "batched_gemm"
    stored = True
    axes = ("b", "m", "k", "n")
    reads, writes, products = ("b m k", "b n k"), ("b m n",), ("b m k n",)
    runner = f"{_RUNNERS}:HeadsRunner"


class Heads(Operator):
    """``x[heads, m, k]``, and for head i ``x[i] @ W_i[d_i, k].T`` with d_i evenly from low to high.

    Operands are those that run: one weight ``(heads of the bucket, dim of the bucket, k)`` a bucket, after x. FLOPs and
    bytes are those of the dims asked for, so what a bucket adds to them shows as waste.

    Args:
        way: ``separate``: one GEMM a head; ``bucketed``: each head rounded up to a multiple of 8, one batched GEMM a
            distinct rounded dim; ``padded``: one batched GEMM, at the largest rounded up to a multiple of 8.
    """

    axes = ("m", "k", "heads", "low", "high")

    def __init__(self, way: Literal["separate", "bucketed", "padded"]) -> None:
        self.way = way
        self.name = f"batched_gemm_{way}"
        self.runner = f"{_RUNNERS}:{'SeparateHeadsRunner' if way == 'separate' else 'HeadsRunner'}"

    def buckets(self, axes: Axes) -> tuple[tuple[int, int], ...]:
        """Number of heads and dim of every bucket; the heads of a bucket are neighbours."""
        dims = self.dims(axes)
        if self.way == "separate":
            return tuple((1, dim) for dim in dims)
        rounded = [-(-dim // ROUNDING) * ROUNDING for dim in dims]
        if self.way == "padded":
            return ((len(dims), rounded[-1]),)
        return tuple((len(list(same)), dim) for dim, same in groupby(rounded))

    def dims(self, axes: Axes) -> tuple[int, ...]:
        """The dim of every head, never falling."""
        low, high, heads = axes["low"], axes["high"], axes["heads"]
        return tuple(low + i * (high - low) // (heads - 1) for i in range(heads))

    def inputs(self, axes: Axes, dtype: str) -> tuple[Operand, ...]:
        m, k, heads = axes["m"], axes["k"], axes["heads"]
        weights = (Operand((count, dim, k), dtype) for count, dim in self.buckets(axes))
        return Operand((heads, m, k), dtype), *weights

    def outputs(self, axes: Axes, dtype: str) -> tuple[Operand, ...]:
        return tuple(Operand((count, axes["m"], dim), dtype) for count, dim in self.buckets(axes))

    def flops(self, axes: Axes) -> int:
        return 2 * axes["m"] * axes["k"] * sum(self.dims(axes))

    def bytes(self, axes: Axes, dtype: str) -> int:
        """The fewest bytes to move: x, and the weights and results of the dims asked for."""
        m, k, heads, columns = axes["m"], axes["k"], axes["heads"], sum(self.dims(axes))
        return sum(Operand(shape, dtype).bytes for shape in ((heads, m, k), (columns, k), (m, columns)))

    def unmet(self, axes: Axes) -> str | None:
        return None if axes["heads"] >= 2 and axes["low"] <= axes["high"] else "at least 2 heads, and low <= high"
