"""The product of a few rows and a weight of 3 bits: tensor cores read numbers that threads make of words."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gac.runtime.kernels.gpu import ceil_div, launch_options, launching_on, starts_early
from gac.runtime.kernels.guard import gdc_launch_dependents, gdc_wait, jit, tl
from gac.runtime.kernels.low_bit.inputs import input_chunks, paired_inputs
from gac.runtime.kernels.low_bit.packed import MAGIC, Packed, read_units, words_of, zero_offset
from gac.runtime.kernels.ptx import packed, plus, product
from gac.runtime.kernels.split_k import SplitK, Tile, split_k_reduce, tile_for, zero_counters
from gac.runtime.limits import LEAST_GROUP


@dataclass(frozen=True)
class Rows:
    """Launch parameters of the product with a few rows."""

    rows: int  # of the input, of a program
    tiles: int  # of 16 rows of the weight, of a warp
    programs_per_sm: int  # programs for each SM, at most, where several share a tile
    warps: int = 4  # of a program

    def tile(self, block: int) -> Tile:
        return Tile(self.rows, 16 * self.tiles * self.warps, block, self.warps, 1, self.programs_per_sm)


_ROWS = {8: Rows(8, 2, 4), 16: Rows(16, 2, 4), 32: Rows(32, 2, 2)}
"""By the most rows; the last for more, too."""


def skinny_gemm(x: Tensor, weight: Packed, how: Rows | None = None) -> Tensor:
    """Some rows x ``(rows, columns)``: one launch.

    Where tiles are few, several programs share each, every one with a part of the columns.
    """
    how = how or tile_for(len(x), _ROWS)
    shared = weight.group == LEAST_GROUP
    numbers = weight.unit // 2 if shared else weight.unit  # of a thread, in a block
    tile = how.tile(4 * numbers)
    sharing = SplitK.of(tile, len(x), weight.rows, weight.columns, x, torch.float32, zero_counters(x))
    out, early = x.new_empty(len(x), weight.rows), starts_early(x)
    x = x if x.storage_offset() % 8 == 0 else x.clone()  # eight numbers are read at a time
    with launching_on(x):
        few_rows_kernel[(ceil_div(weight.rows, tile.outputs), ceil_div(len(x), how.rows), sharing.split)](
            x.view(torch.int32), *weight.read, out, sharing.sums, sharing.counters,
            len(x), weight.rows, *weight.sizes, MAGIC[x.dtype],
            **weight.options, SHARED=shared,
            EIGHTS=how.rows // 8, TILES=how.tiles, WARPS=how.warps, EVEN_K=weight.columns % (4 * numbers) == 0,
            EARLY=early, COMPILED=x.is_cuda, num_warps=how.warps, **launch_options(early),
        )  # fmt: skip
    return out


# The Triton kernel. Tuples have a tensor for every 8 rows of the weight, or of x. Units are three words of 32 numbers.


@jit
def _read(
    words_at, scales_at, zeros, rows, block, left, n_cols, groups,
    NUMBERS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, OWN_ZERO: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Return words of a block, and its scales and offsets of zero points in turn; ``left`` units are there."""
    apart: tl.constexpr = 4 * NUMBERS // 32 * BITS
    group = block * (4 * NUMBERS) // GROUP if GROUP else 0
    words, factors = (), ()
    for tile in tl.static_range(len(rows)):
        words += read_units(words_at[tile] + block * apart, left > 0, BITS, 1)
        scales = tl.load(scales_at[tile] + group).to(tl.float32)
        factors += scales, zero_offset(zeros, rows[tile], group, groups, BITS, OWN_ZERO, dtype)
    return words, factors


@jit
def _inputs(inputs_at, block, left, NUMBERS: tl.constexpr, SHARED: tl.constexpr):
    """Return inputs of a block, 16 bytes a tensor: zeros where no units are left."""
    chunks = ()
    for eight in tl.static_range(len(inputs_at)):
        offsets = inputs_at[eight] + block * (2 * NUMBERS)
        chunks += input_chunks(offsets, left, NUMBERS // 8, 8 if SHARED else 4, True)
    return chunks


@jit
def _half_unit(unit, later):
    """Half the numbers of a unit: the later ones for some threads."""
    first, second = tl.where(later, unit[2][0], unit[0][0]), tl.where(later, unit[3][0], unit[1][0])
    return (first,), (second,)


@jit
def _pair(unit, less, magic, AT: tl.constexpr, dtype: tl.constexpr, COMPILED: tl.constexpr):
    """Numbers AT of a unit, and half a unit further on, less their zero points: 16-bit numbers in int32."""
    numbers = ((unit[AT // 4][0] >> (AT % 4 * 3)) & 0x00070007) | magic
    return plus(numbers, less, dtype, COMPILED)


@jit
def _sixteen(
    units, less, magic, TILE: tl.constexpr, AT: tl.constexpr, dtype: tl.constexpr, COMPILED: tl.constexpr
):  # fmt: skip
    """The operand of a product that has 16 rows of the weight: pairs AT and AT + 1 of each thread."""
    result = ()
    for part in tl.static_range(4):
        of_rows, off = units[2 * TILE + part % 2], less[2 * TILE + part % 2]
        result += (_pair(of_rows, off, magic, AT + part // 2, dtype, COMPILED),)
    return result


@jit
def _four(values, AT: tl.constexpr):
    return values[4 * AT], values[4 * AT + 1], values[4 * AT + 2], values[4 * AT + 3]


@jit
def _multiplied(
    words, factors, chunks, total, later, magic,
    NUMBERS: tl.constexpr, SHARED: tl.constexpr, TILES: tl.constexpr, EIGHTS: tl.constexpr,
    BITS: tl.constexpr, dtype: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Return sums with those of a block."""
    units, less, inputs = (), (), ()
    for tile in tl.static_range(2 * TILES):
        unit = words_of(words, tile, BITS)
        units += ((_half_unit(unit, later) if SHARED else unit),)
        off = tl.zeros_like(total[0]) - factors[2 * tile + 1]
        less += (packed(off, off, dtype, COMPILED),)
    count: tl.constexpr = NUMBERS // 8  # of 16 bytes of inputs
    for eight in tl.static_range(EIGHTS):
        inputs += (paired_inputs(chunks, eight * count, count, 1, COMPILED),)
    for at in tl.static_range(0, 4 * count, 2):
        result = ()
        for tile in tl.static_range(TILES):
            a = _sixteen(units, less, magic, tile, at, dtype, COMPILED)
            for eight in tl.static_range(EIGHTS):
                sums = _four(total, tile * EIGHTS + eight)
                result += product(a, (inputs[eight][at], inputs[eight][at + 1]), sums, dtype, COMPILED)
        total = result
    return total


@jit
def _rescaled(total, factors, following, is_last, TILES: tl.constexpr, EIGHTS: tl.constexpr):
    """Return sums in the scale of the following group, those after the last one in their own."""
    result = ()
    for tile in tl.static_range(TILES):
        above = factors[4 * tile] / tl.where(is_last, 1.0, following[4 * tile])
        below = factors[4 * tile + 2] / tl.where(is_last, 1.0, following[4 * tile + 2])
        for eight in tl.static_range(EIGHTS):
            sums = _four(total, tile * EIGHTS + eight)
            result += sums[0] * above, sums[1] * above, sums[2] * below, sums[3] * below
    return result


@jit
def _stacked(values, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """COUNT tensors, a power of two, from FIRST on, as one: ``(threads, COUNT)``."""
    if COUNT == 1:
        return tl.reshape(values[FIRST], (values[FIRST].shape[0], 1))
    else:
        half: tl.constexpr = COUNT // 2
        both = tl.join(_stacked(values, FIRST, half), _stacked(values, FIRST + half, half))
        return tl.reshape(tl.permute(both, (0, 2, 1)), (both.shape[0], COUNT))


@jit(do_not_specialize=["m", "groups"])
def few_rows_kernel(
    x_ptr, words_ptr, scale_ptr, zeros_ptr, out_ptr, partial_ptr, counters_ptr, m, n, n_cols, groups, magic,
    BITS: tl.constexpr, GROUP: tl.constexpr, OWN_ZERO: tl.constexpr, SHARED: tl.constexpr,
    EIGHTS: tl.constexpr, TILES: tl.constexpr, WARPS: tl.constexpr, EVEN_K: tl.constexpr,
    EARLY: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """``x @ weight.T`` for EIGHTS times 8 rows of x, which is read as int32: two numbers of 16 bits.

    A warp multiplies TILES times 16 rows of the weight by all rows of x, a block of columns at a time. Four threads
    beside each other have a unit of a block each, or, SHARED, half a unit. What a block needs is loaded while the
    block before it is multiplied. Sums are in the scale of the group at hand: they change it with the group.
    """
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    numbers: tl.constexpr = 16 if SHARED else 32  # of a thread, in a block
    thread = tl.arange(0, 32 * WARPS)
    eighth, quarter = thread // 4 % 8, thread % 4
    place, later = quarter % 2 if SHARED else quarter, quarter >= 2
    units = n_cols // 32 - place  # of a row, from the thread's own on
    units_of_block: tl.constexpr = 4 * numbers // 32
    words_of_row = n_cols // 32 * BITS
    rows, scales_at, words_at, inputs_at = (), (), (), ()
    for tile in tl.static_range(2 * TILES):
        row = (tl.program_id(0) * WARPS + thread // 32) * (16 * TILES) + tile * 8 + eighth
        rows += (tl.minimum(row, n - 1),)
        scales_at += (scale_ptr + rows[tile] * (groups if GROUP else 1),)
        words_at += (words_ptr + rows[tile].to(tl.int64) * words_of_row + place * BITS,)
    input_at = place * 16 + later * 4 if SHARED else place * 16
    for eight in tl.static_range(EIGHTS):
        row = tl.minimum((tl.program_id(1) * EIGHTS + eight) * 8 + eighth, m - 1)
        inputs_at += (x_ptr + row.to(tl.int64) * (n_cols // 2) + input_at,)
    blocks = tl.cdiv(n_cols, 4 * numbers)
    share = tl.cdiv(blocks, tl.num_programs(2))
    first = tl.program_id(2) * share
    last = tl.minimum(first + share, blocks)
    block = tl.minimum(first, blocks - 1)  # the last share may be empty
    left = 1 if EVEN_K else (units - block * units_of_block)[:, None]
    words, factors = _read(
        words_at, scales_at, zeros_ptr, rows, block, left, n_cols, groups, numbers, BITS, GROUP, OWN_ZERO, dtype
    )
    if EARLY:
        gdc_wait()
    chunks = _inputs(inputs_at, block, left, numbers, SHARED)
    total = ()
    for _ in tl.static_range(4 * TILES * EIGHTS):
        total += (tl.zeros((32 * WARPS,), tl.float32),)
    for start in tl.range(first, last):
        block = tl.minimum(start + 1, blocks - 1)
        left = 1 if EVEN_K else (units - block * units_of_block)[:, None]
        next_words, next_factors = _read(
            words_at, scales_at, zeros_ptr, rows, block, left, n_cols, groups,
            numbers, BITS, GROUP, OWN_ZERO, dtype,
        )  # fmt: skip
        next_chunks = _inputs(inputs_at, block, left, numbers, SHARED)
        total = _multiplied(
            words, factors, chunks, total, later, magic, numbers, SHARED, TILES, EIGHTS, BITS, dtype, COMPILED
        )
        total = _rescaled(total, factors, next_factors, start + 1 == last, TILES, EIGHTS)
        words, factors, chunks = next_words, next_factors, next_chunks
    if EARLY:  # not before, as in ``tiles``
        gdc_launch_dependents()
    number = tl.arange(0, 4 * TILES * EIGHTS)[None, :]
    column = (tl.program_id(0) * WARPS + thread // 32) * (16 * TILES) + eighth
    column = column[:, None] + number // (4 * EIGHTS) * 16 + number // 2 % 2 * 8
    row = tl.program_id(1) * (8 * EIGHTS) + quarter[:, None] * 2 + number // 4 % EIGHTS * 8 + number % 2
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    sums = _stacked(total, 0, 4 * TILES * EIGHTS)
    sums, done = split_k_reduce(sums, partial_ptr, counters_ptr, tile, tl.program_id(2), tl.num_programs(2))
    tl.store(out_ptr + row.to(tl.int64) * n + column, sums.to(dtype), mask=(row < m) & (column < n) & done)
