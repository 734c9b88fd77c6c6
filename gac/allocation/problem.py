"""What there is to decide, and the decision: from measured curves and a latency table to the plan that loses least."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from gac.allocation.alternatives import nearest
from gac.allocation.assemble import Provenance, assemble
from gac.allocation.candidates import CandidateSet, candidates, dense_candidate
from gac.allocation.costs import KV_NUMBERS, PARAMS, ns_of
from gac.allocation.knapsack import Group, Solution, knapsack
from gac.allocation.latencies import UNKNOWN, Timing
from gac.allocation.limits import budget_limit, cache_limit, latency_limits
from gac.arrays import Floats
from gac.curves import LossCurves
from gac.models.sites import Site
from gac.plan import Alternative, Plan
from gac.profiling.table import Profile
from gac.workloads import Workload


@dataclass(frozen=True, eq=False)
class Problem:
    """The sites of a model, what their dims lose, and what they take on a GPU.

    Attributes:
        sites: in model order.
        curves: of the model.
        forms: which forms besides dense.
        profile: the latency table.
        workloads: what latency is looked up for.
        align: only dims that the profile shows to be sound, and of those the multiples of the number that is given.
        one_row: whether GEMMs of one row run in Triton, those of dense weights too; the dense model's do not.
        measured: what the rule reads of the model besides the curves, by weight name.
    """

    sites: Sequence[Site]
    curves: LossCurves
    forms: tuple[str, ...]
    profile: Profile
    workloads: tuple[Workload, ...]
    align: bool | int
    measured: Mapping[str, Floats] = field(default_factory=dict)
    one_row: bool = False

    @property
    def params(self) -> int:
        """Parameters of the dense sites together."""
        return sum(site.params for site in self.sites)

    @property
    def timing(self) -> Timing:
        """Where latencies come from, as for the candidates."""
        return Timing(self.profile, self.workloads, self.one_row)

    def column(self, workload: str) -> int:
        """Where the latencies of one of the workloads stand."""
        return list(map(str, self.workloads)).index(workload)

    @cached_property
    def dense(self) -> list[CandidateSet]:
        """Every site as it is."""
        return [dense_candidate(site, profile=self.profile, workloads=self.workloads) for site in self.sites]

    @cached_property
    def by_params(self) -> list[CandidateSet]:
        """The candidates of each site that matter where parameters alone are limited."""
        return self.candidates((PARAMS,))

    def candidates(self, limited: Sequence[str]) -> list[CandidateSet]:
        """The candidates of each site that matter where these cost columns are limited."""
        return [
            candidates(
                site,
                self.curves,
                forms=self.forms,
                profile=self.profile,
                workloads=self.workloads,
                align=self.align,
                limited=limited,
                one_row=self.one_row,
            )
            for site in self.sites
        ]


@dataclass(frozen=True, eq=False)
class Instance:
    """Candidates as a knapsack.

    Attributes:
        sets: for each site the candidates whose latency is known wherever it is limited.
        groups: the same, with what they cost under each limit.
        limits: parameters first, then ns for each limited workload, then numbers a token in the KV cache.
        names: what an error calls the limits.
    """

    sets: tuple[CandidateSet, ...]
    groups: tuple[Group, ...]
    limits: tuple[int, ...]
    names: tuple[str, ...]

    def solve(self) -> Solution:
        """The choice that loses least, with its proof.

        Raises:
            BudgetError: the limits cannot be met; says what can be.
        """
        return knapsack(self.groups, self.limits, names=self.names)

    def chosen(self, solution: Solution) -> list[CandidateSet]:
        """The chosen row of each site."""
        return [rows.row(item) for rows, item in zip(self.sets, solution.choice, strict=True)]

    def alternatives(self, solution: Solution) -> list[tuple[Alternative, ...]]:
        """For each site the candidates that come nearest to the chosen one."""
        prices = solution.certificate.multipliers
        items = zip(self.sets, solution.choice, self.groups, strict=True)
        return [nearest(rows, item, group.costs, prices) for rows, item, group in items]


@dataclass(frozen=True, eq=False)
class Decision:
    """A plan, and the instance whose exact solution made it or bounds it."""

    plan: Plan
    instance: Instance
    solution: Solution


def pose(
    sets: Sequence[CandidateSet], params: int, latency: Mapping[Workload, int | None], cached: int | None = None
) -> Instance:
    """The knapsack of these candidates.

    Args:
        params: most parameters of all sites together.
        latency: from ``latency_limits`` (every site then has a candidate of known latency, the dense one); empty where
            latency is not limited.
        cached: most numbers a token in the KV cache of all sites; None where it is not limited.
    """
    limited = {column: workload for column, workload in enumerate(latency) if latency[workload] is not None}
    columns = list(limited)
    known = tuple(rows.at((rows.latency[:, columns] != UNKNOWN).all(axis=1)) for rows in sets)
    caches = [] if cached is None else [cached]
    groups = tuple(
        Group(
            rows.site,
            rows.loss,
            np.column_stack([rows.params, rows.latency[:, columns], *([rows.cost(KV_NUMBERS)] if caches else [])]),
        )
        for rows in known
    )
    limits = (params, *(ns for ns in latency.values() if ns is not None), *caches)
    names = ("the parameter limit", *(f"the latency limit in ns for {workload}" for workload in limited.values()))
    names += ("the KV-cache limit in numbers a token",) * len(caches)
    return Instance(known, groups, limits, names)


def decide(
    problem: Problem,
    budget: float,
    latency: Mapping[str, float],
    made_from: Provenance,
    kv_cache: float | None = None,
) -> Decision:
    """The plan that loses least within the budget and the other limits, with its certificate.

    Args:
        budget: kept fraction of the sites' parameters.
        latency: allowed fraction of the dense latency, by ``str(workload)``.
        kv_cache: allowed fraction of what the dense model's KV cache keeps of a token; None: not limited.

    Raises:
        BudgetError: a limit cannot be met, or is no number.
        ProfileError: a latency is limited, and the profile lacks it.
    """
    limit = budget_limit(budget, problem.params)
    limits = latency_limits(problem.dense, problem.workloads, latency)
    columns = tuple(column for column, ns in enumerate(limits.values()) if ns is not None)
    whole = sum(int(rows.cost(KV_NUMBERS)[0]) for rows in problem.dense)
    cached = None if kv_cache is None else cache_limit(kv_cache, whole)
    limited = (PARAMS, *(ns_of(problem.workloads[at]) for at in columns), *([] if cached is None else [KV_NUMBERS]))
    sets = problem.by_params if limited == (PARAMS,) else problem.candidates(limited)
    instance = pose(sets, limit, limits, cached)
    solution = instance.solve()
    plan = assemble(
        problem.sites,
        instance.chosen(solution),
        problem.dense,
        budget,
        limit,
        problem.workloads,
        latency,
        solution.certificate,
        made_from,
        kv_cache,
        instance.alternatives(solution),
    )
    assert not plan.budget.over, f"{plan.budget.used} parameters chosen, {limit} allowed"
    assert not (plan.kv_cache and plan.kv_cache.over), f"{plan.kv_cache} chosen"
    return Decision(plan, instance, solution)
