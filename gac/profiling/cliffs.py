"""Cliffs in a sweep: collapsed dims, staircases, sweet spots, and the alignment that avoids them."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from gac.core.arguments import checked
from gac.core.arrays import Floats, Ints
from gac.core.display import Row, Shown, Table
from gac.profiling.alignment import COARSEST_CLASS, alignment_class, class_name
from gac.profiling.table import Profile, Sweep, interpolate

NOISE_FLOOR = 0.06
"""Two latencies closer than this are the same, however small their spread: many kernels on an H100 have two latencies
that lie as far apart, and keep to one of them for as long as a timing lasts."""

FALSE_ALARMS = 0.001
"""How often noise alone may make a dim look collapsed, over all the dims that it is compared with."""

RECOVERED = 0.9
"""A larger dim rescues a collapsed one if it wins back this share of what the fastest larger one would."""

MUCH_SLOWER = 1.10
"""An alignment class whose median slowdown is above this does not keep up with the aligned dims."""

TOLERATED = 1.05
"""A dim may be this much slower than a larger one and still be offered as a candidate."""

CLASSES = (1, 2, 4, 8, 16, 32)
"""The alignment classes that have a coarser one, by the largest power of two that divides their dims."""

_LEAST_DIMS = 3


@dataclass(frozen=True)
class ClassComparison:
    """How one alignment class keeps up: its dims against the coarser dims that zero-padding would make of them.

    Attributes:
        step: the class: the largest power of two that divides its dims.
        against: the coarser step, up to 64, whose next larger multiple helps the class most.
        dims: how many dims of the class were compared.
        slowdown: the median of their latency over that of the next larger multiple of ``against``.
        low, high: the quartiles around that median.
    """

    step: int
    against: int
    dims: int
    slowdown: float
    low: float
    high: float

    @property
    def keeps_up(self) -> bool:
        """At least half of the dims are at most 10 % slower than the multiple they would be padded to."""
        return self.slowdown <= MUCH_SLOWER


@dataclass(frozen=True, eq=False, repr=False)
class Cliffs(Shown):
    """The cliffs along one sweep.

    Attributes:
        collapsed: dims such that some larger dim is faster by more than the noise.
        rescue: for each of them, the smallest faster dim that wins back nine tenths of what the fastest one would.
        slowdown: for each of them, its latency over that of its rescue.
        sweet_spots: among the other dims, the last before a jump of the latency per unit of dim.
        edges: for each sweet spot, the first dim after the jump.
        jumps: for each sweet spot, the latency at the edge over its own.
        period: the smallest power of two (up to 64) whose multiples were seen to keep up; 1 where alignment does not
            matter.
        classes: what the period rests on: one entry for each alignment class with at least three dims to compare.
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
        for each in self.classes:
            numbers = f"{each.dims:,}", f"{each.slowdown:.2f}x", f"multiples of {each.against}"
            rows.append((class_name(each.step), *numbers, "yes" if each.keeps_up else "no"))
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
        """The median slowdown of each alignment class."""
        return {one.step: one.slowdown for one in self.classes}


@checked
def find_cliffs(sweep: Sweep) -> Cliffs:
    """Collapsed dims, staircase edges and alignment period of one sweep.

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
    periods = (_period(compare_classes(sweep)) for sweep in profile.sweeps_of(operator, dtype))
    votes = Counter(period for period in periods if period > 1)
    return max(votes, key=lambda period: (votes[period], period), default=1)


def compare_classes(sweep: Sweep) -> tuple[ClassComparison, ...]:
    """How each alignment class finer than 64 keeps up, finest first.

    A class is compared with the multiples of each coarser step, since the work may grow more from a dim to the next
    multiple of 64 than alignment wins back, while the next multiple of 8 shows it. Comparisons with fewer than three
    dims are left out.
    """
    classes = alignment_class(sweep.dims)
    compared = (max(_comparisons(sweep, classes, step), key=lambda one: one.slowdown, default=None) for step in CLASSES)
    return tuple(one for one in compared if one is not None)


def _comparisons(sweep: Sweep, classes: Ints, step: int) -> Iterator[ClassComparison]:
    """The dims of one class over the next larger multiple of each coarser step."""
    ours = np.flatnonzero(classes == step)
    if len(ours) < _LEAST_DIMS:
        return
    for against in (*CLASSES[CLASSES.index(step) + 1 :], COARSEST_CLASS):
        coarser = np.flatnonzero(classes >= against)
        following = np.searchsorted(sweep.dims[coarser], sweep.dims[ours])
        count = int(np.searchsorted(following, len(coarser)))  # of those with a multiple behind them
        if count >= _LEAST_DIMS:
            ratio = np.sort(sweep.ns[ours[:count]] / sweep.ns[coarser[following[:count]]])
            low, middle, high = (_quantile(ratio, part) for part in (0.25, 0.5, 0.75))
            yield ClassComparison(step, against, count, middle, low, high)


def _quantile(ordered: Floats, part: float) -> float:
    """As ``np.quantile`` of ordered numbers, which takes ten times as long over few."""
    at = part * (len(ordered) - 1)
    before = int(at)
    below, above = ordered[before], ordered[min(before + 1, len(ordered) - 1)]
    return float(below + (above - below) * (at - before))


def _period(classes: Sequence[ClassComparison]) -> int:
    """The finest class that keeps up and is coarser than every class that does not; 64 where there is none."""
    worst = max((one.step for one in classes if not one.keeps_up), default=0)
    if not worst:
        return 1
    return min((one.step for one in classes if one.step > worst), default=COARSEST_CLASS)


class _Noise:
    """How far apart two points of a sweep, which may be empty, may be by chance; ``one`` and ``other`` are indices.

    ``chance`` is the relative error of a latency that so many comparisons make likely to be seen: the typical spread,
    times the normal quantile for ``FALSE_ALARMS`` shared among them (Bonferroni). The IQR of three passes is a little
    more than the standard error of their median.
    """

    def __init__(self, sweep: Sweep) -> None:
        spread = float(np.median(sweep.iqr / sweep.ns)) if len(sweep) else 0.0
        self.ns, self.iqr = sweep.ns, sweep.iqr
        self.chance = spread * NormalDist().inv_cdf(1 - FALSE_ALARMS / max(len(sweep), 1))

    def typical(self, one: Ints | int, other: Ints | int) -> Floats:
        """From the spread of the whole sweep."""
        floor = NOISE_FLOOR * np.maximum(self.ns[one], self.ns[other])
        noise: Floats = np.maximum(floor, self.chance * np.hypot(self.ns[one], self.ns[other]))
        return noise

    def between(self, one: Ints | int, other: Ints | int) -> Floats:
        """From that and from the two points' own spread."""
        noise: Floats = np.maximum(self.typical(one, other), 2 * np.hypot(self.iqr[one], self.iqr[other]))
        return noise


def _rescues(sweep: Sweep, noise: Callable[[int, Ints], Floats]) -> Ints:
    """For each point the index of the point that rescues it, -1 where it is not collapsed."""
    found = np.full(len(sweep), -1, dtype=np.int64)
    for index in range(len(sweep) - 1):
        larger = np.arange(index + 1, len(sweep))
        won = sweep.ns[index] - sweep.ns[larger]
        beaten = won > noise(index, larger)
        if beaten.any():
            enough = beaten & (won >= RECOVERED * won[beaten].max())
            found[index] = larger[np.argmax(enough)]
    return found


def _staircase(sweep: Sweep, noise: _Noise) -> tuple[Ints, Ints]:
    """Indices before and after each jump beyond the noise and beyond growth in proportion to the dim.

    Everything is compared by the typical noise: a burst of noise in one pass widens a point's own spread and leaves
    its median right. The treads are the points that, so seen, no larger dim beats.
    """
    treads = np.flatnonzero(_rescues(sweep, noise.typical) < 0)
    left, right = treads[:-1], treads[1:]
    growth = sweep.ns[left] * (sweep.dims[right] / sweep.dims[left] - 1)
    jump = sweep.ns[right] - sweep.ns[left] - growth > noise.typical(left, right)
    return left[jump], right[jump]


def _much_slower(sweep: Sweep, dims: Ints, period: int) -> NDArray[np.bool_]:
    """Dims that are over 5 % slower than some larger measured multiple of the period (unknown latencies never are)."""
    latency, _ = interpolate(sweep, dims)
    aligned = sweep.dims % period == 0
    fastest_after = np.append(np.minimum.accumulate(sweep.ns[aligned][::-1])[::-1], np.inf)
    fastest = fastest_after[np.searchsorted(sweep.dims[aligned], dims, side="right")]
    slower: NDArray[np.bool_] = latency > TOLERATED * fastest
    return slower
