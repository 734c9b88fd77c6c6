"""What the next dims would take on the GPU, from the profile that the plan names."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

import numpy as np

from gac.allocation.candidates import step_of
from gac.allocation.latencies import UNKNOWN, Timing
from gac.forms import form_named
from gac.plan import Plan, WeightChoice
from gac.profiling.cliffs import operator_period
from gac.profiling.table import Profile
from gac.reporting.report.formatting import duration
from gac.workloads import Workload

_REACH = 256


@dataclass(frozen=True, eq=False)
class NextDims:
    """Looks up dims beside the chosen ones; None of the profile: it is not at hand."""

    plan: Plan
    profile: Profile | None

    def sentences(self, weight: WeightChoice, *, shared: bool) -> tuple[str, ...]:
        """One a workload: latency at the dim, at the next dim, and at the next sound one; none for a dense weight.

        Args:
            shared: weights of its site run their first GEMMs as one.
        """
        form = form_named(weight.form)
        if form.axis(weight.weight) is None or weight.dim >= form.full(weight.weight):
            return ()
        if self.profile is None:
            return ("What the next dim takes is not told: the profile is not at hand.",)
        if shared:
            return ("What the next dim takes is not told: weights of this site share a GEMM.",)
        return self._told(weight, self.profile)

    def _told(self, weight: WeightChoice, profile: Profile) -> tuple[str, ...]:
        form, dim = form_named(weight.form), weight.dim
        workloads = tuple(Workload.parse(one.workload) for one in self.plan.workloads)
        timing = Timing(profile, workloads, self.plan.recipe.deployment.triton)
        after = np.arange(dim + 1, min(form.full(weight.weight), dim + _REACH) + 1)
        sound = after[timing.sound(form, weight.weight, after, fused=False)].tolist()
        dims = [dim, dim + 1, *sound[:1]]
        latency, _ = timing.of_weight(form, weight.weight, np.array(dims))
        broken = self._broken(weight, profile, dim + 1, sound)
        return tuple(
            _sentence(str(workload), list(zip(dims, latency[:, at].tolist(), strict=True)), broken)
            for at, workload in enumerate(workloads)
        )

    def _broken(self, weight: WeightChoice, profile: Profile, following: int, sound: Sequence[int]) -> str:
        """What keeps the following dim from being sound; nothing where it is."""
        if following in sound[:1]:
            return ""
        form = form_named(weight.form)
        period = operator_period(profile, form.operation(weight.weight, 1, 1).operator)
        step = lcm(step_of(form, self.plan.recipe.space.align), period)
        return f"no multiple of {step}" if following % step else "a larger dim is faster"


def _sentence(workload: str, known: Sequence[tuple[int, int]], broken: str) -> str:
    """``known``: dim and ns of the chosen dim, of the next one, and of the next sound one where there is one."""
    (dim, ours), (following, theirs), *sound = known
    if all(ns == UNKNOWN for _, ns in known):
        return f"On the GPU, {workload}: the latency table holds no time of {dim:,} or of the next dims."
    said = f"On the GPU, {workload}: {dim:,} takes {_time(ours)}; the next dim, {following:,}, {_time(theirs)}"
    notes = [f"{theirs / ours:.2f}x"] if UNKNOWN not in (ours, theirs) else []
    notes += [broken] if broken else []
    said += f" ({', '.join(notes)})" if notes else ""
    if broken:
        said += "".join(f"; the next sound one, {one:,}, {_time(ns)}" for one, ns in sound) or "; no sound one follows"
    return f"{said}."


def _time(ns: int) -> str:
    return "an unknown time" if ns == UNKNOWN else duration(ns)
