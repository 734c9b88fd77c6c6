"""GEMMs: linear layers, low-rank pairs, batches.

Weights are stored as in ``torch.nn.Linear``: ``(out, in)``.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from gac.core.arrays import Bools, Ints
from gac.profiling.operators.base import Axes, AxisSweep, Operand, Operator, around, corners, edges, indivisible, joined

if TYPE_CHECKING:
    from torch import Tensor

_FP8_RULE = "torch._scaled_mm takes k and n that are multiples of 16 only (16-byte rows of fp8)"

# At m = 1024 every multiple of 8, and stretches of integers across powers of two.
_STRETCHES = (*around(128, 24), *around(256, 8), *around(512, 8), *around(1024, 16), *around(2048, 8))
_FEW = {*range(128, 4097, 128), *around(128, 8), *around(1024, 8)}
_BY_M: dict[int, set[int]] = {
    1024: {*range(8, 4097, 8), *_STRETCHES},
    1: {*range(8, 1025, 8), *range(64, 4097, 64), *around(128, 24), *around(1024, 16)},
    16: _FEW,
    4096: _FEW,
}
_SWITCHING_M = {*range(1, 65), *range(8, 513, 8), *range(64, 4097, 64), *around(128, 4), *around(1024, 4)}
_IN_L2 = range(64, 2049, 64)
_RANKS = {*around(256, 8), *around(512, 8), *around(1024, 16)}
_WIDE = {*range(64, 3137, 64), *around(1024, 8)}
_HEAD_DIMS = {*range(8, 257, 8), *around(64, 8), *around(128, 24)}


def _fp8_sweeps(dims: Sequence[int]) -> tuple[AxisSweep, ...]:
    points = {*dims, *range(64, 4097, 64), 8, 520, 1016, 1023}
    return tuple(AxisSweep(axis, points, {"m": 1024, other: 4096}, "fp8") for axis, other in ("kn", "nk"))


class Linear(Operator):
    """``x[m, k] @ W[n, k].T``; in fp8 with one fp32 scale for each operand and a bf16 result.

    Both fp8 operands are contiguous along k, as ``_scaled_mm`` needs on Hopper: row-major x, column-major W.T. fp8
    accumulates as ``_scaled_mm`` does by default, without ``use_fast_accum``.
    """

    name = "linear"
    rowwise = False
    served = False
    axes = ("m", "k", "n")
    dtypes: tuple[str, ...] = ("bf16", "fp16", "fp8")
    stored = True
    reads, writes, products = ("m k", "n k"), ("m n",), ("m k n",)
    gemm_sides = {"k": "k", "n": "n"}  # noqa: RUF012
    general = (
        *(AxisSweep(axis, dims, {"m": m, other: 4096}) for m, dims in _BY_M.items() for axis, other in ("kn", "nk")),
        # Where the heuristic changes kernels: every m up to 64, every 8 up to 512, every 64 up to 4096, and stretches.
        AxisSweep("m", _SWITCHING_M, {"k": 4096, "n": 4096}),
        AxisSweep("m", {*range(1, 33), *range(64, 2049, 64)}, {"k": 4096, "n": 1024}),
        # At most 16 MB, also hot: the cost that a weight which stays in L2 would seem to have.
        AxisSweep("n", _IN_L2, {"m": 1, "k": 4096}, hot=True),
        AxisSweep("n", _IN_L2, {"m": 1024, "k": 1024}, hot=True),
        *_fp8_sweeps(range(16, 1025, 16)),
    )

    def inputs(self, axes: Axes, dtype: str) -> tuple[Operand, ...]:
        matrices = super().inputs(axes, dtype)
        if dtype != "fp8":
            return matrices
        rows, columns = (axes["m"], axes["n"]) if self.rowwise else (1, 1)
        return *matrices, Operand((rows, 1), "fp32"), Operand((1, columns), "fp32")

    def outputs(self, axes: Axes, dtype: str) -> tuple[Operand, ...]:
        return super().outputs(axes, "bf16" if dtype == "fp8" else dtype)

    def refusal(self, axes: Axes, dtype: str) -> str | None:
        broken = indivisible(axes, ("k", "n"), 16)
        return f"{_FP8_RULE}: {broken}" if dtype == "fp8" and broken else super().refusal(axes, dtype)

    def run(self, inputs: Sequence["Tensor"], outputs: Sequence["Tensor"]) -> Sequence["Tensor"]:
        import torch

        (x, weight, *scales), (result,) = inputs, outputs
        if scales:
            torch._scaled_mm(x, weight.t(), scales[0], scales[1], out_dtype=result.dtype, out=result)
        else:
            _multiply(x, weight, result, self.served)
        return outputs

    def compare(self, inputs: Sequence["Tensor"], result: Sequence["Tensor"]) -> tuple["Tensor", "Tensor"]:
        x, weight, *scales = inputs
        rows, columns = (edges(len(operand), x.device) for operand in (x, weight))
        expected = _rows(x, rows) @ _rows(weight, columns).t()
        if scales:
            expected *= scales[0].expand(len(x), 1)[rows] * scales[1].expand(1, len(weight))[:, columns]
        return corners(result[0]), expected


class RowwiseLinear(Linear):
    """``x[m, k] @ W[n, k].T`` in fp8 with one fp32 scale a row of x and a row of W, and a bf16 result."""

    name = "linear_rowwise"
    rowwise = True
    dtypes = ("fp8",)
    stored = False
    general = _fp8_sweeps(())


class ServedLinear(Linear):
    """``linear`` as GAC's plugin runs it in vLLM, in the kernels for few rows where they are faster."""

    name = "served_linear"
    served = True
    aligned_inputs = 16
    dtypes = ("bf16", "fp16")
    stored = False
    general = ()

    def in_own_kernel(self, shapes: Ints) -> Bools:
        from gac.runtime.kernels.few_rows import ALIGNED, tile_of

        marks = (k % ALIGNED == 0 and (m == 1 or tile_of(m, n, k) is not None) for m, k, n in shapes.tolist())
        return np.fromiter(marks, dtype=np.bool_, count=len(shapes))


class LowRank(Operator):
    """``(x[m, k] @ A[r, k].T) @ B[n, r].T``: two linear layers in a row."""

    name = "low_rank"
    served = False
    stored = True
    axes: tuple[str, ...] = ("m", "k", "r", "n")
    reads: tuple[str, ...] = ("m k", "r k", "n r")
    writes: tuple[str, ...] = ("m r", "m n")
    products: tuple[str, ...] = ("m k r", "m r n")
    compressed_axis = "r"
    gemm_sides = {"k": "k", "r": "nk", "n": "n"}  # noqa: RUF012
    pair_of: str | None = "linear"
    # Up to the rank that saves no parameters: square, to a narrow and to a wide output.
    general: tuple[AxisSweep, ...] = (
        AxisSweep("r", {*range(8, 2049, 8), *_RANKS}, {"m": 1024, "k": 4096, "n": 4096}),
        AxisSweep("r", {*range(32, 2049, 32), *_RANKS}, {"m": 1, "k": 4096, "n": 4096}),
        AxisSweep("r", {*range(8, 817, 8), *around(256, 8)}, {"m": 1024, "k": 4096, "n": 1024}),
        AxisSweep("r", _WIDE, {"m": 1024, "k": 4096, "n": 14336}),
        AxisSweep("r", _WIDE, {"m": 1024, "k": 14336, "n": 4096}),
        AxisSweep("r", range(64, 1025, 64), {"m": 1, "k": 4096, "n": 4096}, hot=True),
    )

    def run(self, inputs: Sequence["Tensor"], outputs: Sequence["Tensor"]) -> Sequence["Tensor"]:
        (x, first, *seconds), (hidden, *results) = inputs, outputs
        _multiply(x, first, hidden, self.served)
        for part, second, result in zip(hidden.chunk(len(seconds), dim=1), seconds, results, strict=True):
            _multiply(part, second, result, self.served)
        return results

    def compare(self, inputs: Sequence["Tensor"], result: Sequence["Tensor"]) -> tuple["Tensor", "Tensor"]:
        x, first, *seconds = inputs
        hidden = x[edges(len(x), x.device)].float() @ first.float().t()
        columns = edges(len(seconds[0]), x.device)
        pairs = zip(hidden.chunk(len(seconds), dim=1), seconds, result, strict=True)
        return joined([(corners(actual), part @ second[columns].float().t()) for part, second, actual in pairs])


class ServedLowRank(LowRank):
    name = "served_low_rank"
    served = True
    aligned_inputs = 16
    stored = False
    pair_of = "served_linear"
    general = ()


class BatchedGemm(Operator):
    """``x[b, m, k] @ W[b, n, k].T`` for every b."""

    name = "batched_gemm"
    stored = True
    axes: tuple[str, ...] = ("b", "m", "k", "n")
    reads, writes = ("b m k", "b n k"), ("b m n",)
    products: tuple[str, ...] = ("b m k n",)
    compressed_axis = "n"
    gemm_sides = {"k": "k", "n": "n"}  # noqa: RUF012
    # One GEMM a head, the head_dim as K (scores) and as N (values).
    general: tuple[AxisSweep, ...] = tuple(
        AxisSweep(axis, _HEAD_DIMS, {"b": 32, "m": 512, other: 512}) for axis, other in ("kn", "nk")
    )

    def run(self, inputs: Sequence["Tensor"], outputs: Sequence["Tensor"]) -> Sequence["Tensor"]:
        import torch

        for part, weight, result in batches(inputs, outputs):
            torch.bmm(part, weight.transpose(1, 2), out=result)
        return outputs

    def compare(self, inputs: Sequence["Tensor"], result: Sequence["Tensor"]) -> tuple["Tensor", "Tensor"]:
        parts = []
        for x, weight, actual in batches(inputs, result):
            heads, rows, columns = (edges(size, x.device) for size in (len(x), x.shape[1], weight.shape[1]))
            expected = x[heads][:, rows].float() @ weight[heads][:, columns].float().transpose(1, 2)
            parts.append((corners(actual[heads]), expected))
        return joined(parts)


def _multiply(x: "Tensor", weight: "Tensor", result: "Tensor", served: bool) -> None:
    if served:
        from gac.runtime.kernels.few_rows import multiply

        multiply(x, weight, result)
    else:
        import torch

        torch.mm(x, weight.t(), out=result)


def _rows(operand: "Tensor", rows: "Tensor") -> "Tensor":
    """Return these rows in float32; fp8 is indexed as bytes, since indexing has no fp8 kernel on every device."""
    import torch

    if operand.element_size() == 1:
        return operand.view(torch.uint8)[rows].view(operand.dtype).float()
    return operand[rows].float()


def batches(inputs: Sequence["Tensor"], outputs: Sequence["Tensor"]) -> Iterator[tuple["Tensor", "Tensor", "Tensor"]]:
    import torch

    x, *weights = inputs
    yield from zip(torch.split(x, [len(weight) for weight in weights]), weights, outputs, strict=True)


OPERATORS = (Linear(), RowwiseLinear(), ServedLinear(), LowRank(), ServedLowRank(), BatchedGemm())
