"""What the next dims would take on the GPU, from the profile that the plan names."""

from dataclasses import dataclass

import numpy as np

from gac.allocation.latencies import UNKNOWN, Timing
from gac.forms import form_named
from gac.plan import Plan, WeightChoice
from gac.profiling.table import Profile
from gac.reporting.report.words import duration
from gac.sites import Workload

_REACH = 256


@dataclass(frozen=True, eq=False)
class Neighbours:
    """Looks up dims beside the chosen ones; None of the profile: it is not at hand."""

    plan: Plan
    profile: Profile | None

    def sentences(self, weight: WeightChoice) -> tuple[str, ...]:
        """One a workload: latency at the dim, at the next dim, and at the next sound one; none for a dense weight."""
        form = form_named(weight.form)
        if form.axis(weight.weight) is None or weight.dim >= form.full(weight.weight):
            return ()
        if self.profile is None:
            return ("What the next dim takes is not told: the profile is not at hand.",)
        if self.plan.fused:
            return ("What the next dim takes is not told: its GEMM is shared with other weights.",)
        return self._told(weight, self.profile)

    def _told(self, weight: WeightChoice, profile: Profile) -> tuple[str, ...]:
        form, dim = form_named(weight.form), weight.dim
        workloads = tuple(Workload.parse(one.workload) for one in self.plan.workloads)
        timing = Timing(profile, workloads, "bf16")
        after = np.arange(dim + 1, min(form.full(weight.weight), dim + _REACH) + 1)
        sound = after[timing.sound(form, weight.weight, after, fused=False)]
        dims = [dim, dim + 1, *(int(found) for found in sound[:1] if found > dim + 1)]
        latency, _ = timing.of_weight(form, weight.weight, np.array(dims), fused=False)
        candidate = dims[-1] if len(sound) else None
        return tuple(
            _sentence(str(workload), dims, latency[:, at].tolist(), candidate) for at, workload in enumerate(workloads)
        )


def _sentence(workload: str, dims: list[int], latency: list[int], candidate: int | None) -> str:
    ours, following = latency[0], latency[1]
    said = f"On the GPU, {workload}: {dims[0]:,} takes {_known(ours)}; the next dim, {dims[1]:,}, {_known(following)}"
    if UNKNOWN not in (ours, following):
        said += f" ({following / ours:.2f}x)"
    if candidate is None:
        return f"{said}. No sound dim follows."
    if candidate == dims[1]:
        return f"{said}."
    return f"{said} and is not sound; the next sound one, {candidate:,}, {_known(latency[2])}."


def _known(ns: int) -> str:
    return "an unknown time" if ns == UNKNOWN else duration(ns)
