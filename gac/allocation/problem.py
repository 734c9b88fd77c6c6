"""What there is to decide, and the decision: from measured curves and a latency table to the plan that loses least."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from gac.allocation.assemble import Provenance, assemble
from gac.allocation.candidates import candidates, dense_candidate
from gac.allocation.choose import budget_limit, choose, latency_limits
from gac.plan import Plan
from gac.profiling.table import Profile
from gac.sites import CandidateSet, Site, SiteCurves, Workload


@dataclass(frozen=True, eq=False)
class Problem:
    """The sites of a model, what their dims lose, and what they take on a GPU.

    Attributes:
        sites: in model order.
        curves: the loss curves of each site, in the same order.
        forms: which forms besides dense.
        profile: the latency table.
        workloads: what latency is looked up for.
        align: only dims that the profile shows to be sound.
    """

    sites: Sequence[Site]
    curves: Sequence[SiteCurves]
    forms: tuple[str, ...]
    profile: Profile
    workloads: tuple[Workload, ...]
    align: bool

    @property
    def params(self) -> int:
        """Parameters of the dense sites together."""
        return sum(site.params for site in self.sites)

    @cached_property
    def dense(self) -> list[CandidateSet]:
        """Every site as it is."""
        return [dense_candidate(site, profile=self.profile, workloads=self.workloads) for site in self.sites]

    @cached_property
    def by_params(self) -> list[CandidateSet]:
        """The candidates of each site that matter where parameters alone are limited."""
        return self._candidates(keep_latency=False)

    @cached_property
    def by_params_and_latency(self) -> list[CandidateSet]:
        """The candidates of each site that matter where latency is limited too."""
        return self._candidates(keep_latency=True)

    def _candidates(self, keep_latency: bool) -> list[CandidateSet]:
        return [
            candidates(
                site,
                curves,
                forms=self.forms,
                profile=self.profile,
                workloads=self.workloads,
                align=self.align,
                keep_latency=keep_latency,
            )
            for site, curves in zip(self.sites, self.curves, strict=True)
        ]


def decide(problem: Problem, budget: float, latency: Mapping[str, float], made_from: Provenance) -> Plan:
    """The plan that loses least within the budget and the latency limits, with its certificate.

    Args:
        budget: kept fraction of the sites' parameters.
        latency: allowed fraction of the dense latency, by ``str(workload)``.

    Raises:
        BudgetError: a limit cannot be met, or is no number.
        ProfileError: a latency is limited, and the profile lacks it.
    """
    limit = budget_limit(budget, problem.params)
    limits = latency_limits(problem.dense, problem.workloads, latency)
    sets = problem.by_params_and_latency if latency else problem.by_params
    rows, certificate = choose(problem.sites, sets, limit, limits)
    chosen = [candidate_set.row(row) for candidate_set, row in zip(sets, rows, strict=True)]
    return assemble(
        problem.sites, chosen, problem.dense, budget, limit, problem.workloads, latency, certificate, made_from
    )
