"""Joining two lists of partial choices: the best pair within the limits."""

from collections.abc import Iterator

import numpy as np

from gac.allocation.knapsack.states import Core, States, Work
from gac.core.arrays import Ints

MOST_PAIRS = 1 << 26
_BATCH = 1 << 21
_CLASS = 256
_UP = 1 + 2.0**-40
_LARGEST = 2.0**61


Joined = tuple[tuple[int, int] | None, bool, int]
"""The best pair (positions in left and right, or None), whether the join is complete, and the pairs looked at."""


def join(left: States, right: States, core: Core, work: Work) -> Joined:
    """Find the pair whose costs sum to at most ``free`` with the smallest sum of values, if that is below ``below``.

    Beyond ``MOST_PAIRS``, or once the work is spent, the join is incomplete.
    """
    if not len(left) or not len(right):
        return None, True, 0
    if len(core.free) == 1:
        return _join_single(left, right, int(core.free[0]), core.below), True, len(left)
    return _join_several(left, right, core, work)


def _join_single(left: States, right: States, free: int, below: int) -> tuple[int, int] | None:
    order = np.argsort(right.costs[0], kind="stable")
    values = right.values[order]
    lowest = np.minimum.accumulate(values)
    fitting = np.searchsorted(right.costs[0, order], free - left.costs[0], side="right")
    fits = np.flatnonzero(fitting)
    if len(fits) == 0:
        return None
    total = left.values[fits] + lowest[fitting[fits] - 1]
    best = int(total.argmin())
    if total[best] >= below:
        return None
    partner = np.flatnonzero(values[: fitting[fits[best]]] == lowest[fitting[fits[best]] - 1])[0]
    return int(fits[best]), int(order[partner])


def _join_several(left: States, right: States, core: Core, work: Work) -> Joined:
    """Several limits: only the pairs that use nearly all of the limit whose use is tightest.

    A choice with reduced values R that leaves u of a limit unused has a value of at least bound + R + multiplier * u,
    so u < (reach - R) / multiplier. The right list is cut into classes of similar R, which keeps that window narrow.
    """
    best, below, pairs = None, core.below, 0
    tightest = int(np.argmax(core.multipliers * (np.ptp(left.costs, axis=1) + np.ptp(right.costs, axis=1))))
    multiplier = float(core.multipliers[tightest])
    by_reduced = np.argsort(right.reduced, kind="stable")
    for members in np.array_split(by_reduced, max(1, len(right) // _CLASS)):
        members = members[np.argsort(right.costs[tightest, members], kind="stable")]
        least = int(right.reduced[members].min()) + left.reduced
        rows = np.flatnonzero(least < core.room)
        most = core.free[tightest] - left.costs[tightest, rows]
        first, end = _window(right.costs[tightest, members], most, core.reach - least[rows], multiplier)
        pairs += int((end - first).sum())
        work.steps += len(left) + int((end - first).sum())
        if pairs > MOST_PAIRS or work.spent:
            return best, False, pairs
        for a, b in _pairs(rows, first, end):
            better = _best_of(left, right, a, members[b], core.free, below)
            if better is not None:
                best, below = better[:2], better[2]
    return best, True, pairs


def _best_of(left: States, right: States, a: Ints, b: Ints, free: Ints, below: int) -> tuple[int, int, int] | None:
    total = left.values[a] + right.values[b]
    fits = np.flatnonzero(total < below)
    a, b, total = a[fits], b[fits], total[fits]
    fits = np.flatnonzero((left.costs[:, a] + right.costs[:, b] <= free[:, None]).all(axis=0))
    if len(fits) == 0:
        return None
    best = fits[total[fits].argmin()]
    return int(a[best]), int(b[best]), int(total[best])


def _window(costs: Ints, most: Ints, spare: Ints, multiplier: float) -> tuple[Ints, Ints]:
    """Bounds of the rising ``costs`` that are at most ``most``, and leave no more unused than ``spare`` is worth."""
    end = np.searchsorted(costs, most, side="right")
    if multiplier == 0.0:
        return np.zeros_like(end), end
    unused = spare / multiplier * _UP + 1
    first = np.searchsorted(costs, most - np.minimum(unused, _LARGEST).astype(np.int64), side="left")
    return np.where(unused < _LARGEST, first, 0), end


def _pairs(rows: Ints, first: Ints, end: Ints) -> Iterator[tuple[Ints, Ints]]:
    ends = np.cumsum(end - first)
    start = 0
    while start < len(rows):
        done = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, done + _BATCH, side="right")))
        sizes = (end - first)[start:stop]
        offsets = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        yield np.repeat(rows[start:stop], sizes), np.repeat(first[start:stop], sizes) + offsets
        start = stop
