"""Products with weights of few bits on a GPU, by the fastest kernels (``tests/benchmarks/results/kernels.md``).

One row is multiplied as the words are read; up to 128 rows in tiles, whose numbers are made in registers and multiplied
as whole ones, so that scales come after sums in float32; for more rows a kernel writes the weight in 16 bits, and a
GEMM multiplies it. Products and what is written are operators, so that compiled code and CUDA graphs hold them. Triton
is imported when the first of them runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gac.runtime.kernels.gpu import ceil_div, launching_on, operator
from gac.runtime.kernels.guard import jit, tl
from gac.runtime.kernels.ptx import halves, in_turn, keep_order, product
from gac.runtime.kernels.split_k import SplitK, Tile, clear, split_k_reduce, tile_for
from gac.runtime.limits import LEAST_GROUP

MOST_ROWS = 128  # rows of the input that are multiplied in tiles; for more the weight is written out first
_WRITTEN_ROWS, _WRITTEN_NUMBERS = 32, 128
_ARRANGED = 1024


@dataclass(frozen=True)
class Vector:
    """Launch parameters of the product with one row."""

    warps: int  # of a program
    parts: int  # warps that share 16 rows of the weight, each with a part of the columns; fewer where columns are few
    deep: int  # neighbouring words of a row that a thread reads at a time, at most; three where numbers have 3 bits
    registers: int | None = None  # of a thread, at most


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


_VECTORS = dict.fromkeys((8, 4, 3), Vector(8, 8, 4)) | {2: Vector(4, 4, 4)}
"""By bits; one row of others is multiplied in tiles."""
_OF_SHORT_ROWS = dict.fromkeys((4, 3), Vector(8, 8, 4, registers=80))
"""Steps that take all of a row need fewer registers, so more programs run at once."""
_SHORT = 4096
_MATRICES = {16: Tile(16, 128, 128, 4, 4), 32: Tile(32, 128, 128, 4, 4), MOST_ROWS: Tile(64, 128, 128, 4, 3)}
"""By the most rows."""
_IN_8_BITS = {16: Tile(16, 64, 128, 4, 4)}
_IN_LONG_GROUPS = {64: Tile(64, 64, 128, 4, 4)}  # not in groups of 64, which cut steps
_MAGIC = {torch.float16: 0x64006400, torch.bfloat16: 0x43004300}  # the bits of 1024 and of 128, twice


@dataclass(frozen=True, eq=False)
class Packed:
    """A weight ``(rows, columns)`` in words, as ``gac.runtime.storage.packed`` has them."""

    words: Tensor  # int32, ``(rows, words)``
    scale: Tensor  # 16 bits, ``(rows, groups)``
    zeros: Tensor | None  # int32, ``(words, groups)``; None: the zero is ``2 ** (bits - 1)``
    bits: int
    group: int  # columns that have one scale; 0: all of a row
    columns: int

    @staticmethod
    def of(base: Mapping[str, Tensor], bits: int, group: int | None, columns: int) -> "Packed":
        zeros = base.get("weight_zero_point")
        local = 0 if group is None or (group >= columns and zeros is None) else group
        return Packed(base["weight_packed"], base["weight_scale"], zeros, bits, local, columns)

    @property
    def rows(self) -> int:
        return len(self.words)

    @property
    def unit(self) -> int:
        """Numbers of a unit: a word, or three words of 3 bits."""
        return 32 if self.bits == 3 else 32 // self.bits

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor | None, int, int, int]:  # of the operators
        return self.words, self.scale, self.zeros, self.bits, self.group, self.columns

    @property
    def read(self) -> tuple[Tensor, Tensor, Tensor]:  # by kernels
        return self.words, self.scale, self.words if self.zeros is None else self.zeros

    @property
    def options(self) -> dict[str, Any]:
        return {"BITS": self.bits, "GROUP": self.group, "OWN_ZERO": self.zeros is not None}

    @property
    def sizes(self) -> tuple[int, int]:  # of which kernels know nothing when they are compiled
        return self.columns, self.scale.shape[1]


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
    x = x if x.storage_offset() % 8 == 0 else x.clone()  # eight numbers are read at a time
    with launching_on(x):
        gemv_kernel[(ceil_div(weight.rows, 16 * tiles),)](
            x.view(torch.int32), *weight.read, out,
            weight.rows, weight.columns // block, weight.scale.shape[1], _MAGIC[x.dtype],
            **weight.options, TILES=tiles, PARTS=parts, DEEP=deep, ONCE=weight.columns <= step,
            EVEN_K=weight.columns % step == 0, WHOLE=weight.columns % turn == 0,
            COMPILED=x.is_cuda, num_warps=tiles * parts, maxnreg=how.registers,
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


def gemm(x: Tensor, weight: Packed, how: Tile | None = None) -> Tensor:
    """Some rows x ``(rows, columns)``: two launches; sums of whole numbers are scaled group by group.

    Where tiles are few, several programs share each, every one with a part of the columns.
    """
    how = how or _tile(len(x), weight)
    how = replace(how, numbers=min(how.numbers, weight.group or how.numbers))
    how = how.fitted(how.numbers * (how.outputs * weight.bits // 8 + how.rows * x.itemsize), x.device)
    sharing = SplitK.of(how, len(x), weight.rows, weight.columns, x, torch.float32)
    order = Order.of(how.numbers, weight.bits)
    values_in, inputs = arranged(x, how, order, sharing.counters)
    out = x.new_empty(len(x), weight.rows)
    with launching_on(x):
        gemm_kernel[(ceil_div(weight.rows, how.outputs), len(values_in) // how.rows, sharing.split)](
            values_in, inputs, *weight.read, out, sharing.sums, sharing.counters,
            len(x), weight.rows, *weight.sizes, _MAGIC[x.dtype],
            **weight.options, ACROSS=order.across, DEEP=order.deep,
            BLOCK_M=how.rows, BLOCK_N=how.outputs, BLOCK_K=how.numbers, EVEN_K=weight.columns % how.numbers == 0,
            SPLIT_K=sharing.split, NUM_STAGES=how.stages, num_warps=how.warps,
        )  # fmt: skip
    return out


def _tile(rows: int, weight: Packed) -> Tile:
    tiles = dict(_MATRICES)
    if weight.bits == 8:
        tiles |= _IN_8_BITS
    if weight.group != LEAST_GROUP:
        tiles |= _IN_LONG_GROUPS
    return tile_for(rows, tiles)


def arranged(x: Tensor, tile: Tile, order: Order, counters: Tensor) -> tuple[Tensor, Tensor]:
    """Columns of x in that order, zeros up to whole tiles, and their sums ``(steps, rows)``; clears the counters."""
    rows, columns = x.shape
    height, steps = ceil_div(rows, tile.rows) * tile.rows, ceil_div(columns, tile.numbers)
    out = x.new_empty(height, steps * tile.numbers)
    sums = x.new_empty(steps, height, dtype=torch.float32)
    with launching_on(x):
        arrange_kernel[(height, ceil_div(out.shape[1], _ARRANGED))](
            x, out, sums, counters, len(counters), rows, columns, out.shape[1],
            PAIRS=order.pairs, ACROSS=order.across, DEEP=order.deep, STEP=tile.numbers,
            AT_ONCE=_ARRANGED, MOST=1 << (len(counters) - 1).bit_length(), num_warps=4,
        )  # fmt: skip
    return out, sums


def unpacked(weight: Packed, dtype: torch.dtype) -> Tensor:
    """``few_bits_written`` in one launch: a program writes some rows, and of each some numbers."""
    out = weight.words.new_empty(weight.rows, weight.columns, dtype=dtype)
    rows, numbers = _WRITTEN_ROWS, min(_WRITTEN_NUMBERS, weight.group or _WRITTEN_NUMBERS)
    with launching_on(out):
        dequantise_kernel[(ceil_div(weight.rows, rows), ceil_div(weight.columns, numbers))](
            *weight.read, out, weight.rows, *weight.sizes, _MAGIC[dtype],
            **weight.options, BLOCK_N=rows, BLOCK_K=numbers, EVEN_K=weight.columns % numbers == 0, num_warps=4,
        )  # fmt: skip
    return out


@operator(lambda x, words, *_: x.new_empty(*x.shape[:-1], len(words)))
def few_bits_linear(
    x: Tensor, words: Tensor, scale: Tensor, zeros: Tensor | None, bits: int, group: int, columns: int
) -> Tensor:
    """``x @ weight.T`` for x ``(..., columns)`` of 16 bits on a GPU: sums are float32, the result is in x's dtype."""
    weight = Packed(words, scale, zeros, bits, group, columns)
    inputs = x.reshape(-1, columns).contiguous()
    if len(inputs) > MOST_ROWS:
        y = functional.linear(inputs, unpacked(weight, x.dtype))
    else:
        y = gemv(inputs, weight) if len(inputs) == 1 and bits in _VECTORS else gemm(inputs, weight)
    return y.view(*x.shape[:-1], weight.rows)


@operator(lambda words, _s, _z, _bits, _group, columns, dtype: words.new_empty(len(words), columns, dtype=dtype))
def few_bits_written(
    words: Tensor, scale: Tensor, zeros: Tensor | None, bits: int, group: int, columns: int, dtype: torch.dtype
) -> Tensor:
    """The weight ``(rows, columns)``, to the last bit what ``gac.runtime.storage.packed`` finds in PyTorch."""
    return unpacked(Packed(words, scale, zeros, bits, group, columns), dtype)


# One row (GEMV), and how words are read. The layout of weights is that of ``gac.runtime.storage.packed``.


@jit
def zero_points(zeros, row, group, there, groups, BITS: tl.constexpr):
    """Zero points of rows and groups, float32; they are packed across the rows."""
    bit = row * BITS
    result = tl.load(zeros + bit // 32 * groups + group, mask=there, other=0) >> (bit % 32)
    if BITS == 3:
        over = (bit % 32) > 29
        behind = tl.load(zeros + (bit // 32 + 1) * groups + group, mask=there & over, other=0)
        left = tl.where(over, 32 - bit % 32, 0)
        result = tl.where(over, (result & ((1 << left) - 1)) | (behind << left), result)
    return (result & ((1 << BITS) - 1)).to(tl.float32)


@jit
def in_halves(first, second, third):
    """Three words of 32 numbers of 3 bits as four: numbers 0 to 15 in lower halves, four in each, the others above."""
    low: tl.constexpr = 0xFFFF
    high: tl.constexpr = -0x10000
    a = (first & low) | (second & high)
    b = ((first >> 12) & low) | ((((second >> 12) & 0xFFFFF) | (third << 20)) & high)
    c = ((((first >> 24) & 0xFF) | (second << 8)) & low) | ((third << 8) & high)
    d = ((second >> 4) & low) | ((third >> 4) & high)
    return a, b, c, d


@jit
def _units(offsets, left, BITS: tl.constexpr, DEEP: tl.constexpr, WHOLE: tl.constexpr):
    """DEEP neighbouring units of each thread, as far as there are so many: tuples of words whose halves match.

    Of ``left`` units; of WHOLE steps all where it is not 0 or less. What is not there may be any number.
    """
    many = tl.arange(0, DEEP)[None, :]
    there = left > 0 if WHOLE else many < left
    if BITS == 3:
        offsets = offsets[:, None] + 3 * many
        a, b, c, d = in_halves(
            tl.load(offsets, mask=there), tl.load(offsets + 1, mask=there), tl.load(offsets + 2, mask=there)
        )
        return in_turn(a), in_turn(b), in_turn(c), in_turn(d)
    else:
        return (in_turn(tl.load(offsets[:, None] + many, mask=there)),)


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
    words: tl.constexpr = 4 * DEEP * (3 if BITS == 3 else 1)
    result = ()
    for slot in tl.static_range(4):
        here = left if WHOLE else left - slot * (4 * DEEP)
        above = _units(of_upper + slot * words, here, BITS, DEEP, WHOLE)
        below = _units(of_lower + slot * words, here, BITS, DEEP, WHOLE)
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
def _two(inputs, AT: tl.constexpr, APART: tl.constexpr):
    """Number AT of what a thread has loaded below that APART further on: int32."""
    first = inputs[AT // 8][AT % 8 // 2]
    second = inputs[(AT + APART) // 8][(AT + APART) % 8 // 2]
    if AT % 2 == 0:
        return (first & 0xFFFF) | (second << 16)
    else:
        return ((first >> 16) & 0xFFFF) | (second & -0x10000)


@jit
def _inputs(offsets, left, BITS: tl.constexpr, DEEP: tl.constexpr, WHOLE: tl.constexpr):
    """Numbers of the row for DEEP units of each thread, in pairs like theirs: zeros where fewer are left."""
    pairs: tl.constexpr = 16 if BITS == 3 else 16 // BITS
    inputs = ()
    for chunk in tl.static_range(DEEP * pairs // 4):
        four = tl.arange(chunk * 4, chunk * 4 + 4)[None, :]
        there = left > 0 if WHOLE else four < left
        inputs += (in_turn(tl.load(offsets[:, None] + four, mask=there, other=0)),)
    result = ()
    for pair in tl.static_range(DEEP * pairs):
        result += (_two(inputs, pair // pairs * 2 * pairs + pair % pairs, pairs),)
    return result


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
    ONCE: tl.constexpr, EVEN_K: tl.constexpr, WHOLE: tl.constexpr, COMPILED: tl.constexpr,
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
        here = 1 if EVEN_K else (size - start) // 2 - input_at[:, None]
        if cut == 2:
            here = tl.where((quarter // 2 == eighth % 2)[:, None], here, 0)
        inputs = _inputs(x_ptr + input_at, here, BITS, DEEP, WHOLE)
        kept, values_in = _multiplied(loaded, inputs, quarter, magic, nothing, BITS, dtype, COMPILED)
        high += _scaled(kept, values_in, above, 0, BITS, dtype)
        low += _scaled(kept, values_in, below, 2, BITS, dtype)
        of_upper += ahead
        of_lower += ahead
        x_ptr += step // 2
    _write(high, low, out_ptr, n, TILES, PARTS)


# Several rows (GEMM), and writing the weight in 16 bits: numbers are made two at a time.


@jit
def _words_at(offsets, there, BITS: tl.constexpr):
    first = tl.load(offsets, mask=there, other=0)
    if BITS == 3:
        return first, tl.load(offsets + 1, mask=there, other=0), tl.load(offsets + 2, mask=there, other=0)
    else:
        return first, first, first


@jit
def _pairs(first, second, third, BITS: tl.constexpr):
    """Numbers 0, 1... of the first half of each unit below those of the second: int32, ``(rows, units, pairs)``."""
    if BITS == 3:  # 96 bits become four words, each of four numbers of the first 48 and four of the last 48
        a, b, c, d = in_halves(first, second, third)
        words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (first.shape[0], first.shape[1] * 4))
        pairs = (words[:, :, None] >> (tl.arange(0, 4) * 3)[None, None, :]) & 0x00070007
        return tl.reshape(pairs, (first.shape[0], first.shape[1], 16))
    else:
        return (first[:, :, None] >> (tl.arange(0, 16 // BITS) * BITS)[None, None, :]) & (((1 << BITS) - 1) * 0x10001)


@jit
def _numbers(
    words, row, magic, start, size,
    BITS: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Numbers less ``2 ** (BITS - 1)``, ``(rows, units, pairs, 2)``, of some rows' words from column ``start`` on."""
    numbers: tl.constexpr = 32 if BITS == 3 else 32 // BITS
    full: tl.constexpr = 3 if BITS == 3 else 1
    units = size // 32 * (32 // numbers)  # of a row: so the compiler knows what divides them
    unit = start // numbers + tl.arange(0, BLOCK_K // numbers)
    there = True if EVEN_K else (unit < units)[None, :]
    offsets = words + row.to(tl.int64)[:, None] * (units * full) + unit[None, :] * full
    first, second, third = _words_at(offsets, there, BITS)
    pairs = _pairs(first, second, third, BITS)
    if BITS == 8 and dtype == tl.bfloat16:
        result = halves((pairs & 0x007F007F) | magic, dtype).to(tl.float32)
        result -= halves((~pairs & 0x00800080) ^ magic, dtype).to(tl.float32)
    else:
        least: tl.constexpr = 1024.0 if dtype == tl.float16 else 128.0
        result = halves(pairs | magic, dtype).to(tl.float32) - (least + (1 << (BITS - 1)))
    return result.to(dtype)


@jit
def _off(zeros, row, group, groups, BITS: tl.constexpr):
    """Return how far zero points of a group lie above ``2 ** (BITS - 1)``, float32."""
    return zero_points(zeros, row, group, True, groups, BITS) - (1 << (BITS - 1))


@jit(do_not_specialize=["count", "m"])
def arrange_kernel(
    x_ptr, out_ptr, partial_ptr, counters_ptr, count, m, n_cols, width,
    PAIRS: tl.constexpr, ACROSS: tl.constexpr, DEEP: tl.constexpr, STEP: tl.constexpr,
    AT_ONCE: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Columns of x in the order in which ``matrix`` takes them, zeros behind the last column and row.

    ACROSS threads beside each other read DEEP units of 2 PAIRS numbers each. They take numbers 0 and PAIRS of their
    first units, thread by thread, then 1 and PAIRS + 1, and so on. Sums of STEP columns are written too, and the
    counters of ``matrix`` cleared.
    """
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    thread = offsets // 2 % ACROSS
    pair = offsets // (2 * ACROSS) % PAIRS
    deep = offsets // (2 * ACROSS * PAIRS) % DEEP
    block = offsets // (2 * ACROSS * PAIRS * DEEP)
    column = ((block * ACROSS + thread) * DEEP + deep) * 2 * PAIRS + pair + offsets % 2 * PAIRS
    inputs = tl.load(x_ptr + row * n_cols + column, mask=(column < n_cols) & (row < m), other=0.0)
    tl.store(out_ptr + row * width + offsets, inputs, mask=offsets < width)
    many: tl.constexpr = AT_ONCE // STEP
    step = tl.program_id(1) * many + tl.arange(0, many)
    result = tl.sum(tl.reshape(inputs.to(tl.float32), (many, STEP)), axis=1)
    tl.store(partial_ptr + step * tl.num_programs(0) + row, result, mask=step * STEP < width)
    if tl.program_id(0) + tl.program_id(1) == 0:
        clear(counters_ptr, count, MOST)


@jit(do_not_specialize=["m", "groups"])
def gemm_kernel(
    x_ptr, x_sums_ptr, words_ptr, scale_ptr, zeros_ptr, out_ptr, partial_ptr, counters_ptr, m, n, n_cols, groups, magic,
    BITS: tl.constexpr, GROUP: tl.constexpr, OWN_ZERO: tl.constexpr, ACROSS: tl.constexpr, DEEP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    SPLIT_K: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """``weight @ x.T`` for x as ``arranged`` left it: numbers go from registers into it.

    They are multiplied as whole numbers. The sums of a step are scaled then, less ``inputs`` times its zero point.
    """
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    pairs: tl.constexpr = 16 if BITS == 3 else 16 // BITS
    blocks: tl.constexpr = BLOCK_K // (2 * pairs * DEEP * ACROSS)
    base = tl.minimum(column, n - 1)
    filled = tl.cdiv(n_cols, BLOCK_K) * BLOCK_K
    given_at = x_ptr + row.to(tl.int64)[:, None] * filled + tl.arange(0, BLOCK_K)[None, :]
    of_row = scale_ptr + base * (groups if GROUP else 1)
    x_sums_ptr += row
    begin = tl.program_id(2) * BLOCK_K
    step: tl.constexpr = SPLIT_K * BLOCK_K
    group = begin // GROUP if GROUP else 0
    scales = tl.load(of_row + group)
    off = tl.zeros((BLOCK_N,), tl.float32)
    if OWN_ZERO:
        off = _off(zeros_ptr, base, group, groups, BITS)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in tl.range(begin, n_cols, step, num_stages=NUM_STAGES):
        numbers = _numbers(words_ptr, base, magic, start, n_cols, BITS, BLOCK_K, EVEN_K, dtype)
        numbers = tl.permute(tl.reshape(numbers, (BLOCK_N, blocks, ACROSS, DEEP, pairs, 2)), (0, 1, 3, 4, 2, 5))
        values_in = tl.trans(tl.load(given_at + start))
        if GROUP:
            coming = tl.minimum(start + step, n_cols - 1) // GROUP  # loaded a step before
            next_scales = tl.load(of_row + coming)
            result = tl.dot(tl.reshape(numbers, (BLOCK_N, BLOCK_K)), values_in)
            if OWN_ZERO:
                given_sums = tl.load(x_sums_ptr + start // BLOCK_K * (tl.num_programs(1) * BLOCK_M))
                result -= off[:, None] * given_sums[None, :]
                off = _off(zeros_ptr, base, coming, groups, BITS)
            total += scales.to(tl.float32)[:, None] * result
            scales = next_scales
        else:
            total = tl.dot(tl.reshape(numbers, (BLOCK_N, BLOCK_K)), values_in, total)
    if not GROUP:
        total *= scales.to(tl.float32)[:, None]
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    total, last = split_k_reduce(total, partial_ptr, counters_ptr, tile, tl.program_id(2), SPLIT_K)
    place = row.to(tl.int64)[:, None] * n + column[None, :]
    tl.store(out_ptr + place, tl.trans(total).to(dtype), mask=(row < m)[:, None] & (column < n)[None, :] & last)


@jit(do_not_specialize=["groups"])
def dequantise_kernel(
    words_ptr, scale_ptr, zeros_ptr, out_ptr, n, n_cols, groups, magic,
    BITS: tl.constexpr, GROUP: tl.constexpr, OWN_ZERO: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """Write the weight: whole numbers times scales, less zero points times scales, rounded once; all else is exact."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.program_id(1) * BLOCK_K
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    base = tl.minimum(row, n - 1)
    group = start // GROUP if GROUP else 0
    scales = tl.load(scale_ptr + base * (groups if GROUP else 1) + group).to(tl.float32)
    numbers = _numbers(words_ptr, base, magic, start, n_cols, BITS, BLOCK_K, EVEN_K, dtype)
    values = tl.reshape(tl.permute(numbers, (0, 1, 3, 2)), (BLOCK_N, BLOCK_K)).to(tl.float32) * scales[:, None]
    if OWN_ZERO:
        values -= (_off(zeros_ptr, base, group, groups, BITS) * scales)[:, None]
    offsets = start + tl.arange(0, BLOCK_K)
    inside = (row < n)[:, None] & (offsets < n_cols)[None, :]
    tl.store(out_ptr + row.to(tl.int64)[:, None] * n_cols + offsets[None, :], values.to(dtype), mask=inside)
