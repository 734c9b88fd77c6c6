"""Products with weights of few bits on a GPU, in the kernels that were fastest (``results/kernels.md``).

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

from .gpu import ceil_div, launching_on, make_operator
from .kernel_limits import LEAST_GROUP
from .tiles import Sharing, Tile, tile_for

MOST_ROWS = 128
"""Rows of the input that are multiplied in tiles; for more the weight is written out first."""
_WRITTEN_ROWS, _WRITTEN_NUMBERS = 32, 128
_ARRANGED = 1024


@dataclass(frozen=True)
class Vector:
    """How one row is multiplied.

    Attributes:
        warps: of a program.
        parts: warps that share 16 rows of the weight, each with a part of the columns; fewer where columns are few.
        deep: neighbouring words of a row that a thread reads at a time, at most; three where numbers have 3 bits.
        registers: of a thread, at most.
    """

    warps: int
    parts: int
    deep: int
    registers: int | None = None


@dataclass(frozen=True)
class Order:
    """The order in which tiles take columns: four threads beside each other read a row of the weight.

    Attributes:
        pairs: of numbers of a unit, which is a word, or three words of 3 bits.
        across: threads that read units of their own.
        deep: neighbouring units that a thread reads.
    """

    pairs: int
    across: int
    deep: int

    @staticmethod
    def of(step: int, bits: int) -> "Order":
        """For steps of so many numbers."""
        pairs = 16 if bits == 3 else 16 // bits
        units = step // (2 * pairs)
        across = min(4, units)
        return Order(pairs, across, min(4, units // across))


_VECTORS = dict.fromkeys((8, 4, 3), Vector(8, 8, 4)) | {2: Vector(4, 4, 4)}
"""By bits; one row of others is multiplied in tiles."""
_OF_SHORT_ROWS = dict.fromkeys((4, 3), Vector(8, 8, 4, registers=80))
"""Where a step takes all of a row, fewer registers will do, and more programs run at once."""
_SHORT = 4096
_MATRICES = {16: Tile(16, 128, 128, 4, 4), 32: Tile(32, 128, 128, 4, 4), MOST_ROWS: Tile(64, 128, 128, 4, 3)}
"""By the most rows."""
_IN_8_BITS = {16: Tile(16, 64, 128, 4, 4)}
_IN_LONG_GROUPS = {64: Tile(64, 64, 128, 4, 4)}
"""Not in groups of 64, which cut steps."""
_MAGIC = {torch.float16: 0x64006400, torch.bfloat16: 0x43004300}
"""The bits of 1024 and of 128, twice."""


@dataclass(frozen=True, eq=False)
class Packed:
    """A weight ``(rows, columns)`` in words, as ``gac.runtime.packed`` has them.

    Attributes:
        words: int32, ``(rows, words)``.
        scale: 16 bits, ``(rows, groups)``.
        zeros: int32, ``(words, groups)``; None: the zero is ``2 ** (bits - 1)``.
        group: columns that have one scale; 0: all of a row.
    """

    words: Tensor
    scale: Tensor
    zeros: Tensor | None
    bits: int
    group: int
    columns: int

    @staticmethod
    def of(held: Mapping[str, Tensor], bits: int, group: int | None, columns: int) -> "Packed":
        """The tensors of ``gac.runtime.packed.PackedIntegers``."""
        zeros = held.get("weight_zero_point")
        own = 0 if group is None or (group >= columns and zeros is None) else group
        return Packed(held["weight_packed"], held["weight_scale"], zeros, bits, own, columns)

    @property
    def rows(self) -> int:
        return len(self.words)

    @property
    def unit(self) -> int:
        """Numbers of a unit: a word, or three words of 3 bits."""
        return 32 if self.bits == 3 else 32 // self.bits

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor | None, int, int, int]:
        """What the operators take of it."""
        return self.words, self.scale, self.zeros, self.bits, self.group, self.columns

    @property
    def read(self) -> tuple[Tensor, Tensor, Tensor]:
        """What kernels read."""
        return self.words, self.scale, self.words if self.zeros is None else self.zeros

    @property
    def options(self) -> dict[str, Any]:
        return {"BITS": self.bits, "GROUP": self.group, "OWN_ZERO": self.zeros is not None}

    @property
    def sizes(self) -> tuple[int, int]:
        """Columns, and scales of a row, of which kernels know nothing when they are compiled."""
        return self.columns, self.scale.shape[1]


def linear(x: Tensor, weight: Packed) -> Tensor:
    """``x @ weight.T`` for x ``(..., columns)`` of 16 bits on a GPU: sums are float32, the result is in x's dtype."""
    y: Tensor = torch.ops.gac.few_bits_linear(x, *weight.operands)
    return y


def written(weight: Packed, dtype: torch.dtype) -> Tensor:
    """The weight ``(rows, columns)``, to the last bit what ``gac.runtime.packed`` finds in PyTorch."""
    found: Tensor = torch.ops.gac.few_bits_written(*weight.operands, dtype)
    return found


def vector(x: Tensor, weight: Packed, how: Vector | None = None) -> Tensor:
    """One row x ``(1, columns)``: one launch."""
    from .few_bits_kernels import vector as kernel

    how = how or _vector(weight)
    deep = _deep(weight, how.deep)
    block = deep * weight.unit
    turn = 16 * block  # columns that a warp takes in a step
    parts = min(how.parts, 1 << (ceil_div(weight.columns, turn) - 1).bit_length())  # no warp is idle all the time
    step, tiles = parts * turn, how.warps // how.parts
    out = x.new_empty(1, weight.rows)
    with launching_on(x):
        kernel[(ceil_div(weight.rows, 16 * tiles),)](
            _aligned(x).view(torch.int32), *weight.read, out,
            weight.rows, weight.columns // block, weight.scale.shape[1], _MAGIC[x.dtype],
            **weight.options, TILES=tiles, PARTS=parts, DEEP=deep, ONCE=weight.columns <= step,
            EVEN=weight.columns % step == 0, WHOLE=weight.columns % turn == 0,
            COMPILED=x.is_cuda, num_warps=tiles * parts, maxnreg=how.registers,
        )  # fmt: skip
    return out


def _vector(weight: Packed) -> Vector:
    """What is fastest for one row."""
    short = _OF_SHORT_ROWS if weight.columns <= _SHORT else {}
    return short.get(weight.bits, _VECTORS[weight.bits])


def _deep(weight: Packed, most: int) -> int:
    """Units (words, or three words of 3 bits) that a thread reads at a time.

    A row has whole ones. Those of four threads are of two groups at most, and inputs for them fill 16 bytes.
    """
    if weight.bits == 3:
        return 1
    units = weight.columns // weight.unit
    within = weight.group // (2 * weight.unit) if weight.group else units
    return max(min(most, units & -units, within), 8 // weight.unit)


def matrix(x: Tensor, weight: Packed, how: Tile | None = None) -> Tensor:
    """Some rows x ``(rows, columns)``: two launches; sums of whole numbers are scaled group by group.

    Where tiles are few, several programs share each, every one with a part of the columns.
    """
    from .few_bits_tiles import matrix as kernel

    how = how or _tile(len(x), weight)
    how = replace(how, numbers=min(how.numbers, weight.group or how.numbers))
    how = how.fitted(how.numbers * (how.outputs * weight.bits // 8 + how.rows * x.itemsize), x.device)
    sharing = Sharing.of(how, len(x), weight.rows, weight.columns, x, torch.float32)
    order = Order.of(how.numbers, weight.bits)
    given, inputs = arranged(x, how, order, sharing.counters)
    out = x.new_empty(len(x), weight.rows)
    with launching_on(x):
        kernel[(ceil_div(weight.rows, how.outputs), len(given) // how.rows, sharing.split)](
            given, inputs, *weight.read, out, sharing.sums, sharing.counters,
            len(x), weight.rows, *weight.sizes, _MAGIC[x.dtype],
            **weight.options, ACROSS=order.across, DEEP=order.deep,
            ROWS=how.rows, OUTPUTS=how.outputs, NUMBERS=how.numbers, EVEN=weight.columns % how.numbers == 0,
            SPLIT=sharing.split, STAGES=how.stages, num_warps=how.warps,
        )  # fmt: skip
    return out


def _tile(rows: int, weight: Packed) -> Tile:
    """What is fastest for so many rows."""
    tiles = dict(_MATRICES)
    if weight.bits == 8:
        tiles |= _IN_8_BITS
    if weight.group != LEAST_GROUP:
        tiles |= _IN_LONG_GROUPS
    return tile_for(rows, tiles)


def arranged(x: Tensor, tile: Tile, order: Order, counters: Tensor) -> tuple[Tensor, Tensor]:
    """Columns of x in that order, filled up with zeros to whole tiles; their sums ``(steps, rows)``: one launch.

    Args:
        counters: they are cleared.
    """
    from .few_bits_tiles import arrange

    rows, columns = x.shape
    height, steps = ceil_div(rows, tile.rows) * tile.rows, ceil_div(columns, tile.numbers)
    out = x.new_empty(height, steps * tile.numbers)
    sums = x.new_empty(steps, height, dtype=torch.float32)
    with launching_on(x):
        arrange[(height, ceil_div(out.shape[1], _ARRANGED))](
            x, out, sums, counters, len(counters), rows, columns, out.shape[1],
            PAIRS=order.pairs, ACROSS=order.across, DEEP=order.deep, STEP=tile.numbers,
            AT_ONCE=_ARRANGED, MOST=1 << (len(counters) - 1).bit_length(), num_warps=4,
        )  # fmt: skip
    return out, sums


def unpacked(weight: Packed, dtype: torch.dtype) -> Tensor:
    """``written`` in one launch: a program writes some rows, and of each some numbers."""
    from .few_bits_tiles import unpack as kernel

    out = weight.words.new_empty(weight.rows, weight.columns, dtype=dtype)
    rows, numbers = _WRITTEN_ROWS, min(_WRITTEN_NUMBERS, weight.group or _WRITTEN_NUMBERS)
    with launching_on(out):
        kernel[(ceil_div(weight.rows, rows), ceil_div(weight.columns, numbers))](
            *weight.read, out, weight.rows, *weight.sizes, _MAGIC[dtype],
            **weight.options, OUTPUTS=rows, NUMBERS=numbers, EVEN=weight.columns % numbers == 0, num_warps=4,
        )  # fmt: skip
    return out


def _aligned(x: Tensor) -> Tensor:
    """Eight numbers are read at a time."""
    return x if x.storage_offset() % 8 == 0 else x.clone()


def _linear(x: Tensor, *operands: Any) -> Tensor:
    weight = Packed(*operands)
    given = x.reshape(-1, weight.columns).contiguous()
    if len(given) > MOST_ROWS:
        y = functional.linear(given, unpacked(weight, x.dtype))
    else:
        y = vector(given, weight) if len(given) == 1 and weight.bits in _VECTORS else matrix(given, weight)
    return y.view(*x.shape[:-1], weight.rows)


def _written(*operands: Any) -> Tensor:
    return unpacked(Packed(*operands[:-1]), operands[-1])


_WEIGHT = "Tensor words, Tensor scale, Tensor? zeros, int bits, int group, int columns"
make_operator(
    "few_bits_linear",
    f"(Tensor x, {_WEIGHT}) -> Tensor",
    _linear,
    lambda x, words, *_rest: x.new_empty(*x.shape[:-1], len(words)),
)
make_operator(
    "few_bits_written",
    f"({_WEIGHT}, ScalarType dtype) -> Tensor",
    _written,
    lambda words, _scale, _zeros, _bits, _group, columns, dtype: words.new_empty(len(words), columns, dtype=dtype),
)
