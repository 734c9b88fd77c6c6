"""The product of one row and a weight of few bits (GEMV): 16 rows of the weight are one operand of tensor cores."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gac.runtime.kernels.gpu import ceil_div, launch_options, launching_on, starts_early
from gac.runtime.kernels.guard import gdc_launch_dependents, gdc_wait, jit, tl
from gac.runtime.kernels.low_bit.inputs import input_pairs
from gac.runtime.kernels.low_bit.packed import MAGIC, Packed, read_units, words_of, zero_points
from gac.runtime.kernels.ptx import keep_order, product


@dataclass(frozen=True)
class Vector:
    """Launch parameters of the product with one row."""

    warps: int  # of a program
    parts: int  # warps that share 16 rows of the weight, each with a part of the columns; fewer where columns are few
    deep: int  # neighbouring words of a row that a thread reads at a time, at most; three where numbers have 3 bits
    registers: int | None = None  # of a thread, at most


_VECTORS = dict.fromkeys((8, 4, 3), Vector(8, 8, 4)) | {2: Vector(4, 4, 4)}
"""By bits."""
_OF_SHORT_ROWS = dict.fromkeys((4, 3), Vector(8, 8, 4, registers=80))
"""Steps that take all of a row need fewer registers, so more programs run at once."""
_SHORT = 4096


def gemv(x: Tensor, weight: Packed, how: Vector | None = None) -> Tensor:
    """One row x ``(1, columns)``: one launch."""
    short = _OF_SHORT_ROWS if weight.columns <= _SHORT else {}
    how = how or short.get(weight.bits, _VECTORS[weight.bits])
    deep = _deep(weight, how.deep)
    block = deep * weight.unit
    turn = 16 * block  # columns that a warp takes in a step
    parts = min(how.parts, 1 << (ceil_div(weight.columns, turn) - 1).bit_length())  # no warp is idle all the time
    step, tiles = parts * turn, how.warps // how.parts
    out = x.new_empty(1, weight.rows)
    early = starts_early(x)
    x = x if x.storage_offset() % 8 == 0 else x.clone()  # eight numbers are read at a time
    with launching_on(x):
        gemv_kernel[(ceil_div(weight.rows, 16 * tiles),)](
            x.view(torch.int32), *weight.read, out,
            weight.rows, weight.columns // block, weight.scale.shape[1], MAGIC[x.dtype],
            **weight.options, TILES=tiles, PARTS=parts, DEEP=deep, ONCE=weight.columns <= step,
            EVEN_K=weight.columns % step == 0, WHOLE=weight.columns % turn == 0,
            COMPILED=x.is_cuda, EARLY=early, num_warps=tiles * parts, maxnreg=how.registers, **launch_options(early),
        )  # fmt: skip
    return out


def _deep(weight: Packed, most: int) -> int:
    """Units (words, or three words of 3 bits) that a thread reads at a time.

    A row has whole ones. Those of four threads are of two groups at most, and inputs for them fill 16 bytes.
    """
    if weight.bits == 3:
        return 1
    units = weight.columns // weight.unit
    within = weight.group // (2 * weight.unit) if weight.group else units
    return max(min(most, units & -units, within), 8 // weight.unit)


# The Triton kernel.


@jit
def _factors(
    scale, zeros, row, group, groups, COUNT: tl.constexpr, BITS: tl.constexpr, OWN_ZERO: tl.constexpr
):  # fmt: skip
    """Scales and zero points of COUNT neighbouring groups of each thread, of the last group where there are fewer."""
    result = ()
    for part in tl.static_range(COUNT):
        here = tl.minimum(group + part, groups - 1)
        scales = tl.load(scale + row * groups + here).to(tl.float32)
        if OWN_ZERO:
            result += ((scales, zero_points(zeros, row, here, True, groups, BITS)),)
        else:
            result += ((scales, 1 << (BITS - 1)),)
    return result


@jit
def _scaled(sums, inputs, factors, FIRST: tl.constexpr, BITS: tl.constexpr, dtype: tl.constexpr):
    """Sums of products from FIRST on, less what numbers have too much times sums of inputs, in their groups' scales."""
    more: tl.constexpr = (256.0 if BITS == 8 else 128.0) if dtype == tl.bfloat16 else 0.0
    large: tl.constexpr = 1.0 if dtype == tl.bfloat16 else 16777216.0
    result = factors[0][0] * (sums[FIRST] * large - (factors[0][1] + more) * inputs[0])
    if len(factors) == 2:
        result += factors[1][0] * (sums[FIRST + 1] * large - (factors[1][1] + more) * inputs[1])
    return result


@jit
def _where(there, result, kept):
    return (
        tl.where(there, result[0], kept[0]), tl.where(there, result[1], kept[1]),
        tl.where(there, result[2], kept[2]), tl.where(there, result[3], kept[3]),
    )  # fmt: skip


@jit
def _slots(
    of_upper, of_lower, left, BITS: tl.constexpr, DEEP: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """Units of four slots, as far as there are so many: of ``left``; of WHOLE steps all where it is above 0."""
    words: tl.constexpr = 4 * DEEP * (3 if BITS == 3 else 1)
    result = ()
    for slot in tl.static_range(4):
        there = left > 0 if WHOLE else tl.arange(0, DEEP)[None, :] < left - slot * (4 * DEEP)
        above = words_of(read_units(of_upper + slot * words, there, BITS, DEEP), 0, BITS)
        below = words_of(read_units(of_lower + slot * words, there, BITS, DEEP), 0, BITS)
        result += (above, below)
    return result


@jit
def _pair(
    units, magic, UNIT: tl.constexpr, AT: tl.constexpr, BITS: tl.constexpr, PLANE: tl.constexpr, dtype: tl.constexpr
):  # fmt: skip
    """Number AT of a unit below that half a unit further on; float16 has 2^-24 times them, bfloat16 128 more.

    8 bits are one more than bfloat16 has there: one plane has seven of them, and another the highest.
    """
    pair = units[AT // 4][UNIT] >> (AT % 4 * 3) if BITS == 3 else units[0][UNIT] >> (AT * BITS)
    if dtype == tl.float16:
        return pair & (((1 << BITS) - 1) * 0x10001)
    elif BITS < 8:
        return (pair & (((1 << BITS) - 1) * 0x10001)) | magic
    else:
        return (pair & (0x00800080 if PLANE else 0x007F007F)) | magic


@jit
def _of_slot(
    above, below, inputs, magic, nothing,
    BITS: tl.constexpr, dtype: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    planes: tl.constexpr = 2 if BITS == 8 and dtype == tl.bfloat16 else 1
    pairs: tl.constexpr = 16 if BITS == 3 else 16 // BITS
    sums = (nothing, nothing, nothing, nothing)
    for offsets in tl.static_range(0, len(inputs), 2):
        for plane in tl.static_range(planes):
            numbers = (
                _pair(above, magic, offsets // pairs, offsets % pairs, BITS, plane, dtype),
                _pair(below, magic, offsets // pairs, offsets % pairs, BITS, plane, dtype),
                _pair(above, magic, offsets // pairs, offsets % pairs + 1, BITS, plane, dtype),
                _pair(below, magic, offsets // pairs, offsets % pairs + 1, BITS, plane, dtype),
            )
            sums = product(numbers, (inputs[offsets], inputs[offsets + 1]), sums, dtype, COMPILED)
    return sums


@jit
def _multiplied(
    loaded, inputs, quarter, magic, nothing, BITS: tl.constexpr, dtype: tl.constexpr, COMPILED: tl.constexpr
):  # fmt: skip
    """Of a step sums of products, of thread j those of slot j, and sums of inputs."""
    item = tl.full(quarter.shape, 0x3F803F80 if dtype == tl.bfloat16 else 0x3C003C00, tl.int32)
    values_in = (nothing, nothing, nothing, nothing)
    for offsets in tl.static_range(0, len(inputs), 2):
        values_in = product(
            (item, item, item, item), (inputs[offsets], inputs[offsets + 1]), values_in, dtype, COMPILED
        )
    kept = _of_slot(loaded[0], loaded[1], inputs, magic, nothing, BITS, dtype, COMPILED)
    for slot in tl.static_range(1, 4):
        result = _of_slot(loaded[2 * slot], loaded[2 * slot + 1], inputs, magic, nothing, BITS, dtype, COMPILED)
        kept = _where(quarter == slot, result, kept)
    return kept, values_in


@jit
def _write(high, low, out, n, TILES: tl.constexpr, PARTS: tl.constexpr):
    both = tl.reshape(tl.join(high, low), (TILES, PARTS, 8, 4, 2))
    result = tl.sum(tl.sum(both, axis=3), axis=1)
    row = tl.arange(0, TILES)[:, None, None] * 16 + tl.arange(0, 8)[None, :, None] + tl.arange(0, 2)[None, None, :] * 8
    row += tl.program_id(0) * (16 * TILES)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=row < n)


@jit(do_not_specialize=["groups"])
def gemv_kernel(
    x_ptr, words_ptr, scale_ptr, zeros_ptr, out_ptr, n, blocks, groups, magic,
    BITS: tl.constexpr, GROUP: tl.constexpr, OWN_ZERO: tl.constexpr,
    TILES: tl.constexpr, PARTS: tl.constexpr, DEEP: tl.constexpr,
    ONCE: tl.constexpr, EVEN_K: tl.constexpr, WHOLE: tl.constexpr, COMPILED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A unit is a word, or the three words of 32 numbers of 3 bits. x is read as int32: two numbers of 16 bits.
    A row of the weight has so many blocks of DEEP units.

    A warp multiplies 16 rows, PARTS warps the same. In a step it takes four slots of columns. Of a slot four threads
    beside each other read DEEP units of a row each. Every two columns of the matrix that has the row hold another slot,
    and thread j of four keeps the sums of slot j. Where a slot has two groups, each of the two columns holds one.
    ONCE: one step takes all columns. EVEN_K: columns are a multiple of a step; WHOLE: of four slots.
    """
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    numbers: tl.constexpr = 32 if BITS == 3 else 32 // BITS
    slot: tl.constexpr = 4 * DEEP * numbers
    step: tl.constexpr = PARTS * 4 * slot
    ahead: tl.constexpr = step * BITS // 32
    each: tl.constexpr = 3 if BITS == 3 else 1
    cut: tl.constexpr = 2 if GROUP and slot > GROUP else 1
    thread = tl.arange(0, TILES * PARTS * 32)
    eighth, quarter = thread // 4 % 8, thread % 4
    upper = (tl.program_id(0) * TILES + thread // (32 * PARTS)) * 16 + eighth
    upper, lower = tl.minimum(upper, n - 1), tl.minimum(upper + 8, n - 1)
    begin = thread // 32 % PARTS * (4 * slot)
    unit = begin // numbers + quarter * DEEP
    units, size = blocks * DEEP, blocks * (DEEP * numbers)  # of a row: so the compiler knows what divides them
    of_upper = words_ptr + upper.to(tl.int64) * (units * each) + unit * each
    of_lower = words_ptr + lower.to(tl.int64) * (units * each) + unit * each
    input_at = (begin + eighth // 2 * slot + quarter * (DEEP * numbers)) // 2
    nothing = tl.zeros((thread.shape[0],), tl.float32)
    high, low = nothing, nothing
    if EARLY:
        gdc_launch_dependents()
    if not GROUP:
        above = _factors(scale_ptr, zeros_ptr, upper, 0, 1, 1, BITS, False)
        below = _factors(scale_ptr, zeros_ptr, lower, 0, 1, 1, BITS, False)
    for start in tl.range(0, step if ONCE else size, step):
        left = 1 if EVEN_K else (units - start // numbers - unit)[:, None]
        loaded = _slots(of_upper, of_lower, left, BITS, DEEP, WHOLE)
        if GROUP:
            group = (start + begin + quarter * slot) // GROUP
            above = _factors(scale_ptr, zeros_ptr, upper, group, groups, cut, BITS, OWN_ZERO)
            below = _factors(scale_ptr, zeros_ptr, lower, group, groups, cut, BITS, OWN_ZERO)
        keep_order(thread, COMPILED)  # all words are loaded before the inputs, which all products need
        if EARLY:
            gdc_wait()
        here = 1 if EVEN_K else (size - start) // 2 - input_at[:, None]
        if cut == 2:
            here = tl.where((quarter // 2 == eighth % 2)[:, None], here, 0)
        inputs = input_pairs(x_ptr + input_at, here, BITS, DEEP, WHOLE, COMPILED)
        kept, values_in = _multiplied(loaded, inputs, quarter, magic, nothing, BITS, dtype, COMPILED)
        high += _scaled(kept, values_in, above, 0, BITS, dtype)
        low += _scaled(kept, values_in, below, 2, BITS, dtype)
        of_upper += ahead
        of_lower += ahead
        x_ptr += step // 2
    _write(high, low, out_ptr, n, TILES, PARTS)
