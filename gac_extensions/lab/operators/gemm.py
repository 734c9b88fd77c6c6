"""GEMMs: heads of different dims, one by one and in batches; pairs that share their first GEMM."""

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Literal

from gac.profiling.operators.base import Axes, AxisSweep, Operand, around
from gac.profiling.operators.gemm import BatchedGemm, LowRank, batches

if TYPE_CHECKING:
    from torch import Tensor

Way = Literal["separate", "bucketed", "padded"]

_BUCKET = 8
_SHARED = {*range(32, 1025, 32), *around(512, 4)}


class Heads(BatchedGemm):
    """``x[heads, m, k]``, and for head i ``x[i] @ W_i[d_i, k].T`` with d_i evenly from low to high.

    Heads run ``separate``: one GEMM each; ``bucketed``: each rounded up to a multiple of 8, one batched GEMM a distinct
    rounded dim; ``padded``: one batched GEMM, at the largest rounded up. Operands are those that run: x, then for each
    bucket one weight ``(heads, dim, k)``. FLOPs and bytes are those before rounding: padding shows as waste.
    """

    stored = False
    axes = ("m", "k", "heads", "low", "high")
    products = ()
    compressed_axis = "high"
    general = (AxisSweep("low", range(64, 129, 8), {"m": 512, "k": 512, "heads": 32, "high": 128}),)

    def __init__(self, way: Way) -> None:
        self.way = way
        self.name = f"batched_gemm_{way}"
        # Bucketed and padded dims are multiples of 8 when they run, so they do not decide alignment.
        self.gemm_sides = {"k": "k", "low": "n", "high": "n"} if way == "separate" else {"k": "k"}

    def buckets(self, axes: Axes) -> tuple[tuple[int, int], ...]:
        """Return the number of heads and the dim of every bucket; the heads of a bucket are neighbours."""
        dims = self.dims(axes)
        if self.way == "separate":
            return tuple((1, dim) for dim in dims)
        rounded = [-(-dim // _BUCKET) * _BUCKET for dim in dims]
        if self.way == "padded":
            return ((len(dims), rounded[-1]),)
        return tuple((len(list(same)), dim) for dim, same in groupby(rounded))

    def dims(self, axes: Axes) -> tuple[int, ...]:
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
        m, k, heads, columns = axes["m"], axes["k"], axes["heads"], sum(self.dims(axes))
        return sum(Operand(shape, dtype).bytes for shape in ((heads, m, k), (columns, k), (m, columns)))

    def unmet(self, axes: Axes) -> str | None:
        return None if axes["heads"] >= 2 and axes["low"] <= axes["high"] else "at least 2 heads, and low <= high"

    def run(self, inputs: Sequence["Tensor"], outputs: Sequence["Tensor"]) -> Sequence["Tensor"]:
        import torch

        if self.way != "separate":
            return super().run(inputs, outputs)
        for x, weight, result in batches(inputs, outputs):
            torch.mm(x[0], weight[0].t(), out=result[0])
        return outputs


class SharedLowRank(LowRank):
    """Low-rank pairs of one input: ``hidden = x[m, k] @ A[pairs * r, k].T``, then each slice of r columns @ B[n, r].T.

    It writes the hidden activations, then the result of every pair.
    """

    name = "low_rank_shared"
    stored = False
    axes = ("m", "k", "r", "n", "pairs")
    reads = writes = ()
    products = ("m k r pairs", "m r n pairs")
    pair_of = None
    general = tuple(  # as q/k/v and gate/up can
        AxisSweep("r", _SHARED, {"m": m, "k": 4096, "n": n, "pairs": pairs})
        for m in (1, 1024)
        for n, pairs in ((1024, 3), (4096, 2))
    )

    def inputs(self, axes: Axes, dtype: str) -> tuple[Operand, ...]:
        m, k, r, n, pairs = (axes[name] for name in self.axes)
        return Operand((m, k), dtype), Operand((pairs * r, k), dtype), *[Operand((n, r), dtype)] * pairs

    def outputs(self, axes: Axes, dtype: str) -> tuple[Operand, ...]:
        m, _k, r, n, pairs = (axes[name] for name in self.axes)
        return Operand((m, pairs * r), dtype), *[Operand((m, n), dtype)] * pairs


SEPARATE, BUCKETED, PADDED = Heads("separate"), Heads("bucketed"), Heads("padded")
