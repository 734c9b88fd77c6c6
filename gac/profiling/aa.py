"""The A/A test: how often a cliff would be reported between two measurements of one and the same shape."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gac.errors import ProfileError
from gac.profiling.cliffs import Noise
from gac.profiling.records import Measurement
from gac.profiling.table import Profile, Sweep
from gac.sites import Floats

_LEAST_DIMS = 8


@dataclass(frozen=True)
class AaReport:
    """What came of timing every dim of some sweeps as A and as B.

    Attributes:
        dims: how many were timed as both.
        false_cliffs: in how many of them A and B differ by more than the noise that a cliff has to exceed.
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


def aa_report(profile: Profile) -> AaReport:
    """Compare A, the passes of even number, with B, those of odd number, which were taken in between.

    In every sweep of at least eight dims, each dim as A is judged beside itself as B with the noise that
    ``gac.profiling.cliffs.find_cliffs`` finds in such a sweep.

    Raises:
        ProfileError: no sweep was timed an even number of times.
    """
    sweeps = [rows for sweep in profile.sweeps(_LEAST_DIMS) if len(rows := _paired(profile, sweep)) >= _LEAST_DIMS]
    if not sweeps:
        raise ProfileError(
            f"profile {profile.path.stem} has no sweep that was timed an even number of times",
            "at least two passes",
            "Measure with gac profile --aa.",
        )
    false, differences = zip(*(_compare(rows) for rows in sweeps), strict=True)
    every = np.concatenate(differences)
    return AaReport(len(every), sum(false), float(np.median(every)), float(every.max()))


def _paired(profile: Profile, sweep: Sweep) -> list[Measurement]:
    """The rows of a sweep that have as many passes for A as for B."""
    axes = [dict(sweep.fixed) | {sweep.axis: int(dim)} for dim in sweep.dims]
    rows = (profile.measured(sweep.operator, one, sweep.dtype, sweep.cache) for one in axes)
    return [row for row in rows if row is not None and row.passes and len(row.passes) % 2 == 0]


def _compare(rows: Sequence[Measurement]) -> tuple[int, Floats]:
    """False cliffs in one sweep, and by how much A and B differ at each dim."""
    a, b = ([row.with_passes(row.passes[side::2]) for row in rows] for side in (0, 1))
    ns = np.array([row.median_ns for row in (*a, *b)], dtype=np.float64)
    spread = np.array([row.spread_ns for row in (*a, *b)])
    one, other = np.arange(len(rows)), np.arange(len(rows), 2 * len(rows))
    noise = Noise.among(ns, spread, len(rows)).between(one, other)
    return int((np.abs(ns[one] - ns[other]) > noise).sum()), np.abs(ns[one] / ns[other] - 1)
