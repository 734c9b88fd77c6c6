"""Whole numbers of few bits in words of 32, as compressed-tensors' ``pack-quantized`` has them.

The numbers of a row are one string of bits, the first number in the lowest bits of the first word, filled up with zeros
to whole words. Where the bits of a number divide 32 these are compressed-tensors' words. Where they do not, as with 3,
a number may begin in one word and end in the next: 32 numbers of 3 bits take 3 words, as in its version 0.20.
"""

from dataclasses import dataclass
from math import gcd, lcm
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from .few_bits import Packed, linear, written
from .kernel_limits import few_bits
from .storage import Held, Storage, not_scales

WORD = 32


def words_of(numbers: int, bits: int) -> int:
    """Words that a row of numbers takes."""
    return -(-numbers * bits // WORD)


def period(bits: int) -> tuple[int, int]:
    """Numbers and words after which a number begins with a word again.

    >>> period(4), period(3)
    ((8, 1), (32, 3))
    """
    common = gcd(bits, WORD)
    return WORD // common, bits // common


def unpack(words: Tensor, bits: int, columns: int) -> Tensor:
    """The numbers ``(rows, columns)`` of words, int32 ``(rows, words)``; what lies behind the last one is left out."""
    numbers, whole = period(bits)
    words = in_parts(words, whole)
    at = torch.arange(numbers, device=words.device) * bits
    if whole > 1:  # each word with the one behind it above it
        words = words.long() & 0xFFFFFFFF
        words = words | functional.pad(words[..., 1:], (0, 1)) << WORD
        words = words[..., at // WORD]
    found = words >> (at % WORD).to(words.dtype) & (1 << bits) - 1
    return found.flatten(1)[:, :columns]


def dequantise(numbers: Tensor, scale: Tensor, zero: Tensor | int, size: int, dtype: torch.dtype) -> Tensor:
    """``scale * (number - zero)``: exact in float32, then rounded to the dtype.

    Args:
        numbers: shape ``(rows, columns)``.
        scale: shape ``(rows, groups)``.
        zero: shape ``(rows, groups)``, or the same for all.
        size: neighbouring columns that have one scale; the last group may have fewer.
    """
    columns = numbers.shape[1]
    groups = in_parts(numbers, size).float()
    shift = zero.float()[..., None] if isinstance(zero, Tensor) else zero
    values: Tensor = groups.sub_(shift).mul_(scale.float()[..., None]).to(dtype)
    return values.flatten(1)[:, :columns].contiguous()


def in_parts(values: Tensor, size: int) -> Tensor:
    """Rows ``(rows, parts, size)``, the last part filled up with zeros."""
    parts = -(-values.shape[1] // size)
    return functional.pad(values, (0, parts * size - values.shape[1])).reshape(len(values), parts, size)


@dataclass(frozen=True)
class PackedIntegers(Storage):
    """``scale * (number - zero)``, the numbers in ``weight_packed`` (int32), a word after the other along each row.

    ``weight_scale`` (float16, ``(rows, groups)``) has the scales; ``weight_zero_point`` (int32) the zero points, packed
    along each column of ``(rows, groups)``. ``weight_shape`` (int64, ``(2,)``) has the rows and columns, as other
    readers want it. Products are those of the values in the dtype of the input.

    Attributes:
        bits: of a number, 1 to 8.
        group: neighbouring columns that have one scale; None: all of a row.
        zero: whether there are zero points; without them the zero is ``2 ** (bits - 1)``.

    Raises:
        ValueError: one of them is out of range.
    """

    metadata: ClassVar[frozenset[str]] = frozenset({"weight_shape"})
    bits: int
    group: int | None
    zero: bool

    def __post_init__(self) -> None:
        sound = type(self.bits) is int and 1 <= self.bits <= 8 and isinstance(self.zero, bool)
        if not sound or not (self.group is None or (type(self.group) is int and self.group > 0)):
            raise ValueError("which is not 1 to 8 bits, a group of 1 column or more or None, and a truth value")

    def tensors(self, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        groups = -(-columns // self._size(columns))
        found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "weight_packed": ((rows, words_of(columns, self.bits)), torch.int32),
            "weight_scale": ((rows, groups), torch.float16),
            "weight_shape": ((2,), torch.int64),
        }
        return found | ({"weight_zero_point": ((words_of(rows, self.bits), groups), torch.int32)} if self.zero else {})

    def values(self, held: Held, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        if self.without_kernel(held["weight_packed"].device, dtype, rows, columns) is None:
            return written(Packed.of(held, self.bits, self.group, columns), dtype)
        numbers = unpack(held["weight_packed"], self.bits, columns)
        zero: Tensor | int = 1 << self.bits - 1
        if self.zero:
            zero = unpack(held["weight_zero_point"].T, self.bits, rows).T
        return dequantise(numbers, held["weight_scale"], zero, self._size(columns), dtype)

    def flaw(self, held: Held, rows: int, columns: int) -> str | None:
        if (said := held["weight_shape"].tolist()) != [rows, columns]:
            return f"weight_shape is {said}; expected {[rows, columns]}"
        return not_scales(held, "weight_scale")

    @property
    def step(self) -> int:
        return period(self.bits)[0] if self.zero else 1

    def part(self, held: Held, rows: slice) -> dict[str, Tensor]:
        found = super().part(held, rows)
        if self.zero:  # zero points are packed across the rows
            first = rows.start * self.bits // WORD
            words = slice(first, first + words_of(rows.stop - rows.start, self.bits))
            found["weight_zero_point"] = held["weight_zero_point"][words]
        return found

    def cuts(self, columns: slice, of: int) -> bool:
        """After whole words, and whole groups where there are several in a row."""
        step = lcm(period(self.bits)[0], self.group if self.group and self.group < of else 1)
        return all(end % step == 0 for end in (columns.start, columns.stop))

    def cut(self, held: Held, columns: slice, of: int) -> dict[str, Tensor]:
        words = slice(columns.start * self.bits // WORD, columns.stop * self.bits // WORD)
        size = self._size(of)
        groups = slice(columns.start // size, columns.stop // size) if size < of else slice(None)
        found = {name: held[name][:, groups] for name in ("weight_scale", "weight_zero_point") if name in held}
        return found | {"weight_packed": held["weight_packed"][:, words]}

    def stated(self, rows: int, columns: int) -> dict[str, Tensor]:
        return {"weight_shape": torch.tensor([rows, columns])}

    def rows(self, held: Held, at: Tensor | slice, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        if self.zero:  # zero points are packed across the rows
            return super().rows(held, at, rows, columns, dtype)
        some = {name: held[name][at] for name in ("weight_packed", "weight_scale")}
        return self.values(some, len(some["weight_packed"]), columns, dtype)

    def unread(self, device: torch.device, rows: int, columns: int) -> str | None:
        return few_bits(rows, columns, self.bits, self.group, self.zero)

    def kernel(self, x: Tensor, held: Held, columns: int) -> Tensor:
        return linear(x, Packed.of(held, self.bits, self.group, columns))

    def _size(self, columns: int) -> int:
        return max(min(self.group or columns, columns), 1)
