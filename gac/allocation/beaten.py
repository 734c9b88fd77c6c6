"""Which points are beaten by some of others that stay the same, exactly, and many at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from gac.allocation.pareto import Mask
from gac.core.arrays import Floats, Ints

Words = NDArray[np.uint64]

_AT_ONCE = 512


@dataclass(frozen=True, eq=False)
class Beaters:
    """Points that others are compared with.

    Attributes:
        points: shape ``(points, columns)``; what is smaller is better.
    """

    points: Floats

    def beat(self, points: Floats) -> Mask:
        """Which points one of these beats: it is no larger in any column, and smaller in one."""
        left = np.arange(len(points))
        for few in self._prepared:
            left = left[~few.beat(points[left].T)]
        mask = np.ones(len(points), dtype=np.bool_)
        mask[left] = False
        return mask

    @cached_property
    def _prepared(self) -> list["_Few"]:
        return [_Few(self.points[at : at + _AT_ONCE].T) for at in range(0, len(self.points), _AT_ONCE)]


class _Few:
    """Some of them, with a table for each column: a row for each of their values, and in it a bit for each of them.

    The bit says whether that one's value is no larger, or the same; row 0 is that of what is smaller than all.
    """

    def __init__(self, by: Floats) -> None:
        ranked = [np.unique(row, return_inverse=True) for row in by]
        self._values = [values for values, _ in ranked]
        self._no_larger = [_packed(np.arange(len(values) + 1)[:, None] > rank) for values, rank in ranked]
        self._same = [_packed(np.arange(len(values) + 1)[:, None] == rank + 1) for values, rank in ranked]

    def beat(self, points: Floats) -> Mask:
        """As ``Beaters.beat``; one row a column here."""
        rows = [np.searchsorted(values, row, side="right") for values, row in zip(self._values, points, strict=True)]
        no_larger = _common(self._no_larger, rows)
        mask: Mask = np.asarray(no_larger.any(axis=1))
        alike = mask.copy()  # in each column there is one of the same value
        for values, row, at in zip(self._values, points, rows, strict=True):
            alike &= values[at - 1] == row
        same = _common(self._same, [at[alike] for at in rows])
        mask[alike] = (no_larger[alike] & ~same).any(axis=1)
        return mask


def _packed(table: Mask) -> Words:
    """A row's bits, 64 to a word."""
    return np.packbits(np.pad(table, ((0, 0), (0, -table.shape[1] % 64))), axis=1).view(np.uint64)


def _common(tables: Sequence[Words], rows: Sequence[Ints]) -> Words:
    """For each point, the bits that are set in its row of every table."""
    found: Words = tables[0][rows[0]]
    for table, at in zip(tables[1:], rows[1:], strict=True):
        found &= table[at]
    return found
