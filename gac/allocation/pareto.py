"""Non-dominated points, exactly, in a few vectorised sweeps."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gac.core.arrays import Floats, Ints

Mask = NDArray[np.bool_]
Points = Floats | Ints

_PAIRWISE = 1 << 15
_MANY, _SAMPLE, _PIVOTS = 1 << 12, 1 << 8, 32
_ROUNDS = 64


def front(points: Points) -> Mask:
    """Which points no other point beats or equals in every column (smaller is better); of equal points the first stays.

    Kung, Luccio and Preparata, On finding the maxima of a set of vectors (1975): sort, split, and let the
    better half strike out of the worse one, with one column less.

    Args:
        points: shape ``(points, columns)``, one column at least.

    Returns:
        Mask of shape ``(points,)``.
    """
    mask = np.zeros(len(points), dtype=np.bool_)
    left = _rarely_beaten(points.T) if len(points) > _MANY else np.arange(len(points))
    columns: NDArray[Any] = points[left].T
    if len(columns) > 2 and len(left) ** 2 > _PAIRWISE:
        columns = np.stack([np.unique(column, return_inverse=True)[1].astype(np.int32) for column in columns])
    order = np.lexsort(columns[::-1])
    columns = columns[:, order]
    fresh = np.ones(len(order), dtype=np.bool_)
    fresh[1:] = (columns[:, 1:] != columns[:, :-1]).any(axis=0)
    mask[left[order[fresh][_front(columns[:, fresh])]]] = True
    return mask


def front_of_each_kind(points: Points, kinds: Ints) -> Mask:
    """Which points no other point of the same kind beats or equals, as ``front`` of each kind, but all at once.

    In each kind the first point in lexicographic order is beaten by none. It strikes out what it beats, and of what
    is left the first one is the next. Kinds that are not done after some rounds have long fronts, and go one by one.

    Args:
        kinds: shape ``(points, columns)``.
    """
    mask = np.zeros(len(points), dtype=np.bool_)
    left = np.lexsort((*points.T[::-1], *kinds.T))
    kind = np.cumsum(np.append(False, (np.diff(kinds[left], axis=0) != 0).any(axis=1)))
    columns: NDArray[Any] = points[left].T
    for _ in range(_ROUNDS):
        first = np.flatnonzero(np.diff(kind, prepend=-1))
        mask[left[first]] = True
        by = np.repeat(first, np.diff(first, append=len(kind)))
        kept = ~(columns[:, by] <= columns).all(axis=0)
        left, kind, columns = left[kept], kind[kept], columns[:, kept]
        if not len(left):
            return mask
    for same in np.split(left, np.flatnonzero(np.diff(kind)) + 1):
        mask[same[front(points[same])]] = True
    return mask


def _rarely_beaten(points: Points) -> Ints:
    """Positions of the points that none of a few others beats: those of a sample that beat most of it."""
    left = np.arange(points.shape[1])
    sample = points[:, :: len(left) // _SAMPLE]
    by = sample[:, front(sample.T)]
    beats = _pairs(by, sample)
    for _ in range(_PIVOTS):
        counts = beats.sum(axis=1)
        best = int(counts.argmax())
        if counts[best] * _PIVOTS < _SAMPLE // 2:
            break
        pivot = by[:, best, None]
        beaten = np.flatnonzero(_pairs(pivot, points)[0])
        kept = np.ones(len(left), dtype=np.bool_)
        kept[beaten[(points[:, beaten] != pivot).any(axis=0)]] = False
        left, points, beats = left[kept], points[:, kept], beats[:, ~beats[best]]
    return left


def _front(points: Points) -> Ints:
    """Positions of the front among distinct points in lexicographic order; one row a column here.

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
    """Whether a point of ``by`` is no larger in any row than one of ``points``, shape ``(by, points)``."""
    mask = by[0, :, None] <= points[0]
    for ours, theirs in zip(by[1:], points[1:], strict=True):
        mask &= ours[:, None] <= theirs
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
