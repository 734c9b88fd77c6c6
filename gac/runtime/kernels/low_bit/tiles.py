"""The product of many rows and a weight of few bits, tile by tile: numbers are made in registers.

They are multiplied as whole numbers, so that scales come after sums in float32.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gac.runtime.kernels.elementwise.rows import AddNorm, gated_values, normed_values, power_of_two, warps_for
from gac.runtime.kernels.gpu import ceil_div, launch_options, launching_on, starts_early
from gac.runtime.kernels.guard import gdc_launch_dependents, gdc_wait, jit, tl
from gac.runtime.kernels.low_bit.dequantise import numbers_of
from gac.runtime.kernels.low_bit.packed import MAGIC, Packed, zero_offset
from gac.runtime.kernels.split_k import SplitK, Tile, clear, split_k_reduce, tile_for
from gac.runtime.limits import LEAST_GROUP

MOST_ROWS = 128  # rows of the input that are multiplied in tiles; for more the weight is written out first
_ARRANGED = 1024
_CHUNK = 128  # columns that are multiplied before their sums are scaled, at most


@dataclass(frozen=True)
class Order:
    """The order in which tiles take columns: four threads beside each other read a row of the weight."""

    pairs: int  # of numbers of a unit, which is a word, or three words of 3 bits
    across: int  # threads that read units of their own
    deep: int  # neighbouring units that a thread reads

    @staticmethod
    def of(step: int, bits: int) -> "Order":
        pairs = 16 if bits == 3 else 16 // bits
        units = step // (2 * pairs)
        across = min(4, units)
        return Order(pairs, across, min(4, units // across))


_TILES = {
    16: Tile(16, 64, 256, 4, 3, 4), 32: Tile(32, 128, 128, 4, 4), 64: Tile(64, 64, 256, 4, 3),
    MOST_ROWS: Tile(64, 128, 128, 4, 3),
}  # fmt: skip
"""By the most rows."""
_IN_SHORT_GROUPS = _TILES | {64: Tile(64, 128, 128, 4, 3)}
_OF_8_BITS = _TILES | {16: Tile(16, 64, 128, 4, 4), 64: Tile(64, 64, 128, 4, 4)}


@dataclass(frozen=True, eq=False)
class ArrangedRows:
    """Rows in the order in which the product with one weight takes them, once."""

    inputs: Tensor  # zeros up to whole tiles
    sums: Tensor  # of chunks of columns, float32, ``(chunks, rows)``
    rows: int
    columns: int
    tile: Tile
    chunk: int
    order: Order
    sharing: SplitK


def gemm(x: Tensor, weight: Packed, how: Tile | None = None, gated: bool = False) -> Tensor:
    """Some rows x ``(rows, columns)``: two launches; sums of whole numbers are scaled group by group.

    Where tiles are few, several programs share each, every one with a part of the columns.

    Args:
        gated: x is ``(rows, 2 columns)``, gate beside up: multiply ``silu(gate) * up``, rounded to 16 bits.
    """
    return gemm_of(arranged(x, weight, how, gated), weight)


def gemm_of(x: ArrangedRows, weight: Packed) -> Tensor:
    """The second launch of ``gemm``."""
    inputs, how, sharing = x.inputs, x.tile, x.sharing
    out, early = inputs.new_empty(x.rows, weight.rows), starts_early(inputs)
    with launching_on(inputs):
        gemm_kernel[(ceil_div(weight.rows, how.outputs), len(inputs) // how.rows, sharing.split)](
            inputs, x.sums, *weight.read, out, sharing.sums, sharing.counters,
            x.rows, weight.rows, *weight.sizes, MAGIC[inputs.dtype],
            **weight.options, ACROSS=x.order.across, DEEP=x.order.deep,
            BLOCK_M=how.rows, BLOCK_N=how.outputs, BLOCK_K=how.numbers, CHUNK=x.chunk,
            EVEN_K=weight.columns % how.numbers == 0, SPLIT_K=sharing.split, NUM_STAGES=how.stages, EARLY=early,
            num_warps=how.warps, **launch_options(early),
        )  # fmt: skip
    return out


def _tile(rows: int, weight: Packed) -> Tile:
    if weight.bits == 8:
        return tile_for(rows, _OF_8_BITS)
    return tile_for(rows, _IN_SHORT_GROUPS if weight.group == LEAST_GROUP else _TILES)


def arranged(
    x: Tensor, weight: Packed, how: Tile | None = None, gated: bool = False, norm: AddNorm | None = None
) -> ArrangedRows:
    """The first launch of ``gemm``; or that of a norm of x, contiguous, which is multiplied then."""
    how = how or _tile(len(x), weight)
    chunk = min(_CHUNK, how.numbers, weight.group or how.numbers)
    how = how.fitted(how.numbers * (how.outputs * weight.bits // 8 + how.rows * x.itemsize), x.device)
    sharing = SplitK.of(how, len(x), weight.rows, weight.columns, x, torch.float32)
    order, early, counters = Order.of(chunk, weight.bits), starts_early(x), sharing.counters
    height, width = (ceil_div(size, part) * part for size, part in ((len(x), how.rows), (weight.columns, how.numbers)))
    inputs, sums = x.new_empty(height, width), x.new_empty(width // chunk, height, dtype=torch.float32)
    at_once = _ARRANGED if norm is None else power_of_two(width)
    residual, gain, eps, (out, summed), full = norm or AddNorm(x, x, 0.0, (x, x), True)
    with launching_on(x):
        arrange_kernel[(height, ceil_div(width, at_once))](
            x, residual, gain, out, summed, inputs, sums, counters, len(counters), len(x), weight.columns, width, eps,
            PAIRS=order.pairs, ACROSS=order.across, DEEP=order.deep, STEP=chunk, GATED=gated, NORM=norm is not None,
            WHOLE=full, AT_ONCE=at_once, MOST=power_of_two(len(counters)), EARLY=early,
            num_warps=4 if norm is None else warps_for(width), **launch_options(early),
        )  # fmt: skip
    return ArrangedRows(inputs, sums, len(x), weight.columns, how, chunk, order, sharing)


# The Triton kernels.


@jit(do_not_specialize=["count", "m"])
def arrange_kernel(
    x_ptr, residual_ptr, weight_ptr, norm_ptr, sum_ptr, out_ptr, partial_ptr, counters_ptr,
    count, m, n_cols, width, eps,
    PAIRS: tl.constexpr, ACROSS: tl.constexpr, DEEP: tl.constexpr, STEP: tl.constexpr, GATED: tl.constexpr,
    NORM: tl.constexpr, WHOLE: tl.constexpr, AT_ONCE: tl.constexpr, MOST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Columns of x in the order in which ``gemm_kernel`` takes them, zeros behind the last column and row.

    ACROSS threads beside each other read DEEP units of 2 PAIRS numbers each. They take numbers 0 and PAIRS of their
    first units, thread by thread, then 1 and PAIRS + 1, and so on. Sums of STEP columns are written too, and the
    counters of ``gemm_kernel`` cleared. NORM, WHOLE: a program takes a row through a norm first, see ``AddNorm``.
    """
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    thread = offsets // 2 % ACROSS
    pair = offsets // (2 * ACROSS) % PAIRS
    deep = offsets // (2 * ACROSS * PAIRS) % DEEP
    block = offsets // (2 * ACROSS * PAIRS * DEEP)
    column = ((block * ACROSS + thread) * DEEP + deep) * 2 * PAIRS + pair + offsets % 2 * PAIRS
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    there, place = (column < n_cols) & (row < m), x_ptr + row * (2 * n_cols if GATED else n_cols) + column
    inputs = tl.load(place, mask=there, other=0.0)
    if GATED:
        other = tl.load(place + n_cols, mask=there, other=0.0)
        inputs = gated_values(inputs.to(tl.float32), other.to(tl.float32), False, x_ptr.dtype.element_ty)
    if NORM:
        other = tl.load(residual_ptr + row * n_cols + column, mask=there, other=0.0)
        inputs = (inputs.to(tl.float32) + other.to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * n_cols + column, inputs, mask=there)
        gain = tl.load(weight_ptr + column, mask=column < n_cols, other=0.0).to(tl.float32)
        inputs = normed_values(inputs.to(tl.float32), gain, n_cols, eps, False, x_ptr.dtype.element_ty)
        if WHOLE:
            tl.store(norm_ptr + row * n_cols + column, inputs, mask=there)
        elif row == 0:
            tl.store(norm_ptr, float("nan"))
    tl.store(out_ptr + row * width + offsets, inputs, mask=offsets < width)
    many: tl.constexpr = AT_ONCE // STEP
    step = tl.program_id(1) * many + tl.arange(0, many)
    result = tl.sum(tl.reshape(inputs.to(tl.float32), (many, STEP)), axis=1)
    tl.store(partial_ptr + step * tl.num_programs(0) + row, result, mask=step * STEP < width)
    if tl.program_id(0) + tl.program_id(1) == 0:
        clear(counters_ptr, count, MOST)


@jit
def _of_chunk(
    scale, zeros, sums, row, column, n_cols, filled, groups, height,
    CHUNK: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, OWN_ZERO: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Return scales, how far zero points lie off, and sums of inputs, of CHUNK columns from one on, if it is there."""
    group = tl.minimum(column, n_cols - 1) // GROUP if GROUP else 0
    off = zero_offset(zeros, row, group, groups, BITS, OWN_ZERO, dtype)
    chunk = tl.minimum(column, filled - CHUNK) // CHUNK
    return tl.load(scale + group).to(tl.float32), off, tl.load(sums + chunk * height)


@jit(do_not_specialize=["m", "groups"])
def gemm_kernel(
    x_ptr, x_sums_ptr, words_ptr, scale_ptr, zeros_ptr, out_ptr, partial_ptr, counters_ptr, m, n, n_cols, groups, magic,
    BITS: tl.constexpr, GROUP: tl.constexpr, OWN_ZERO: tl.constexpr, ACROSS: tl.constexpr, DEEP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr, EVEN_K: tl.constexpr,
    SPLIT_K: tl.constexpr, NUM_STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """``weight @ x.T`` for x as ``arranged`` left it: numbers go from registers into it.

    They are multiplied as ``numbers_of`` gives them, CHUNK columns of one group at a time. From a product the sums of
    inputs times what numbers have too much are taken; then it is scaled.
    """
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    pairs: tl.constexpr = 16 if BITS == 3 else 16 // BITS
    blocks: tl.constexpr = CHUNK // (2 * pairs * DEEP * ACROSS)
    chunks: tl.constexpr = BLOCK_K // CHUNK
    base = tl.minimum(column, n - 1)
    filled = tl.cdiv(n_cols, BLOCK_K) * BLOCK_K
    inputs_at = x_ptr + row.to(tl.int64)[:, None] * filled + tl.arange(0, CHUNK)[None, :]
    of_row = scale_ptr + base * (groups if GROUP else 1)
    x_sums_ptr += row
    height = tl.num_programs(1) * BLOCK_M
    begin = tl.program_id(2) * BLOCK_K
    step: tl.constexpr = SPLIT_K * BLOCK_K
    if EARLY:
        gdc_wait()
    factors = ()
    for part in tl.static_range(chunks):
        factors += _of_chunk(
            of_row, zeros_ptr, x_sums_ptr, base, begin + part * CHUNK, n_cols, filled, groups, height,
            CHUNK, BITS, GROUP, OWN_ZERO, dtype,
        )  # fmt: skip
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in tl.range(begin, n_cols, step, num_stages=NUM_STAGES):
        following = ()
        for part in tl.static_range(chunks):
            first = start + part * CHUNK
            numbers = numbers_of(words_ptr, base, magic, first, n_cols, BITS, CHUNK, EVEN_K, dtype)
            numbers = tl.permute(tl.reshape(numbers, (BLOCK_N, blocks, ACROSS, DEEP, pairs, 2)), (0, 1, 3, 4, 2, 5))
            inputs = tl.trans(tl.load(inputs_at + first))
            following += _of_chunk(  # loaded a step before
                of_row, zeros_ptr, x_sums_ptr, base, first + step, n_cols, filled, groups, height,
                CHUNK, BITS, GROUP, OWN_ZERO, dtype,
            )  # fmt: skip
            result = tl.dot(tl.reshape(numbers, (BLOCK_N, CHUNK)), inputs)
            if OWN_ZERO:
                result -= factors[3 * part + 1][:, None] * factors[3 * part + 2][None, :]
            else:
                result -= (factors[3 * part + 1] * factors[3 * part + 2])[None, :]
            total += factors[3 * part][:, None] * result
        factors = following
    if EARLY:  # not before: programs that wait would take places, and leave some SMs more than others
        gdc_launch_dependents()
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    total, last = split_k_reduce(total, partial_ptr, counters_ptr, tile, tl.program_id(2), SPLIT_K)
    place = row.to(tl.int64)[:, None] * n + column[None, :]
    tl.store(out_ptr + place, tl.trans(total).to(dtype), mask=(row < m)[:, None] & (column < n)[None, :] & last)
