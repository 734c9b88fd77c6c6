"""The A/A test: how often a cliff would be reported between two measurements of one and the same shape."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gac.core.errors import ProfileError
from gac.profiling.cliffs import find_cliffs
from gac.profiling.operators import operation
from gac.profiling.records import Measurement, Point
from gac.profiling.table import Profile, Sweep

_LEAST_DIMS = 8
_ROOT = 2**0.5  # a ratio of two measurements has this many times the noise of one


@dataclass(frozen=True)
class FalseAlarms:
    """The result of timing every dim of some sweeps as A and as B.

    Attributes:
        dims: how many were timed as both.
        false_cliffs: how many of them seem collapsed in a flat sweep whose only noise is the difference of A and B.
        median_difference: median of ``|A / B - 1|``.
        largest_difference: the largest of them.
    """

    dims: int
    false_cliffs: int
    median_difference: float
    largest_difference: float

    @property
    def fraction(self) -> float:
        """False cliffs a dim."""
        return self.false_cliffs / self.dims

    def __str__(self) -> str:
        return (
            f"A/A: {self.false_cliffs:,} false cliffs in {self.dims:,} dims ({self.fraction:.2%}); "
            f"A and B differ by {self.median_difference:.2%} in the median, {self.largest_difference:.1%} at most"
        )


def count_false_alarms(profile: Profile) -> FalseAlarms:
    """Compare A, the passes of even number, with B, those of odd number, which were taken in between.

    Of every sweep of at least eight dims a flat one is made, in which each dim takes ``(A / B) ** (1 / sqrt 2)``:
    nothing but noise, as much as one measurement has. Whatever ``find_cliffs`` finds there is false.

    Raises:
        ProfileError: no sweep was timed an even number of times.
    """
    paired = ((sweep, _paired(profile, sweep)) for sweep in profile.sweeps(_LEAST_DIMS))
    sweeps = [_flat(sweep, rows) for sweep, rows in paired if len(rows) >= _LEAST_DIMS]
    if not sweeps:
        raise ProfileError(
            f"profile {profile.path.stem} has no sweep that was timed an even number of times",
            "at least two passes",
            "Measure with gac profile --aa.",
        )
    every = np.concatenate([np.abs(flat.ns**_ROOT - 1) for flat in sweeps])
    false = sum(len(find_cliffs(flat).collapsed) for flat in sweeps)
    return FalseAlarms(len(every), false, float(np.median(every)), float(every.max()))


def _paired(profile: Profile, sweep: Sweep) -> list[Measurement]:
    """The rows of a sweep that have as many passes for A as for B."""
    shapes = (operation(sweep.operator, **dict(sweep.fixed), **{sweep.axis: int(dim)}) for dim in sweep.dims)
    rows = (profile.find(Point(shape, sweep.dtype, sweep.cache)) for shape in shapes)
    return [row for row in rows if row is not None and row.passes and len(row.passes) % 2 == 0]


def _flat(sweep: Sweep, rows: Sequence[Measurement]) -> Sweep:
    """The sweep as it would look if every dim took the same: around 1, with the noise of one measurement."""
    halves = ([row.with_passes(row.passes[side::2]) for side in (0, 1)] for row in rows)
    (a, b), (of_a, of_b) = np.array([[(half.median_ns, half.spread_ns) for half in pair] for pair in halves]).T
    ns = (a / b) ** (1 / _ROOT)
    spread = np.hypot(of_a / a, of_b / b) / _ROOT
    dims = np.array([row.shape[sweep.axis] for row in rows], dtype=np.int64)
    return replace(sweep, dims=dims, ns=ns, iqr=spread * ns, launches=((),) * len(rows))
