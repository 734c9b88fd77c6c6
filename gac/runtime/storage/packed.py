"""Integers of 1 to 8 bits in words of 32, as compressed-tensors' ``pack-quantized`` has them.

The numbers of a row are one string of bits, the first number in the lowest bits of the first word, padded with zeros to
whole words. Where the bits of a number do not divide 32, as 3 do not, a number may begin in one word and end in the
next: 32 numbers of 3 bits take 3 words, as in compressed-tensors 0.20.
"""

from dataclasses import dataclass
from math import gcd, lcm
from typing import ClassVar

import torch
from torch import Tensor

from gac.runtime.kernels.elementwise.rows import AddNorm
from gac.runtime.kernels.low_bit import few_bits_gated, few_bits_linear, few_bits_normed, few_bits_written
from gac.runtime.kernels.low_bit.packed import Packed
from gac.runtime.kernels.low_bit.tiles import ArrangedRows, gemm_of
from gac.runtime.limits import few_bits
from gac.runtime.plain import modeling_gac
from gac.runtime.storage.base import Storage, Tensors, not_scales

WORD = 32  # bits


def words_of(numbers: int, bits: int) -> int:
    return -(-numbers * bits // WORD)


def period(bits: int) -> tuple[int, int]:
    """Return numbers and words after which a number begins with a word again.

    >>> period(4), period(3)
    ((8, 1), (32, 3))
    """
    common = gcd(bits, WORD)
    return WORD // common, bits // common


@dataclass(frozen=True)
class PackedIntegers(modeling_gac.PackedIntegers, Storage):
    """``scale * (number - zero)``, the numbers in ``weight_packed`` (int32), a word after the other along each row.

    ``weight_scale`` (float16, ``(rows, groups)``) has the scales; ``weight_zero_point`` (int32) the zero points, packed
    along each column of ``(rows, groups)``; ``weight_shape`` (int64, ``(2,)``) rows and columns, for other readers.
    Products are those of the values in the dtype of the input.

    Numbers have 1 to 8 ``bits``; ``group`` neighbouring columns have one scale (None: all of a row); without zero
    points (``zero``) the zero is ``2 ** (bits - 1)``. A ValueError says if one of them is out of range.
    """

    metadata: ClassVar[frozenset[str]] = frozenset({"weight_shape"})

    def __post_init__(self) -> None:
        sound = type(self.bits) is int and 1 <= self.bits <= 8 and isinstance(self.zero, bool)
        if not sound or not (self.group is None or (type(self.group) is int and self.group > 0)):
            raise ValueError("which is not 1 to 8 bits, a group of 1 column or more or None, and a truth value")

    def values(self, tensors: Tensors, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        if self.unsupported_reason(tensors["weight_packed"].device, dtype, rows, columns) is None:
            return few_bits_written(*self._packed(tensors, columns).operands, dtype)
        return super().values(tensors, rows, columns, dtype)

    def flaw(self, tensors: Tensors, rows: int, columns: int) -> str | None:
        if (shape := tensors["weight_shape"].tolist()) != [rows, columns]:
            return f"weight_shape is {shape}; expected {[rows, columns]}"
        return not_scales(tensors, "weight_scale")

    @property
    def step(self) -> int:
        return period(self.bits)[0] if self.zero else 1

    def slice_rows(self, tensors: Tensors, rows: slice) -> dict[str, Tensor]:
        sliced = super().slice_rows(tensors, rows)
        if self.zero:  # zero points are packed across the rows
            first = rows.start * self.bits // WORD
            words = slice(first, first + words_of(rows.stop - rows.start, self.bits))
            sliced["weight_zero_point"] = tensors["weight_zero_point"][words]
        return sliced

    def can_slice_columns(self, columns: slice, total: int) -> bool:
        # After whole words, and whole groups where there are several in a row.
        step = lcm(period(self.bits)[0], self.group if self.group and self.group < total else 1)
        return all(end % step == 0 for end in (columns.start, columns.stop))

    def slice_columns(self, tensors: Tensors, columns: slice, total: int) -> dict[str, Tensor]:
        words = slice(columns.start * self.bits // WORD, columns.stop * self.bits // WORD)
        size = self.columns_of_group(total)
        groups = slice(columns.start // size, columns.stop // size) if size < total else slice(None)
        sliced = {name: tensors[name][:, groups] for name in ("weight_scale", "weight_zero_point") if name in tensors}
        return sliced | {"weight_packed": tensors["weight_packed"][:, words]}

    def metadata_for(self, rows: int, columns: int) -> dict[str, Tensor]:
        return {"weight_shape": torch.tensor([rows, columns])}

    def rows(self, tensors: Tensors, which: Tensor | slice, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        if self.zero:  # zero points are packed across the rows
            return super().rows(tensors, which, rows, columns, dtype)
        some = {name: tensors[name][which] for name in ("weight_packed", "weight_scale")}
        return self.values(some, len(some["weight_packed"]), columns, dtype)

    def kernel_unsupported_reason(self, device: torch.device, rows: int, columns: int) -> str | None:
        return few_bits(rows, columns, self.bits, self.group, self.zero)

    def kernel(self, x: Tensor, tensors: Tensors, columns: int) -> Tensor:
        return few_bits_linear(x, *self._packed(tensors, columns).operands)

    def gated_kernel(self, x: Tensor, tensors: Tensors, columns: int) -> Tensor | None:
        return few_bits_gated(x, self._packed(tensors, columns))

    def normed_inputs(self, x: Tensor, norm: AddNorm, tensors: Tensors, columns: int) -> ArrangedRows | None:
        return few_bits_normed(x, norm, self._packed(tensors, columns))

    def kernel_of_prepared(self, inputs: ArrangedRows, tensors: Tensors, dtype: torch.dtype) -> Tensor:
        return gemm_of(inputs, self._packed(tensors, inputs.columns))

    def _packed(self, tensors: Tensors, columns: int) -> Packed:
        return Packed.of(tensors, self.bits, self.group, columns)
