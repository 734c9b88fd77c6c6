"""Alignment classes of a sweep and their period, and the dims that are sound candidates."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from gac.core.arrays import COARSEST_CLASS, Bools, Ints, alignment_class
from gac.profiling.table import Profile, Sweep, interpolate

MUCH_SLOWER = 1.10  # an alignment class whose median slowdown is above this does not keep up with the aligned dims
TOLERATED = 1.05  # a dim may be this much slower than a larger one and still be offered as a candidate

CLASSES = (1, 2, 4, 8, 16, 32)
"""The alignment classes that have a coarser one, by the largest power of two that divides their dims."""

_LEAST_DIMS = 3


@dataclass(frozen=True)
class ClassComparison:
    """One alignment class against the coarser dims that zero-padding would make of its dims."""

    step: int  # the class: the largest power of two that divides its dims
    against: int  # the coarser step, up to 64, whose next larger multiple helps the class most
    dims: int  # number of dims that were compared
    slowdown: float  # median of their latency over that of that multiple, between the quartiles ``low`` and ``high``
    low: float
    high: float

    @property
    def keeps_up(self) -> bool:
        return self.slowdown <= MUCH_SLOWER


def sound_dims(
    profile: Profile, operator: str, fixed: Sequence[Mapping[str, int]], axis: str, dims: Ints, dtype: str = "bf16"
) -> Bools:
    """Return the mask of dims that are sound candidates: aligned, and not collapsed for any of the workloads.

    A dim is aligned if it is a multiple of the operator's period. It is collapsed if, by measurement or
    interpolation, it is more than 5 % slower than some larger aligned dim that was measured. (Only aligned dims
    are compared: at one row, some misaligned dims are faster than any aligned one.) Where the profile lacks the
    shape, alignment alone decides. ``fixed`` has the operator's other axes, one mapping a workload.
    """
    dims = np.asarray(dims, dtype=np.int64)
    period = operator_period(profile, operator, dtype)
    sound: Bools = dims % period == 0
    for axes in fixed:
        sweep = profile.rows_of(operator, axes, axis, dtype)
        if len(sweep):
            latency, _ = interpolate(sweep, dims)
            aligned = sweep.dims % period == 0
            fastest_after = np.append(np.minimum.accumulate(sweep.ns[aligned][::-1])[::-1], np.inf)
            fastest = fastest_after[np.searchsorted(sweep.dims[aligned], dims, side="right")]
            sound &= latency <= TOLERATED * fastest
    return sound


@lru_cache(maxsize=64)
def operator_period(profile: Profile, operator: str, dtype: str = "bf16") -> int:
    """Return the period that most of an operator's sweeps agree on, among those where alignment matters; else 1."""
    periods = (period_of(compare_classes(sweep)) for sweep in profile.sweeps_of(operator, dtype))
    votes = Counter(period for period in periods if period > 1)
    return max(votes, key=lambda period: (votes[period], period), default=1)


def compare_classes(sweep: Sweep) -> tuple[ClassComparison, ...]:
    """Compare each alignment class finer than 64 with coarser dims, finest first; at least three dims of each.

    A class is compared with the multiples of each coarser step, since the work may grow more from a dim to the next
    multiple of 64 than alignment wins back, while the next multiple of 8 shows it.
    """
    by_class = (list(_comparisons(sweep, alignment_class(sweep.dims), step)) for step in CLASSES)
    return tuple(max(against, key=lambda other: other.slowdown) for against in by_class if against)


def _comparisons(sweep: Sweep, classes: Ints, step: int) -> Iterator[ClassComparison]:
    members = np.flatnonzero(classes == step)
    if len(members) < _LEAST_DIMS:
        return
    for against in (*CLASSES[CLASSES.index(step) + 1 :], COARSEST_CLASS):
        coarser = np.flatnonzero(classes >= against)
        following = np.searchsorted(sweep.dims[coarser], sweep.dims[members])
        count = int(np.searchsorted(following, len(coarser)))  # dims with a larger multiple
        if count >= _LEAST_DIMS:
            ratio = np.sort(sweep.ns[members[:count]] / sweep.ns[coarser[following[:count]]])
            positions = np.array((0.25, 0.5, 0.75)) * (count - 1)  # np.quantile takes ten times as long over few
            low, middle, high = np.interp(positions, np.arange(count), ratio).tolist()
            yield ClassComparison(step, against, count, middle, low, high)


def period_of(classes: Sequence[ClassComparison]) -> int:
    worst = max((comparison.step for comparison in classes if not comparison.keeps_up), default=0)
    if not worst:
        return 1
    return min((comparison.step for comparison in classes if comparison.step > worst), default=COARSEST_CLASS)
