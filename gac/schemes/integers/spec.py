"""Whole numbers of few bits, with a scale for each group of neighbouring columns."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gac.core.errors import PlanError
from gac.schemes.base import Scheme, StorageSpec
from gac.schemes.config_groups import config_group, in_groups, in_rows

if TYPE_CHECKING:
    from torch import Tensor

    from gac.schemes.grid import Grid
    from gac.schemes.inputs import Inputs
    from gac.schemes.integers.torch import Numbers
    from gac.schemes.scaled import Scaled

_GROUP = re.compile(r"[1-9][0-9]{0,5}")
_WORD, _WORD_BYTES, _SCALE_BYTES = 32, 4, 2
LARGEST_SCALE = 65280.0
"""The largest number that float16 and bfloat16 both hold."""


class Integers(Scheme):
    """Weights of ``bits`` bits that are multiplied in 16: ``scale * (number - zero point)``.

    The names are those of compressed-tensors' presets, in lower case. A scale has 16 bits, a zero point as many as a
    number. What does not fill a group has a scale of its own. Numbers are packed into words of 32 bits along each row,
    zero points across the rows; each such string is filled up to whole words (``gac.runtime.storage.packed``).

    Args:
        kind: the name without its parameter.
        group: neighbouring columns of a row that have one scale; None: the whole row.
        zero: whether a group has a zero point; without one the numbers lie evenly on both sides of zero.
    """

    def __init__(self, kind: str, bits: int, group: int | None, zero: bool, name: str | None = None) -> None:
        self.kind, self.bits, self.group, self.zero = kind, bits, group, zero
        self.name = self.dtype = name or kind
        self.largest = LARGEST_SCALE * (2**bits - 1 if zero else 2**bits - 2) / 2
        self.storage = StorageSpec("PackedIntegers", {"bits": bits, "group": group, "zero": zero})

    def with_parameter(self, text: str) -> "Integers":
        """The same with groups of another size, ``w4a16:64``; the scheme itself where that is its own size.

        Raises:
            PlanError: it is no number of columns.
        """
        if not _GROUP.fullmatch(text):
            given = f"scheme {self.kind}:{text}"
            raise PlanError(given, f"{self.kind}:N with groups of 1 to 999999 columns", "Correct the name.")
        if int(text) == self.group:
            return self
        return Integers(self.kind, self.bits, int(text), self.zero, f"{self.kind}:{text}")

    def bytes(self, rows: int, columns: int) -> int:
        groups = -(-columns // (self.group or max(columns, 1)))
        zeros = self._words(rows) * groups if self.zero else 0
        return (rows * self._words(columns) + zeros) * _WORD_BYTES + rows * groups * _SCALE_BYTES

    def rounded(self, matrix: "Tensor", inputs: "Inputs | None" = None, gradients: "Tensor | None" = None) -> "Tensor":
        return self._numbers(matrix, inputs, gradients).values(matrix.dtype)

    def stored(
        self, matrix: "Tensor", inputs: "Inputs | None" = None, gradients: "Tensor | None" = None
    ) -> "dict[str, Tensor]":
        from gac.schemes.integers.packing import packed

        return packed(self._numbers(matrix, inputs, gradients), self.bits, self.zero)

    def config_group(self, columns: int) -> dict[str, Any] | None:
        if self.group is None or self.group >= columns:
            return config_group("pack-quantized", in_rows(self.bits, "int", symmetric=not self.zero))
        if self.ragged(columns):  # its groups are all of the same size
            return None
        return config_group("pack-quantized", in_groups(self.bits, self.group, symmetric=not self.zero))

    def scaled(self, values: "Tensor", held: "Mapping[str, Tensor]") -> "Scaled":
        from gac.schemes.scaled import Scaled

        return Scaled.of(values, held["weight_scale"], self.group or max(values.shape[1], 1))

    def grid(self, held: "Mapping[str, Tensor]", rows: int, columns: int) -> "Grid":
        from gac.schemes.integers.packing import unpacked

        return unpacked(held, self.bits, self.group or max(columns, 1), (rows, columns))

    def on_grid(self, grid: "Grid") -> "dict[str, Tensor]":
        from gac.schemes.integers.packing import packed
        from gac.schemes.integers.torch import of_grid

        return packed(of_grid(grid), self.bits, self.zero)

    def _words(self, numbers: int) -> int:
        """Words that a string of numbers takes."""
        return -(-numbers * self.bits // _WORD)

    def _numbers(self, matrix: "Tensor", inputs: "Inputs | None", gradients: "Tensor | None") -> "Numbers":
        from gac.schemes.integers.torch import round_matrix

        self.check_range(matrix)
        return round_matrix(matrix, inputs, self.bits, self.group, self.zero, gradients)


W8A16 = Integers("w8a16", 8, None, zero=False)
W4A16 = Integers("w4a16", 4, 128, zero=True)
W3A16 = Integers("w3a16", 3, 128, zero=True)
W2A16 = Integers("w2a16", 2, 128, zero=True)
