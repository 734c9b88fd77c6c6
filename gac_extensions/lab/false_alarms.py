"""The A/A test: cliffs that are none, between two measurements of the same shapes."""

from dataclasses import dataclass, replace

import numpy as np

from gac.core.errors import ProfileError
from gac.profiling.operators import operation
from gac.profiling.records import Point
from gac.profiling.table import Profile, Sweep
from gac_extensions.lab.cliffs import find_cliffs

_LEAST_PAIRED = 8


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
