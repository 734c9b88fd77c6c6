"""What a profile holds about one dim: latency, kernels, whether it is collapsed, the cost of misalignment."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from gac.core.arrays import COARSEST_CLASS
from gac.lab.mechanisms.causes import cause_between, operation_at
from gac.lab.mechanisms.explanation import Collapse, Cost
from gac.lab.mechanisms.runs import Run, runs_of
from gac.profiling.cliffs import Cliffs, find_cliffs
from gac.profiling.records import Header, Launch
from gac.profiling.table import Profile, Sweep


@dataclass(frozen=True)
class Recorded:
    """One sweep of a profile, seen from one of its dims (which the sweep need not have); empty without a profile."""

    header: Header | None
    sweep: Sweep
    dim: int

    @classmethod
    def of(
        cls, profile: Profile | None, operator: str, axis: str, dtype: str, dim: int, fixed: Mapping[str, int] | None
    ) -> "Recorded":
        """The sweep with these other axes, by default those of ``_fullest``; empty where the profile has none."""
        others, none = fixed, np.array([])
        if profile is not None and fixed is None:
            others = _fullest(profile, operator, axis, dtype, dim)
        if profile is not None and others is not None and len(sweep := profile.rows_of(operator, others, axis, dtype)):
            return cls(profile.header, sweep, dim)
        asked = tuple((fixed or {}).items())
        return cls(None, Sweep(operator, dtype, "cold", axis, asked, none.astype(np.int64), none, none, ()), dim)

    @cached_property
    def place(self) -> int | None:
        """Where the dim is in the sweep."""
        place = int(self.sweep.dims.searchsorted(self.dim))
        return place if place < len(self.sweep) and self.sweep.dims[place] == self.dim else None

    @cached_property
    def cliffs(self) -> Cliffs:
        return find_cliffs(self.sweep)

    @property
    def latency_ns(self) -> float | None:
        return None if self.place is None else float(self.sweep.ns[self.place])

    def launches(self, dim: int) -> tuple[Launch, ...]:
        """What was recorded at a dim of the sweep; empty where nothing was."""
        return self._launches.get(dim, ())

    @cached_property
    def _launches(self) -> dict[int, tuple[Launch, ...]]:
        return dict(zip(self.sweep.dims.tolist(), self.sweep.launches, strict=True))

    @property
    def ran(self) -> tuple[Run, ...]:
        """The kernels at the dim, with the waves in which the SMs work off their tiles."""
        if self.header is None:
            return ()
        return runs_of(self.launches(self.dim), operation_at(self.sweep, self.dim), self.header)

    @cached_property
    def collapse(self) -> Collapse | None:
        """Which larger dim is faster, by how much and why; None where none is."""
        found = self.cliffs.collapsed.tolist()
        if self.header is None or self.dim not in found:
            return None
        at = found.index(self.dim)
        rescue = int(self.cliffs.rescue[at])
        cause = cause_between(self.sweep, self.dim, rescue, self.header)
        return Collapse(rescue, float(self.cliffs.slowdown[at]), cause)

    def cost(self, sound: Callable[[int], bool], reach: int) -> Cost | None:
        """This dim against the nearest larger measured one that is sound; else its alignment class; else None.

        Dims that are ``reach`` or more larger do not count.
        """
        dims = enumerate(self.sweep.dims.tolist())
        after = (place for place, dim in dims if self.dim < dim < self.dim + reach and sound(dim))
        against = next(after, None)
        if self.place is None or against is None:
            return self._class_cost()
        slowdown, other = float(self.sweep.ns[self.place] / self.sweep.ns[against]), int(self.sweep.dims[against])
        return Cost("measured", f"{slowdown:.2f}x the latency of {other} ({self.sweep.label})", slowdown, other)

    def _class_cost(self) -> Cost | None:
        step = min(self.dim & -self.dim, COARSEST_CLASS)
        median = self.cliffs.class_slowdown.get(step)
        if median is None:
            return None
        kind = "odd dims" if step == 1 else f"odd multiples of {step}"
        words = f"{median:.2f}x, the median of the {kind} over the aligned dims they pad to ({self.sweep.label})"
        return Cost("alignment class", words, float(median))


def _fullest(profile: Profile, operator: str, axis: str, dtype: str, dim: int) -> dict[str, int] | None:
    """The other axes of the sweep with most dims, preferably one that has this dim; of equals, the largest sizes."""
    counts: Counter[tuple[tuple[str, int], ...]] = Counter()
    here = set()
    for row in profile.measurements:
        if (row.operator, row.dtype, row.cache) == (operator, dtype, "cold") and row.error is None:
            others = tuple((name, size) for name, size in row.shape.items() if name != axis)
            counts[others] += 1
            if row.shape[axis] == dim:
                here.add(others)
    best = max(counts, key=lambda one: (one in here, counts[one], prod(size for _, size in one)), default=None)
    return None if best is None else dict(best)
