"""Non-dominated points, exactly, in a few vectorised sweeps."""

import numpy as np
from numpy.typing import NDArray

from gac.arrays import Floats, Ints

Mask = NDArray[np.bool_]
Points = Floats | Ints

_PAIRWISE = 1 << 11


def front(points: Points) -> Mask:
    """Which points no other point beats or equals in every column (smaller is better); of equal points the first stays.

    Kung, Luccio and Preparata, On finding the maxima of a set of vectors (1975): sort, split, and let the
    better half strike out of the worse one, with one column less.

    Args:
        points: shape ``(points, columns)``, one column at least.

    Returns:
        Mask of shape ``(points,)``.
    """
    columns = points.T
    if len(columns) > 2:
        columns = np.stack([np.unique(column, return_inverse=True)[1] for column in columns])
    order = np.lexsort(columns[::-1])
    columns = columns[:, order]
    fresh = np.ones(len(order), dtype=np.bool_)
    fresh[1:] = (columns[:, 1:] != columns[:, :-1]).any(axis=0)
    mask = np.zeros(len(order), dtype=np.bool_)
    mask[order[fresh][_front(columns[:, fresh])]] = True
    return mask


def _front(points: Points) -> Ints:
    """Positions of the front among distinct points in lexicographic order; one row a column here."""
    columns, count = points.shape
    if columns == 1:
        return np.zeros(1, dtype=np.int64)
    if columns == 2:
        lowest = np.minimum.accumulate(points[1])
        return np.flatnonzero(np.append(True, points[1, 1:] < lowest[:-1]))
    if count * count <= _PAIRWISE:
        return np.flatnonzero(~np.triu(_pairs(points, points), 1).any(axis=0))
    middle = count // 2
    left, right = _front(points[:, :middle]), middle + _front(points[:, middle:])
    return np.append(left, right[~_covered(points[1:, left], points[1:, right])])


def _covered(by: Points, points: Points) -> Mask:
    """Which points are no smaller in any row than some point of ``by``."""
    if by.shape[1] == 0 or points.shape[1] == 0:
        return np.zeros(points.shape[1], dtype=np.bool_)
    if len(by) == 1:
        return np.asarray(points[0] >= by[0].min())
    if len(by) == 2:
        return _covered_in_plane(by, points)
    if by.shape[1] * points.shape[1] <= _PAIRWISE:
        return np.asarray(_pairs(by, points).any(axis=0))
    return _covered_by_halves(by, points)


def _pairs(by: Points, points: Points) -> Mask:
    return np.asarray((by[:, :, None] <= points[:, None, :]).all(axis=0))


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
