"""Cliffs in a sweep: collapsed dims, staircases, sweet spots, and the step that dims must keep to avoid them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from gac.profiling.table import COARSEST_CLASS, Profile, Sweep, alignment_class, interpolate
from gac.sites import Floats, Ints

NOISE_FLOOR = 0.02
"""Two latencies closer than this are the same, however small the spread of their samples."""

MUCH_SLOWER = 1.10
"""An alignment class whose median slowdown is above this does not keep up with the aligned dims."""

TOLERATED = 1.05
"""A dim may be this much slower than a larger one and still be offered as a candidate."""

_EVIDENCE = 3


@dataclass(frozen=True, eq=False)
class Cliffs:
    """What is wrong along one sweep.

    Attributes:
        collapsed: dims such that some larger dim is faster by more than the noise.
        rescue: for each of them, the smallest larger dim within 2 % of the fastest larger one.
        slowdown: for each of them, its latency over that of its rescue.
        sweet_spots: among the other dims, the last before a jump of the latency per unit of dim.
        edges: for each sweet spot, the first dim after the jump.
        period: the smallest power of two (up to 64) whose multiples keep up; 1 where alignment does not matter.
        class_slowdown: the evidence: for each alignment class (largest power of two dividing the dim), the median
            latency over that of the next multiple of 64, which is what zero-padding the dim would give.
    """

    collapsed: Ints
    rescue: Ints
    slowdown: Floats
    sweet_spots: Ints
    edges: Ints
    period: int
    class_slowdown: Mapping[int, float]


def find_cliffs(sweep: Sweep) -> Cliffs:
    """Collapsed dims, staircase edges and alignment period of one sweep.

    The noise between two points is ``max(2 % of the slower, hypot of their interquartile ranges)``.
    """
    below = _rescue_of(sweep)
    collapsed = below >= 0
    rescue = below[collapsed]
    sweet, edges = _staircase(sweep, np.flatnonzero(~collapsed))
    evidence = class_slowdown(sweep)
    return Cliffs(
        sweep.dims[collapsed],
        sweep.dims[rescue],
        sweep.ns[collapsed] / sweep.ns[rescue],
        sweet,
        edges,
        _period(evidence),
        MappingProxyType(evidence),
    )


def cliffs_of(profile: Profile) -> list[tuple[str, Cliffs]]:
    """The cliffs of every sweep in a profile, each with the sweep's label."""
    return [(sweep.label, find_cliffs(sweep)) for sweep in profile.sweeps()]


def sound_dims(
    profile: Profile,
    operator: str,
    fixed: Sequence[Mapping[str, int]],
    axis: str,
    dims: Ints,
    dtype: str = "bf16",
) -> NDArray[np.bool_]:
    """Which dims are sound candidates: aligned, and not collapsed for any of the workloads.

    A dim is aligned if it is a multiple of the operator's period. It is collapsed if, by measurement or
    interpolation, it is more than 5 % slower than some larger aligned dim that was measured. (Only aligned dims
    are compared: at one row, some misaligned dims are faster than any aligned one.) Where the profile lacks the
    shape, alignment alone decides.

    Args:
        fixed: the operator's other axes, one mapping a workload (they differ in ``m``).
        dims: int64, any shape.

    Returns:
        bool, of the shape of ``dims``.
    """
    dims = np.asarray(dims, dtype=np.int64)
    period = operator_period(profile, operator, dtype)
    sound: NDArray[np.bool_] = dims % period == 0
    for axes in fixed:
        sweep = profile.rows_of(operator, axes, axis, dtype)
        if len(sweep):
            sound &= ~_much_slower(sweep, dims, period)
    return sound


@lru_cache(maxsize=64)
def operator_period(profile: Profile, operator: str, dtype: str = "bf16") -> int:
    """The period that most of an operator's sweeps agree on, among those where alignment matters; else 1."""
    sweeps = (sweep for sweep in profile.sweeps() if (sweep.operator, sweep.dtype) == (operator, dtype))
    votes = Counter(period for period in (_period(class_slowdown(sweep)) for sweep in sweeps) if period > 1)
    return max(votes, key=lambda period: (votes[period], period), default=1)


def class_slowdown(sweep: Sweep) -> dict[int, float]:
    """Median latency of each alignment class over that of the next larger multiple of 64.

    Classes with fewer than three dims below a measured multiple of 64 are left out.
    """
    aligned = sweep.dims % COARSEST_CLASS == 0
    classes = alignment_class(sweep.dims)
    following = np.searchsorted(sweep.dims[aligned], sweep.dims)
    inside = ~aligned & (following < aligned.sum())
    ratio = sweep.ns[inside] / sweep.ns[aligned][following[inside]]
    return {
        int(step): float(np.median(ratio[classes[inside] == step]))
        for step in np.unique(classes[inside])
        if (classes[inside] == step).sum() >= _EVIDENCE
    }


def _period(slowdown: Mapping[int, float]) -> int:
    """Twice the coarsest class that does not keep up."""
    return 2 * max((step for step, ratio in slowdown.items() if ratio > MUCH_SLOWER), default=0) or 1


def _rescue_of(sweep: Sweep) -> Ints:
    """For each point the index of the point that rescues it, -1 where it is not collapsed."""
    count = len(sweep)
    found = np.full(count, -1, dtype=np.int64)
    best = count - 1
    for index in range(count - 2, -1, -1):
        noise = max(NOISE_FLOOR * sweep.ns[index], float(np.hypot(sweep.iqr[index], sweep.iqr[best])))
        if sweep.ns[index] - sweep.ns[best] > noise:
            near = sweep.ns[index + 1 :] <= (1 + NOISE_FLOOR) * sweep.ns[best]
            found[index] = index + 1 + int(np.argmax(near))
        if sweep.ns[index] <= sweep.ns[best]:
            best = index
    return found


def _staircase(sweep: Sweep, kept: Ints) -> tuple[Ints, Ints]:
    """Jumps beyond the noise and beyond growth in proportion to the dim, between neighbours that are not collapsed."""
    left, right = kept[:-1], kept[1:]
    growth = sweep.ns[left] * (sweep.dims[right] / sweep.dims[left] - 1)
    noise = np.maximum(NOISE_FLOOR * sweep.ns[left], np.hypot(sweep.iqr[left], sweep.iqr[right]))
    jump = sweep.ns[right] - sweep.ns[left] - growth > noise
    return sweep.dims[left[jump]], sweep.dims[right[jump]]


def _much_slower(sweep: Sweep, dims: Ints, period: int) -> NDArray[np.bool_]:
    """Dims that are over 5 % slower than some larger measured multiple of the period (unknown latencies never are)."""
    latency, _ = interpolate(sweep, dims)
    aligned = sweep.dims % period == 0
    fastest_after = np.append(np.minimum.accumulate(sweep.ns[aligned][::-1])[::-1], np.inf)
    fastest = fastest_after[np.searchsorted(sweep.dims[aligned], dims, side="right")]
    slower: NDArray[np.bool_] = latency > TOLERATED * fastest
    return slower
