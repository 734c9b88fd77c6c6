"""The product of a few rows and a weight of few bits: tensor cores read numbers that threads make of words."""

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
    warps: int  # of a program
    parts: int  # warps that share rows of the weight, each with a part of the columns
    programs_per_sm: int  # programs for each SM, at most, where several share a tile

    def tile(self, block: int) -> Tile:
        outputs = 16 * self.tiles * self.warps // self.parts
        return Tile(self.rows, outputs, block * self.parts, self.warps, 1, self.programs_per_sm)


_ROWS = {8: Rows(8, 2, 8, 8, 2), 16: Rows(16, 2, 8, 8, 2), 32: Rows(32, 2, 8, 8, 1)}
"""By the most rows; the last for more, too."""


def few_rows(x: Tensor, weight: Packed, how: Rows | None = None) -> Tensor:
    """Some rows x ``(rows, columns)``: one launch.

    Where tiles are few, several programs share each, every one with a part of the columns.
    """
    how = how or tile_for(len(x), _ROWS)
    numbers = 16 if weight.bits == 8 or weight.group == LEAST_GROUP else 32  # of a thread, in a block
    shared = weight.unit > numbers
    tile = how.tile(4 * numbers)
    sharing = SplitK.of(tile, len(x), weight.rows, weight.columns, x, torch.float32, zero_counters(x))
    out, early = x.new_empty(len(x), weight.rows), starts_early(x)
    x = x if x.storage_offset() % 8 == 0 else x.clone()  # eight numbers are read at a time
    with launching_on(x):
        few_rows_kernel[(ceil_div(weight.rows, tile.outputs), ceil_div(len(x), how.rows), sharing.split)](
            x.view(torch.int32), *weight.read, out, sharing.sums, sharing.counters,
            len(x), weight.rows, *weight.sizes, MAGIC[x.dtype],
            **weight.options, DEEP=1 if shared else numbers // weight.unit, SHARED=shared,
            EIGHTS=how.rows // 8, TILES=how.tiles, WARPS=how.warps, PARTS=how.parts,
            EVEN_K=weight.columns % (4 * numbers * how.parts) == 0, EARLY=early,
            COMPILED=x.is_cuda, num_warps=how.warps, **launch_options(early),
        )  # fmt: skip
    return out


# The Triton kernel.


@jit
def _group_of(
    scale, zeros, row, group, groups, BITS: tl.constexpr, OWN_ZERO: tl.constexpr, dtype: tl.constexpr
):  # fmt: skip
    """Return scales of a group, and what ``_weights`` adds, before its sign changes: float32."""
    return tl.load(scale + group).to(tl.float32), zero_offset(zeros, row, group, groups, BITS, OWN_ZERO, dtype)


@jit
def _weights(
    units, magic, less, UNIT: tl.constexpr, AT: tl.constexpr, BITS: tl.constexpr, OWN_ZERO: tl.constexpr,
    dtype: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Numbers AT of a unit, and half a unit further on, less their zero points: pairs of 16-bit numbers in int32."""
    pairs = units[AT // 4][UNIT] >> (AT % 4 * 3) if BITS == 3 else units[0][UNIT] >> (AT * BITS)
    if BITS == 8 and dtype == tl.bfloat16:  # 128 more has room for seven bits
        high = (~pairs & 0x00800080) ^ (magic | -0x7FFF8000)
        result = plus((pairs & 0x007F007F) | magic, high, dtype, COMPILED)
        return plus(result, less, dtype, COMPILED) if OWN_ZERO else result
    else:
        return plus((pairs & (((1 << BITS) - 1) * 0x10001)) | magic, less, dtype, COMPILED)


@jit
def _sixteen(
    units, less, magic, TILE: tl.constexpr, UNIT: tl.constexpr, AT: tl.constexpr, BITS: tl.constexpr,
    OWN_ZERO: tl.constexpr, dtype: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """The operand of a product that has 16 rows of the weight: of pairs AT and AT + 1 of each thread."""
    result = ()
    for part in tl.static_range(4):
        result += (
            _weights(
                units[2 * TILE + part % 2], magic, less[2 * TILE + part % 2], UNIT, AT + part // 2,
                BITS, OWN_ZERO, dtype, COMPILED,
            ),
        )  # fmt: skip
    return result


@jit
def _four(values, AT: tl.constexpr):
    return values[4 * AT], values[4 * AT + 1], values[4 * AT + 2], values[4 * AT + 3]


@jit
def _shared_unit(units, later):
    """Half the numbers of a unit of 3 bits: the later ones for some threads."""
    first, second = tl.where(later, units[2][0], units[0][0]), tl.where(later, units[3][0], units[1][0])
    return (first,), (second,)


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
def few_rows_kernel(  # noqa: C901, PLR0915
    x_ptr, words_ptr, scale_ptr, zeros_ptr, out_ptr, partial_ptr, counters_ptr, m, n, n_cols, groups, magic,
    BITS: tl.constexpr, GROUP: tl.constexpr, OWN_ZERO: tl.constexpr, DEEP: tl.constexpr, SHARED: tl.constexpr,
    EIGHTS: tl.constexpr, TILES: tl.constexpr, WARPS: tl.constexpr, PARTS: tl.constexpr, EVEN_K: tl.constexpr,
    EARLY: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """``x @ weight.T`` for EIGHTS times 8 rows of x, which is read as int32: two numbers of 16 bits.

    A warp multiplies TILES times 16 rows of the weight by all rows of x, a block of columns at a time; PARTS warps take
    turns with the blocks of the same rows. Four threads beside each other have DEEP units of a block each, or SHARED
    half a unit. What a block needs is loaded while the block before it is multiplied. Sums are in the scale of the
    group at hand: they change it with the group.
    """
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    unit: tl.constexpr = 32 if BITS == 3 else 32 // BITS
    each: tl.constexpr = 3 if BITS == 3 else 1
    numbers: tl.constexpr = unit // 2 if SHARED else DEEP * unit  # of a thread
    pairs: tl.constexpr = numbers // DEEP // 2  # of a unit, or half of one
    together: tl.constexpr = 2 if BITS == 8 else 1  # units whose inputs fill 16 bytes
    chunks_of: tl.constexpr = 2 if SHARED else together * unit // 8  # 16 bytes of inputs, for so many units
    apart: tl.constexpr = 8 if SHARED else 4
    units_of_block: tl.constexpr = 4 * numbers // unit
    thread = tl.arange(0, 32 * WARPS)
    eighth, quarter, part = thread // 4 % 8, thread % 4, thread // 32 % PARTS
    words_of_row = n_cols // 32 * (32 // unit) * each  # so the compiler knows what divides them
    place = quarter % 2 if SHARED else quarter * DEEP
    later = quarter >= 2
    input_at = place * (unit // 2) + later * 4 if SHARED else quarter * (numbers // 2)
    blocks = tl.cdiv(n_cols, 4 * numbers)
    share = tl.cdiv(tl.cdiv(blocks, PARTS), tl.num_programs(2)) * PARTS
    first = tl.program_id(2) * share
    last = tl.minimum(first + share, blocks)
    begin = (tl.program_id(0) * (WARPS // PARTS) + thread // (32 * PARTS)) * (16 * TILES) + eighth
    rows, scales_at, words_at, inputs_at = (), (), (), ()
    for tile in tl.static_range(2 * TILES):
        row = tl.minimum(begin + tile * 8, n - 1)
        rows += (row,)
        scales_at += (scale_ptr + row * (groups if GROUP else 1),)
        words_at += (words_ptr + row.to(tl.int64) * words_of_row + place * each,)
    for eight in tl.static_range(EIGHTS):
        row = tl.minimum((tl.program_id(1) * EIGHTS + eight) * 8 + eighth, m - 1)
        inputs_at += (x_ptr + row.to(tl.int64) * (n_cols // 2) + input_at,)
    if EARLY:
        gdc_launch_dependents()
    block = tl.minimum(first + part, blocks - 1)  # the last share may be empty
    left = 1 if EVEN_K else (n_cols // unit - block * units_of_block - place)[:, None]
    words, factors, chunks = (), (), ()
    for tile in tl.static_range(2 * TILES):
        words += read_units(words_at[tile] + block * (units_of_block * each), left > 0, BITS, DEEP)
        factors += _group_of(
            scales_at[tile], zeros_ptr, rows[tile], block * (4 * numbers) // GROUP if GROUP else 0, groups,
            BITS, OWN_ZERO, dtype,
        )  # fmt: skip
    if EARLY:
        gdc_wait()
    left = 1 if EVEN_K else (n_cols // unit - (first + part) * units_of_block - place)[:, None]
    for eight in tl.static_range(EIGHTS):
        chunks += input_chunks(inputs_at[eight] + (first + part) * (2 * numbers), left, numbers // 8, apart, True)
    nothing = tl.zeros((32 * WARPS,), tl.float32)
    total = ()
    for _ in tl.static_range(4 * TILES * EIGHTS):
        total += (nothing,)
    for start in tl.range(first, last, PARTS):
        coming = start + PARTS + part
        block = tl.minimum(coming, blocks - 1)
        left = 1 if EVEN_K else (n_cols // unit - block * units_of_block - place)[:, None]
        group = block * (4 * numbers) // GROUP if GROUP else 0
        next_words, next_factors, next_chunks, units, less = (), (), (), (), ()
        for tile in tl.static_range(2 * TILES):
            next_words += read_units(words_at[tile] + block * (units_of_block * each), left > 0, BITS, DEEP)
            next_factors += _group_of(scales_at[tile], zeros_ptr, rows[tile], group, groups, BITS, OWN_ZERO, dtype)
        left = 1 if EVEN_K else (n_cols // unit - coming * units_of_block - place)[:, None]
        for eight in tl.static_range(EIGHTS):
            next_chunks += input_chunks(inputs_at[eight] + block * (2 * numbers), left, numbers // 8, apart, True)
        for tile in tl.static_range(2 * TILES):
            of_tile = words_of(words, tile, BITS)
            units += ((_shared_unit(of_tile, later) if SHARED else of_tile),)
            off = nothing - factors[2 * tile + 1]
            less += (packed(off, off, dtype, COMPILED),)
        for item in tl.static_range(0, DEEP, together):
            inputs = ()
            for eight in tl.static_range(EIGHTS):
                inputs += (
                    paired_inputs(
                        chunks, eight * (numbers // 8) + item // together * chunks_of, chunks_of, together, COMPILED
                    ),
                )  # fmt: skip
            for at in tl.static_range(0, together * pairs, 2):
                result = ()
                for tile in tl.static_range(TILES):
                    a = _sixteen(
                        units, less, magic, tile, item + at // pairs, at % pairs, BITS, OWN_ZERO, dtype, COMPILED
                    )
                    for eight in tl.static_range(EIGHTS):
                        sums = _four(total, tile * EIGHTS + eight)
                        result += product(a, (inputs[eight][at], inputs[eight][at + 1]), sums, dtype, COMPILED)
                total = result
        result = ()
        for tile in tl.static_range(TILES):
            above = factors[4 * tile] / tl.where(start + PARTS >= last, 1.0, next_factors[4 * tile])
            below = factors[4 * tile + 2] / tl.where(start + PARTS >= last, 1.0, next_factors[4 * tile + 2])
            for eight in tl.static_range(EIGHTS):
                sums = _four(total, tile * EIGHTS + eight)
                result += (sums[0] * above, sums[1] * above, sums[2] * below, sums[3] * below)
        total = result
        words, factors, chunks = next_words, next_factors, next_chunks
    count: tl.constexpr = 4 * TILES * EIGHTS
    sums = _stacked(total, 0, count)
    if PARTS > 1:
        sums = tl.sum(tl.reshape(sums, (WARPS // PARTS, PARTS, 32, count)), axis=1)
    sums = tl.reshape(sums, (WARPS // PARTS * 32, count))
    thread = tl.arange(0, WARPS // PARTS * 32)[:, None]
    number = tl.arange(0, count)[None, :]
    column = (tl.program_id(0) * (WARPS // PARTS) + thread // 32) * (16 * TILES) + thread // 4 % 8
    column += number // (4 * EIGHTS) * 16 + number // 2 % 2 * 8
    row = tl.program_id(1) * (8 * EIGHTS) + thread % 4 * 2 + number // 4 % EIGHTS * 8 + number % 2
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    sums, done = split_k_reduce(sums, partial_ptr, counters_ptr, tile, tl.program_id(2), tl.num_programs(2))
    tl.store(out_ptr + row.to(tl.int64) * n + column, sums.to(dtype), mask=(row < m) & (column < n) & done)
