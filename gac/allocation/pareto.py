"""Pareto-optimal points, exactly: fronts, dominance queries, and the pruning of combinations by known points."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gac.core.arrays import Floats, Ints

Mask = NDArray[np.bool_]
Points = Floats | Ints

_PAIRWISE = 1 << 15
_FEW, _TOO_MANY = 1 << 12, 1 << 18
_BLOCK, _BLOCKS = 4, 1 << 11


def nondominated(points: Points) -> Mask:
    """Return the mask of the points that no other point beats or equals in every column; of equal ones the first stays.

    Kung, Luccio and Preparata, On finding the maxima of a set of vectors (1975): sort, split, and let the
    better half strike out of the worse one, with one column less.

    Args:
        points: shape ``(points, columns)``, one column at least; smaller is better.
    """
    mask = np.zeros(len(points), dtype=np.bool_)
    varied = (points != points[:1]).any(axis=0)
    columns: NDArray[Any] = points.T[varied if varied.any() else slice(1)]
    if len(columns) > 2 and len(points) ** 2 > _PAIRWISE:
        columns = np.stack([np.unique(column, return_inverse=True)[1].astype(np.int32) for column in columns])
    order = np.lexsort(columns[::-1])
    columns = columns[:, order]
    fresh = np.ones(len(order), dtype=np.bool_)
    fresh[1:] = (columns[:, 1:] != columns[:, :-1]).any(axis=0)
    mask[order[fresh][_front(columns[:, fresh])]] = True
    return mask


def _front(points: Points) -> Ints:
    """Positions of the front among distinct points in lexicographic order, with a row for each column.

    The better half strikes points out of the worse one first, since it often leaves few.
    """
    columns, count = points.shape
    if columns == 1:
        return np.arange(min(count, 1))
    if columns == 2:
        lowest = np.minimum.accumulate(points[1])
        return np.flatnonzero(np.append(True, points[1, 1:] < lowest[:-1])[:count])
    if count * count <= _PAIRWISE:
        return np.flatnonzero(_pairs(points, points).sum(axis=0) == 1)
    middle = count // 2
    left = _front(points[:, :middle])
    right = middle + np.flatnonzero(~_covered(points[1:, left], points[1:, middle:]))
    return np.append(left, right[_front(points[:, right])]) if len(right) else left


def _covered(by: Points, points: Points) -> Mask:
    """The points that are no smaller in any row than some point of ``by``; both have two rows at least."""
    if by.shape[1] == 0 or points.shape[1] == 0:
        return np.zeros(points.shape[1], dtype=np.bool_)
    if len(by) == 2:
        return _covered_in_plane(by, points)
    if by.shape[1] * points.shape[1] <= _PAIRWISE:
        return np.asarray(_pairs(by, points).any(axis=0))
    return _covered_by_halves(by, points)


def _pairs(by: Points, points: Points) -> Mask:
    """True where a point of ``by`` is no larger in any row than one of ``points``, shape ``(by, points)``."""
    mask = by[0, :, None] <= points[0]
    for left, right in zip(by[1:], points[1:], strict=True):
        mask &= left[:, None] <= right
    return np.asarray(mask)


def _covered_in_plane(by: Points, points: Points) -> Mask:
    order = np.argsort(by[0], kind="stable")
    lowest = np.minimum.accumulate(by[1, order])
    last = np.searchsorted(by[0, order], points[0], side="right") - 1
    return np.asarray((last >= 0) & (lowest[np.maximum(last, 0)] <= points[1]))


def _covered_by_halves(by: Points, points: Points) -> Mask:
    both = np.concatenate([by[0], points[0]])
    smallest, largest = int(both.min()), int(both.max())
    if smallest == largest:
        return _covered(by[1:], points[1:])
    middle = min(int(np.median(both)), largest - 1)
    by_low, low = by[0] <= middle, points[0] <= middle
    covered = np.zeros(points.shape[1], dtype=np.bool_)
    covered[low] = _covered(by[:, by_low], points[:, low])
    covered[~low] = _covered(by[:, ~by_low], points[:, ~low])
    rest = np.flatnonzero(~low & ~covered)
    covered[rest] = _covered(by[1:, by_low], points[1:, rest])
    return covered


def dominated(points: Floats, by: Floats) -> Mask:
    """Return the mask of the points that one of ``by`` dominates: no larger in any column, and smaller in one.

    With the sum of a point's ranks, less 1, as a further column, what is no larger is smaller in one.
    """
    columns = np.concatenate([by, points]).T
    ranks = np.stack([np.unique(column, return_inverse=True)[1] for column in columns])
    sums = ranks.sum(axis=0)
    sums[len(by) :] -= 1
    ranks = np.vstack([sums, ranks]).astype(np.int32)
    return _covered(ranks[:, : len(by)], ranks[:, len(by) :])


# --- pruning of combinations ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ParetoSet:
    """Criteria ``(rows, criteria)`` of known candidates of a site, which prune new ones before they are built."""

    parts: tuple[Floats, ...] = ()

    def extend(self, *parts: Floats) -> "ParetoSet":
        return ParetoSet((*self.parts, *parts))

    @cached_property
    def _front(self) -> Floats:
        rows = np.concatenate(self.parts)
        return rows[nondominated(rows)]

    def nondominated(self, options: Sequence[Floats], extra: Floats) -> list[Ints] | None:
        """Return the combinations of options, one of each, that no known candidate dominates; equal ones stay.

        Branch and bound over blocks of options of similar loss. Where a known candidate dominates the least
        of each block in every criterion, it dominates every combination of theirs. Sums are taken in the order in which
        those of candidates are, so that no bound is larger in floats either.

        Args:
            options: criteria of each weight's options, the loss last.
            extra: added to the criteria of each combination.

        Returns:
            Positions in each of the options, in lexicographic order; None where building all combinations is faster.
        """
        if not self.parts or prod(map(len, options)) < _FEW:
            return None
        orders = [np.argsort(rows[:, -1], kind="stable") for rows in options]
        ordered = [rows[order] for rows, order in zip(options, orders, strict=True)]
        size = _BLOCK
        while prod(-(-len(rows) // size) for rows in ordered) > _BLOCKS:
            size *= _BLOCK
        sizes = [size] * len(options)
        blocks = list(np.indices([-(-len(rows) // size) for rows in ordered]).reshape(len(ordered), -1))
        least = [_block_minima(rows, size) for rows in ordered]
        blocks = self._pruned(blocks, least, extra)
        while max(sizes) > 1:
            for weight, rows in enumerate(ordered):
                blocks = _split(blocks, weight, -(-len(rows) // (sizes[weight] // _BLOCK)))
                if len(blocks[weight]) > _TOO_MANY:
                    return None
                sizes[weight] //= _BLOCK
                least[weight] = _block_minima(rows, sizes[weight])
                blocks = self._pruned(blocks, least, extra)
        positions = [order[block] for order, block in zip(orders, blocks, strict=True)]
        ranks = np.lexsort(positions[::-1])
        return [picked[ranks] for picked in positions]

    def _pruned(self, blocks: Sequence[Ints], least: Sequence[Floats], extra: Floats) -> list[Ints]:
        bound: Floats = reduce(np.add, [rows[block] for rows, block in zip(least, blocks, strict=True)]) + extra
        kept = ~dominated(bound, self._front)
        return [block[kept] for block in blocks]


def _block_minima(rows: Floats, size: int) -> Floats:
    minima: Floats = np.minimum.reduceat(rows, np.arange(0, len(rows), size))
    return minima


def _split(blocks: Sequence[Ints], weight: int, count: int) -> list[Ints]:
    inside = (blocks[weight][:, None] * _BLOCK + np.arange(_BLOCK)).ravel()
    exists = inside < count
    return [(inside if other == weight else np.repeat(block, _BLOCK))[exists] for other, block in enumerate(blocks)]
