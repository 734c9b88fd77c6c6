"""Cliffs in a sweep: collapsed dims, staircases, sweet spots, alignment periods; and the A/A test of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from gac.core.arguments import checked
from gac.core.arrays import Floats, Ints, class_name
from gac.core.display import Row, Shown, Table
from gac.core.errors import ProfileError
from gac.profiling.cliffs import ClassComparison, compare_classes, period_of
from gac.profiling.operators import operation
from gac.profiling.records import Point
from gac.profiling.table import Profile, Sweep

NOISE_FLOOR = 0.06
"""Two latencies closer than this are the same, however small their spread: many kernels on an H100 have two latencies
that lie as far apart, and keep to one of them for as long as a timing lasts."""

FALSE_ALARMS = 0.001  # probability that noise alone makes a dim look collapsed, over all dims that it is compared with
RECOVERED = 0.9  # a larger dim rescues a collapsed one if it wins back this share of the gain of the fastest larger one

_LEAST_PAIRED = 8


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
        period=period_of(classes),
        classes=classes,
        noise=max(NOISE_FLOOR, noise.chance * 2**0.5),
    )


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


@dataclass(frozen=True)
class FalseAlarms:
    """The A/A test: cliffs between two measurements of one and the same shape.

    Of ``dims`` that were timed as A and as B, ``false_cliffs`` seem collapsed in a flat sweep whose only noise is the
    difference of A and B. Differences are those of ``|A / B - 1|``.
    """

    dims: int
    false_cliffs: int
    median_difference: float
    largest_difference: float

    @property
    def fraction(self) -> float:
        return self.false_cliffs / self.dims

    def __str__(self) -> str:
        return (
            f"A/A: {self.false_cliffs:,} false cliffs in {self.dims:,} dims ({self.fraction:.2%}); "
            f"A and B differ by {self.median_difference:.2%} in the median, {self.largest_difference:.1%} at most"
        )


def count_false_alarms(profile: Profile) -> FalseAlarms:
    """Compare A, the passes of even number, with B, those of odd number; ProfileError where there are no such pairs.

    Every sweep of at least eight dims becomes a flat one, in which each dim takes ``(A / B) ** (1 / sqrt 2)``: nothing
    but noise, as much as one measurement has. All its cliffs are false.
    """
    sweeps = [flat for sweep in profile.sweeps(_LEAST_PAIRED) if (flat := _flat(profile, sweep)) is not None]
    if not sweeps:
        problem = f"profile {profile.path.stem} has no sweep that was timed an even number of times"
        raise ProfileError(problem, "at least two passes", "Measure with gac profile --aa.")
    difference = np.abs(np.concatenate([flat.ns for flat in sweeps]) ** 2**0.5 - 1)
    false = sum(len(find_cliffs(flat).collapsed) for flat in sweeps)
    return FalseAlarms(len(difference), false, float(np.median(difference)), float(difference.max()))


def _flat(profile: Profile, sweep: Sweep) -> Sweep | None:
    """Return the sweep as if every dim took the same; None where too few dims have as many passes for A as for B."""
    halves = {}
    for dim in sweep.dims.tolist():
        shape = operation(sweep.operator, **dict(sweep.fixed), **{sweep.axis: dim})
        row = profile.find(Point(shape, sweep.dtype, sweep.cache))
        if row is not None and row.passes and len(row.passes) % 2 == 0:
            a, b = (row.with_passes(row.passes[side::2]) for side in (0, 1))
            halves[dim] = (a.median_ns, b.median_ns, a.spread_ns, b.spread_ns)
    if len(halves) < _LEAST_PAIRED:
        return None
    a, b, spread_a, spread_b = np.array([*halves.values()]).T
    ns = (a / b) ** (1 / 2**0.5)
    spread = np.hypot(spread_a / a, spread_b / b) / 2**0.5
    dims = np.array([*halves], dtype=np.int64)
    return replace(sweep, dims=dims, ns=ns, iqr=spread * ns, launches=((),) * len(halves))
