"""GEMMs of 16 bits with 1 to 64 rows, as decoding has them: on Hopper GPUs the faster of cuBLAS and a kernel here.

Such a GEMM takes as long as reading its weight. The kernels are launched early (programmatic dependent launch). The one
for a single row loads its first weights while the kernel before it still runs, and only then waits for its input.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from gac.runtime.contract import FEW_ROWS
from gac.runtime.kernels.gpu import HAS_TRITON, SIXTEEN_BIT, ceil_div, launch_options, launching_on
from gac.runtime.kernels.guard import gdc_launch_dependents, gdc_wait, jit, tl
from gac.runtime.kernels.split_k import SplitK, Tile, split_k_reduce, zero_counters

_HOPPER = 9
ALIGNED = 8
"""Numbers of 16 bits that one load takes."""
_WAVE = 264
"""Programs that run at the same time: two on each of 132 SMs."""
_LONG = 2048
"""Columns from which several programs share a row of the weight."""
_TILE = Tile(16, 64, 128, 4, 4)
_TALL_STAGES = 5  # of tiles for more than 16 rows
_HALF, _NARROW = 32, 1024
"""Rows of a tile where a tile of all rows leaves most SMs idle, and outputs up to which it does in any case."""
_FACTORS = 3
"""Second factors of a launch, at most: those of q, k and v."""
_OF_PAIRS = ["m", *(f"{name}_{index}" for name in ("rank", "size", "column", "start") for index in range(_FACTORS))]
"""Arguments of a kernel that is compiled once for all of their values."""


@dataclass(frozen=True)
class SecondFactor:
    """The second factor of one of the low-rank pairs that share their first GEMM.

    Attributes:
        rank: of the pair.
        size: output features.
        column: of its input in the products of the first GEMM.
        start: its first column in the result.
        offset: of its numbers, in the factors of all pairs.
    """

    rank: int
    size: int
    column: int
    start: int
    offset: int

    def weight(self, factors: Tensor) -> Tensor:
        """Return the part of all factors that is this one, shape ``(size, rank)``."""
        return factors.as_strided((self.size, self.rank), (self.rank, 1), factors.storage_offset() + self.offset)


def multiply(x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
    """Write ``x @ weight.T + bias`` to ``out``, by the faster of a kernel here and cuBLAS.

    Args:
        x: shape ``(rows, in)``; rows may lie apart.
        weight: shape ``(n, in)``, contiguous.
        out: shape ``(rows, n)``; rows may lie apart.
        bias: shape ``(n,)``.
    """
    runs = kernels_run(x, weight)
    if runs and len(x) == 1:
        _one_row(x, weight, out, bias)
    elif runs and (tile := tile_of(len(x), *weight.shape)) is not None:
        _some_rows(x, weight, out, bias, tile)
    else:
        _gemm(x, weight, out, bias)


def multiply_factors(products: Tensor, pairs: Sequence[SecondFactor], factors: Tensor, out: Tensor) -> None:
    """Write the outputs of low-rank pairs to their columns of ``out``, by one launch where a kernel here is the faster.

    Args:
        products: of the first GEMM, shape ``(rows, columns)``; rows may lie apart.
        pairs: in the order of their factors.
        factors: second factors ``(size, rank)``, one after the other.
        out: shape ``(rows, features)``; rows may lie apart.
    """
    if 1 < len(pairs) <= _FACTORS and len(products) > 1 and all(_is_short(products, pair) for pair in pairs):
        _some_factors(products, pairs, factors, out)
        return
    for pair in pairs:
        x, y = products.narrow(1, pair.column, pair.rank), out.narrow(1, pair.start, pair.size)
        multiply(x, pair.weight(factors), y)


def _is_short(products: Tensor, pair: SecondFactor) -> bool:
    aligned = all(number % ALIGNED == 0 for number in (pair.rank, pair.column, pair.start, products.stride(0)))
    is_short = aligned and pair.rank < _LONG and _takes_few(products)
    return is_short and tile_of(len(products), pair.size, pair.rank) is not None


def _gemm(x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None) -> None:
    if not x.is_cuda:
        x = x.contiguous()  # oneDNN reads past the ends of rows that lie apart, where there may be NaN
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def gated_row(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Write ``silu(gate) * up`` to ``out``, where gate and up are the halves of ``x @ weight.T``.

    Args:
        x: one row, shape ``(1, in)``, for which ``kernels_run``.
        weight: shape ``(2 n, in)``, contiguous.
        out: shape ``(1, n)``.
    """
    _one_row(x, weight, out, None, gated=True)


def kernels_run(x: Tensor, weight: Tensor) -> bool:
    """Return True if the kernels here run for this input, on this GPU."""
    return _takes_few(x) and weight.shape[1] % ALIGNED == 0 and x.stride(0) % ALIGNED == 0 and x.stride(1) == 1


def _takes_few(x: Tensor) -> bool:
    return 0 < len(x) <= FEW_ROWS and runs_early(x)


def runs_early(x: Tensor) -> bool:
    """Return True if kernels of this input can be launched before the kernel before them has ended."""
    return x.is_cuda and HAS_TRITON and x.dtype in SIXTEEN_BIT and _is_hopper(x.device)


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == _HOPPER


def tile_of(rows: int, n: int, columns: int) -> Tile | None:
    """Return the tile for 2 to 64 rows and a weight ``(n, columns)``; None where cuBLAS is faster.

    The kernel is faster where cuBLAS has too few tiles for all SMs, as measured on an H200: see
    tests/benchmarks/results/vllm.md.
    """
    if 4 * ceil_div(n, _TILE.outputs) > _WAVE:
        return None
    if rows <= _TILE.rows:
        return _TILE
    halved = rows <= _HALF or n <= _NARROW or columns < _LONG
    return replace(_TILE, rows=_HALF if halved else FEW_ROWS, stages=_TALL_STAGES, programs_per_sm=1)


def _one_row(x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None, gated: bool = False) -> None:
    n, columns = weight.shape
    rows, numbers = (2, 1024) if columns >= _LONG else (4, 512)
    with launching_on(x):
        one_row_kernel[(ceil_div(n, rows),)](
            x, weight, bias, out, n, columns,
            BLOCK_N=rows, BLOCK_K=numbers, EVEN_K=columns % numbers == 0, GATED=gated, EARLY=x.is_cuda,
            num_warps=4, **launch_options(early=x.is_cuda),
        )  # fmt: skip


def _some_rows(x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None, tile: Tile) -> None:
    n, columns = weight.shape
    sharing = SplitK(1, x, x)
    if columns >= _LONG:
        sharing = SplitK.of(tile, len(x), n, columns, x, torch.float32, zero_counters(x))
    with launching_on(x):
        some_rows_kernel[(ceil_div(n, tile.outputs), sharing.split, ceil_div(len(x), tile.rows))](
            x, weight, bias, out, sharing.sums, sharing.counters, len(x), n, columns, x.stride(0), out.stride(0),
            BLOCK_M=tile.rows, BLOCK_N=tile.outputs, BLOCK_K=tile.numbers, SPLIT_K=sharing.split,
            NUM_STAGES=tile.stages, EARLY=x.is_cuda, num_warps=tile.warps, **launch_options(early=x.is_cuda),
        )  # fmt: skip


def _some_factors(products: Tensor, pairs: Sequence[SecondFactor], factors: Tensor, out: Tensor) -> None:
    tile = tile_of(len(products), pairs[0].size, pairs[0].rank)
    assert tile is not None, "``_is_short`` has seen it"
    ranks, sizes, columns, starts = (
        [getattr(pair, name) for pair in pairs] + [0] * (_FACTORS - len(pairs))
        for name in ("rank", "size", "column", "start")
    )
    programs = sum(ceil_div(size, tile.outputs) for size in sizes)
    with launching_on(products):
        some_factors_kernel[(programs, ceil_div(len(products), tile.rows))](
            products, factors, out, len(products), products.stride(0), out.stride(0), *ranks, *sizes, *columns, *starts,
            BLOCK_M=tile.rows, BLOCK_N=tile.outputs, BLOCK_K=tile.numbers, NUM_STAGES=_TILE.stages,
            EARLY=products.is_cuda, num_warps=tile.warps, **launch_options(early=products.is_cuda),
        )  # fmt: skip


# The Triton kernels.


@jit
def gated_product(gate, up, NARROW: tl.constexpr):
    """``silu(gate) * up`` of float32 values, in 16 bits; its division is shorter than that of ``gated_values``."""
    activated = (gate / (1 + tl.exp(-gate))).to(NARROW).to(tl.float32)
    return (activated * up).to(NARROW)


@jit
def one_row_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, n, n_cols,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, GATED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """``weight @ x``. GATED: rows of gate and up take turns in a program, and ``silu(gate) * up`` is stored."""
    index = tl.arange(0, BLOCK_N)
    if GATED:
        row = tl.program_id(0) * (BLOCK_N // 2) + index // 2 + index % 2 * (n // 2)
    else:
        row = tl.program_id(0) * BLOCK_N + index
    offsets = tl.arange(0, BLOCK_K)
    weights = weight_ptr + tl.minimum(row, n - 1).to(tl.int64)[:, None] * n_cols + offsets[None, :]
    if EARLY:
        gdc_launch_dependents()
    values = tl.load(weights) if EVEN_K else tl.load(weights, mask=(offsets < n_cols)[None, :], other=0.0)
    if EARLY:
        gdc_wait()
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in range(0, n_cols, BLOCK_K):
        column = start + offsets
        x = tl.load(x_ptr + column) if EVEN_K else tl.load(x_ptr + column, mask=column < n_cols, other=0.0)
        total += values.to(tl.float32) * x.to(tl.float32)[None, :]
        following = start + BLOCK_K
        if following < n_cols:
            if EVEN_K:
                values = tl.load(weights + following)
            else:
                values = tl.load(weights + following, mask=(following + offsets < n_cols)[None, :], other=0.0)
    result = tl.sum(total, 1)
    number = out_ptr.dtype.element_ty
    if GATED:
        gate, up = tl.split(tl.reshape(result.to(number).to(tl.float32), (BLOCK_N // 2, 2)))
        place = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        tl.store(out_ptr + place, gated_product(gate, up, number), mask=place < n // 2)
    else:
        if bias_ptr is not None:
            result += tl.load(bias_ptr + row, mask=row < n, other=0.0).to(tl.float32)
        tl.store(out_ptr + row, result.to(number), mask=row < n)


@jit
def sum_of_steps(
    weights, inputs, row, m, n_cols, first, step,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """The sum of products of BLOCK_K columns, from the first on, ``step`` apart."""
    offsets = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in tl.range(first, n_cols, step, num_stages=NUM_STAGES):
        there = start + offsets < n_cols
        values = tl.load(weights + start, mask=there[None, :], other=0.0)
        x = tl.load(inputs + start, mask=there[:, None] & (row < m)[None, :], other=0.0)
        total = tl.dot(values, x, total)
    return total


@jit(do_not_specialize=["m"])
def some_rows_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, partial_ptr, counters_ptr, m, n, n_cols, x_stride, out_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    NUM_STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """``weight @ x.T``; SPLIT_K programs share a tile, every one with steps that lie SPLIT_K apart."""
    tile, part = tl.program_id(0), tl.program_id(1)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    offsets = tl.arange(0, BLOCK_K)
    weights = weight_ptr + tl.minimum(column, n - 1).to(tl.int64)[:, None] * n_cols + offsets[None, :]
    inputs = x_ptr + row[None, :] * x_stride + offsets[:, None]
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    total = sum_of_steps(
        weights, inputs, row, m, n_cols, part * BLOCK_K, SPLIT_K * BLOCK_K, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES
    )
    shared = tl.program_id(2) * tl.num_programs(0) + tile
    total, last = split_k_reduce(total, partial_ptr, counters_ptr, shared, part, SPLIT_K)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + column, mask=column < n, other=0.0).to(tl.float32)[:, None]
    place = row[None, :] * out_stride + column[:, None]
    stored = (row < m)[None, :] & (column < n)[:, None] & last
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=stored)


@jit
def choice(index, x, y, z):
    """The value of an index from 0 to 2."""
    return tl.where(index == 0, x, tl.where(index == 1, y, z))


@jit(do_not_specialize=_OF_PAIRS)
def some_factors_kernel(
    x_ptr, weight_ptr, out_ptr, m, x_stride, out_stride, rank_0, rank_1, rank_2, size_0, size_1, size_2,
    column_0, column_1, column_2, start_0, start_1, start_2,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """``weight @ x.T`` of up to three weights, one after the other; a program takes a tile of one of them."""
    tile = tl.program_id(0)
    tiles_0, tiles_1 = tl.cdiv(size_0, BLOCK_N), tl.cdiv(size_1, BLOCK_N)
    pair = (tile >= tiles_0).to(tl.int32) + (tile >= tiles_0 + tiles_1).to(tl.int32)
    tile -= choice(pair, 0, tiles_0, tiles_0 + tiles_1)
    size = choice(pair, size_0, size_1, size_2)
    # All of these are multiples of 8. Where the compiler does not see that, it loads every number by itself.
    rank = choice(pair, rank_0, rank_1, rank_2) // 8 * 8
    column = choice(pair, column_0, column_1, column_2) // 8 * 8
    before = choice(pair, 0, rank_0 * size_0, rank_0 * size_0 + rank_1 * size_1) // 8 * 8
    start = choice(pair, start_0, start_1, start_2) // 8 * 8
    output = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    offsets = tl.arange(0, BLOCK_K)
    weights = weight_ptr + before + tl.minimum(output, size - 1)[:, None] * rank + offsets[None, :]
    inputs = x_ptr + column + row[None, :] * x_stride + offsets[:, None]
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    total = sum_of_steps(weights, inputs, row, m, rank, 0, BLOCK_K, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES)
    place = out_ptr + row[None, :] * out_stride + start + output[:, None]
    tl.store(place, total.to(out_ptr.dtype.element_ty), mask=(row < m)[None, :] & (output < size)[:, None])
