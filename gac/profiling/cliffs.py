"""Cliffs in a sweep: collapsed dims, staircases, sweet spots, alignment periods."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from gac.core.arguments import checked
from gac.core.arrays import COARSEST_CLASS, Bools, Floats, Ints, alignment_class, class_name
from gac.core.display import Row, Shown, Table
from gac.profiling.table import Profile, Sweep, interpolate

NOISE_FLOOR = 0.06
"""Two latencies closer than this are the same, however small their spread: many kernels on an H100 have two latencies
that lie as far apart, and keep to one of them for as long as a timing lasts."""

FALSE_ALARMS = 0.001  # probability that noise alone makes a dim look collapsed, over all dims that it is compared with
RECOVERED = 0.9  # a larger dim rescues a collapsed one if it wins back this share of the gain of the fastest larger one
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


@dataclass(frozen=True, eq=False, repr=False)
class Cliffs(Shown):
    """The cliffs along one sweep.

    Attributes:
        collapsed: dims such that some larger dim is faster by more than the noise.
        rescue: for each of them, the smallest faster dim that wins back nine tenths of what the fastest one would.
        slowdown: for each of them, its latency over that of its rescue.
        sweet_spots: among the other dims, the last before a jump of the latency per unit of dim.
        edges, jumps: for each sweet spot, the first dim after the jump, and the latency there over its own.
        period: the smallest power of two up to 64 whose multiples keep up; 1 where alignment does not matter.
        classes: the evidence for the period: each alignment class with at least three dims to compare.
        noise: the smallest relative difference that is told from noise.
    """

    collapsed: Ints
    rescue: Ints
    slowdown: Floats
    sweet_spots: Ints
    edges: Ints
    jumps: Floats
    period: int
    classes: tuple[ClassComparison, ...]
    noise: float

    def tables(self) -> Sequence[Table | str]:
        columns = [("alignment class", "<"), ("dims", ">"), ("slowdown", ">"), ("padded to", ">"), ("keeps up", "<")]
        rows = []
        for kind in self.classes:
            numbers = f"{kind.dims:,}", f"{kind.slowdown:.2f}x", f"multiples of {kind.against}"
            rows.append((class_name(kind.step), *numbers, "yes" if kind.keeps_up else "no"))
        worst = ""
        if len(self.collapsed):
            i = int(self.slowdown.argmax())
            worst = f", the worst {self.collapsed[i]} ({self.slowdown[i]:.2f}x the latency of {self.rescue[i]})"
        notes = (
            f"{len(self.collapsed):,} collapsed dims{worst}; {len(self.sweet_spots):,} sweet spots\n"
            f"period {self.period}; differences under {self.noise:.1%} are noise"
        )
        return [Table(columns, rows, notes=notes)]

    def rows(self) -> Sequence[Row]:
        kinds = {
            "collapsed": (self.collapsed, self.rescue, self.slowdown),
            "sweet spot": (self.sweet_spots, self.edges, self.jumps),
        }
        rows = [
            {"dim": dim, "is": kind, "beside": other, "times": times}
            for kind, columns in kinds.items()
            for dim, other, times in zip(*(column.tolist() for column in columns), strict=True)
        ]
        return sorted(rows, key=lambda row: (row["dim"], row["is"]))

    @property
    def class_slowdown(self) -> Mapping[int, float]:
        return {comparison.step: comparison.slowdown for comparison in self.classes}


@checked
def find_cliffs(sweep: Sweep) -> Cliffs:
    """Find collapsed dims, staircase edges and the alignment period of one sweep.

    The noise between two points is the largest of 6 % of the slower one; what the sweep's typical spread (the median
    over its points of IQR / latency) explains by chance among as many comparisons as the sweep has points; and, for
    collapsed dims, twice the two points' own interquartile ranges (of three passes that is their range), so that a
    point whose passes disagree proves nothing.
    """
    noise = _Noise(sweep)
    rescue = _rescues(sweep, noise.between)
    collapsed = rescue >= 0
    fast = rescue[collapsed]
    before, after = _staircase(sweep, noise)
    classes = compare_classes(sweep)
    return Cliffs(
        collapsed=sweep.dims[collapsed],
        rescue=sweep.dims[fast],
        slowdown=sweep.ns[collapsed] / sweep.ns[fast],
        sweet_spots=sweep.dims[before],
        edges=sweep.dims[after],
        jumps=sweep.ns[after] / sweep.ns[before],
        period=_period(classes),
        classes=classes,
        noise=max(NOISE_FLOOR, noise.chance * 2**0.5),
    )


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
    periods = (_period(compare_classes(sweep)) for sweep in profile.sweeps_of(operator, dtype))
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


def _period(classes: Sequence[ClassComparison]) -> int:
    worst = max((comparison.step for comparison in classes if not comparison.keeps_up), default=0)
    if not worst:
        return 1
    return min((comparison.step for comparison in classes if comparison.step > worst), default=COARSEST_CLASS)


class _Noise:
    """Differences between two points of a sweep, which may be empty, that chance explains.

    ``chance`` is the relative error of a latency that so many comparisons make likely to be seen: the typical spread,
    times the normal quantile for ``FALSE_ALARMS`` shared among them (Bonferroni). The IQR of three passes is a little
    more than the standard error of their median.
    """

    def __init__(self, sweep: Sweep) -> None:
        spread = float(np.median(sweep.iqr / sweep.ns)) if len(sweep) else 0.0
        self.ns, self.iqr = sweep.ns, sweep.iqr
        self.chance = spread * NormalDist().inv_cdf(1 - FALSE_ALARMS / max(len(sweep), 1))

    def typical(self, first: Ints | int, second: Ints | int) -> Floats:
        floor = NOISE_FLOOR * np.maximum(self.ns[first], self.ns[second])
        noise: Floats = np.maximum(floor, self.chance * np.hypot(self.ns[first], self.ns[second]))
        return noise

    def between(self, first: Ints | int, second: Ints | int) -> Floats:
        noise: Floats = np.maximum(self.typical(first, second), 2 * np.hypot(self.iqr[first], self.iqr[second]))
        return noise


def _rescues(sweep: Sweep, noise: Callable[[int, Ints], Floats]) -> Ints:
    rescue = np.full(len(sweep), -1, dtype=np.int64)
    for index in range(len(sweep) - 1):
        larger = np.arange(index + 1, len(sweep))
        gain = sweep.ns[index] - sweep.ns[larger]
        faster = gain > noise(index, larger)
        if faster.any():
            rescue[index] = larger[np.argmax(faster & (gain >= RECOVERED * gain[faster].max()))]
    return rescue


def _staircase(sweep: Sweep, noise: _Noise) -> tuple[Ints, Ints]:
    """Return the indices before and after each jump beyond the noise and beyond growth in proportion to the dim.

    The treads are the points that no larger dim beats by the typical noise: a burst of noise in one pass widens a
    point's own spread and leaves its median right.
    """
    treads = np.flatnonzero(_rescues(sweep, noise.typical) < 0)
    before, after = treads[:-1], treads[1:]
    growth = sweep.ns[before] * (sweep.dims[after] / sweep.dims[before] - 1)
    jump = sweep.ns[after] - sweep.ns[before] - growth > noise.typical(before, after)
    return before[jump], after[jump]
