"""Low-bit integer weights with a scale for each group of neighbouring columns."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gac.core.errors import PlanError
from gac.runtime.limits import few_bits
from gac.schemes.base import LARGEST_SCALE, Scheme, StorageSpec, config_arguments, config_group

if TYPE_CHECKING:
    from torch import Tensor

    from gac.schemes.feedback.levels import Levels
    from gac.schemes.matrices import Grid

_GROUP = re.compile(r"[1-9][0-9]{0,5}")
_WORD, _WORD_BYTES, _SCALE_BYTES = 32, 4, 2


class IntegerWeights(Scheme):
    """Weights of ``bits`` bits, multiplied in 16: ``scale * (number - zero point)``.

    The names are those of compressed-tensors' presets, in lower case. A scale has 16 bits, a zero point as many as a
    number. A last group may have fewer columns. Numbers are packed into words of 32 bits along each row, zero points
    across the rows; each such string is padded to full words (``gac.runtime.storage.packed``).

    Args:
        kind: the name without its parameter.
        group: neighbouring columns of a row with one scale; None: all of them.
        zero: with a zero point per group; without, numbers are symmetric.
    """

    def __init__(self, kind: str, bits: int, group: int | None, zero: bool, name: str | None = None) -> None:
        self.kind, self.bits, self.group, self.zero = kind, bits, group, zero
        self.name = self.dtype = name or kind
        self.for_embeddings = group is None
        self.largest = LARGEST_SCALE * (2**bits - 1 if zero else 2**bits - 2) / 2
        self.storage = StorageSpec("PackedIntegers", {"bits": bits, "group": group, "zero": zero}, few_bits)

    def with_parameter(self, text: str) -> "IntegerWeights":
        """The same with groups of another size, ``w4a16:64``; the scheme itself where that is its own size."""
        if not _GROUP.fullmatch(text):
            raise PlanError(
                f"scheme {self.kind}:{text}", f"{self.kind}:N with groups of 1 to 999999 columns", "Correct the name."
            )
        if int(text) == self.group:
            return self
        return IntegerWeights(self.kind, self.bits, int(text), self.zero, f"{self.kind}:{text}")

    def bytes(self, rows: int, columns: int) -> int:
        groups = -(-columns // (self.group or max(columns, 1)))
        zeros = self._words(rows) * groups if self.zero else 0
        return (rows * self._words(columns) + zeros) * _WORD_BYTES + rows * groups * _SCALE_BYTES

    def levels(self) -> "Levels":
        from gac.schemes.integers.levels import IntegerLevels

        return IntegerLevels(2**self.bits - 1, self.zero)

    def config_group(self, columns: int) -> dict[str, Any] | None:
        if self.group is None or self.group >= columns:
            strategy, group = "channel", None
        elif self.ragged(columns):  # compressed-tensors has groups of one size only
            return None
        else:
            strategy, group = "group", self.group
        return config_group("pack-quantized", config_arguments(self.bits, "int", strategy, group, not self.zero))

    def grid(self, tensors: "Mapping[str, Tensor]", rows: int, columns: int) -> "Grid":
        from gac.schemes.integers.levels import unpacked

        return unpacked(tensors, self.bits, self.group or max(columns, 1), (rows, columns))

    def on_grid(self, grid: "Grid") -> "dict[str, Tensor]":
        from gac.schemes.integers.levels import packed

        return packed(grid, self.bits, self.zero)

    def _words(self, numbers: int) -> int:
        return -(-numbers * self.bits // _WORD)


W8A16 = IntegerWeights("w8a16", 8, None, zero=False)
W4A16 = IntegerWeights("w4a16", 4, 128, zero=True)
W3A16 = IntegerWeights("w3a16", 3, 128, zero=True)
W2A16 = IntegerWeights("w2a16", 2, 128, zero=True)
