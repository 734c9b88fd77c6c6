"""Weights of few bits in words, and how kernels read them: the layout is that of ``gac.runtime.storage.packed``.

A unit is a word, or the three words of 32 numbers of 3 bits. Numbers take the place of the lowest bits of a 16-bit
number, so that they have more than they stand for: 128 more in bfloat16, 1024 in float16.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gac.runtime.kernels.guard import jit, tl
from gac.runtime.kernels.ptx import in_turn

MAGIC = {torch.float16: 0x64006400, torch.bfloat16: 0x43004300}  # the bits of 1024 and of 128, twice


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


# In Triton kernels.


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
def read_units(offsets, there, BITS: tl.constexpr, DEEP: tl.constexpr):
    """Words of DEEP neighbouring units of each thread, as they lie: one tensor, or three of 3 bits."""
    many = tl.arange(0, DEEP)[None, :]
    if BITS == 3:
        offsets = offsets[:, None] + 3 * many
        return tl.load(offsets, mask=there), tl.load(offsets + 1, mask=there), tl.load(offsets + 2, mask=there)
    else:
        return (tl.load(offsets[:, None] + many, mask=there),)


@jit
def words_of(words, AT: tl.constexpr, BITS: tl.constexpr):
    """Of the words that ``read_units`` returned as number AT tuples of words whose halves match."""
    if BITS == 3:
        a, b, c, d = in_halves(words[3 * AT], words[3 * AT + 1], words[3 * AT + 2])
        return in_turn(a), in_turn(b), in_turn(c), in_turn(d)
    else:
        return (in_turn(words[AT]),)


@jit
def _more(BITS: tl.constexpr, dtype: tl.constexpr):
    """Return how much more than a number ``numbers_of`` gives, as 16 bits take the place of its lowest bits."""
    if dtype == tl.float16:
        return 1024.0
    else:
        return -128.0 if BITS == 8 else 128.0


@jit
def zero_offset(zeros, row, group, groups, BITS: tl.constexpr, OWN_ZERO: tl.constexpr, dtype: tl.constexpr):
    """Return how far the zero points of a group lie above 0 in ``numbers_of``: float32, or one number for all rows."""
    if OWN_ZERO:
        return zero_points(zeros, row, group, True, groups, BITS) + _more(BITS, dtype)
    else:
        return _more(BITS, dtype) + (1 << (BITS - 1))
