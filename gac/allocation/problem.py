"""What there is to decide, and the decision: from measured curves and a latency table to the plan that loses least."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from gac.allocation.candidates import CandidateSet, candidates, dense_candidate
from gac.allocation.knapsack import Group, Solution, knapsack
from gac.allocation.latencies import UNKNOWN, Timing
from gac.allocation.limits import allowed, floored, name_of, total
from gac.arrays import Floats
from gac.costs import BYTES, PARAMS, ns_of
from gac.curves import LossCurves
from gac.models.sites import Site
from gac.plan import (
    SCHEMA,
    Candidate,
    Certificate,
    Limit,
    Measured,
    Plan,
    Prediction,
    SiteChoice,
    WorkloadLatency,
    amounts,
)
from gac.profiling.table import Profile
from gac.recipe import Recipe
from gac.version import __version__
from gac.workloads import Workload


@dataclass(frozen=True, eq=False)
class Problem:
    """The sites of a model, what their dims lose, and what they take on a GPU.

    Attributes:
        sites: in model order.
        curves: of the model.
        profile: the latency table.
        recipe: what is asked for.
        measured: what plans say that they rest on.
        measurements: what the rule asked to be measured besides the curves, by weight name.
    """

    sites: Sequence[Site]
    curves: LossCurves
    profile: Profile
    recipe: Recipe
    measured: Measured
    measurements: Mapping[str, Floats] = field(default_factory=dict)
    _made: dict[tuple[str, ...], list[CandidateSet]] = field(default_factory=dict, init=False, repr=False)

    @property
    def params(self) -> int:
        """Parameters of the dense sites together."""
        return sum(site.params for site in self.sites)

    @property
    def workloads(self) -> tuple[Workload, ...]:
        """What latency is looked up for."""
        return self.recipe.deployment.parsed

    @property
    def timing(self) -> Timing:
        """Where latencies come from, as for the candidates."""
        return Timing(self.profile, self.workloads, self.recipe.deployment.triton)

    @cached_property
    def dense(self) -> list[CandidateSet]:
        """Every site as it is."""
        return [dense_candidate(site, replace(self.timing, triton=False)) for site in self.sites]

    @property
    def dense_ns(self) -> list[int | None]:
        """Latency of the dense sites, one a workload; None where unknown."""
        return [total(self.dense, ns_of(workload)) for workload in self.workloads]

    def candidates(self, columns: Collection[str]) -> list[CandidateSet]:
        """The candidates of each site that matter where these cost columns are limited."""
        alike = len(self.recipe.space.schemes) == 1  # bytes are then as parameters are
        limited = tuple(dict.fromkeys(PARAMS if alike and column == BYTES else column for column in columns))
        if limited not in self._made:
            space, timing = self.recipe.space, self.timing
            self._made[limited] = [candidates(site, self.curves, space, timing, limited) for site in self.sites]
        return self._made[limited]


@dataclass(frozen=True, eq=False)
class Instance:
    """Candidates as a knapsack.

    Attributes:
        sets: for each site the candidates whose costs are known wherever they are limited.
        groups: the same, with what they cost under each limit.
        limits: by cost column, in the order of the groups' costs.
    """

    sets: tuple[CandidateSet, ...]
    groups: tuple[Group, ...]
    limits: Mapping[str, int]

    def solve(self) -> Solution:
        """The choice that loses least, with its proof.

        Raises:
            BudgetError: the limits cannot be met; says what can be.
        """
        return knapsack(self.groups, list(self.limits.values()), names=[name_of(column) for column in self.limits])

    def chosen(self, solution: Solution) -> list[Candidate]:
        """Of each site the chosen one."""
        return [rows.candidate(item) for rows, item in zip(self.sets, solution.choice, strict=True)]

    def alternatives(self, solution: Solution) -> list[tuple[Candidate, ...]]:
        """For each site the best candidate with fewer parameters than the chosen one, and the best with more, if any.

        Best is the smallest loss with what is used priced at the multipliers of the certificate (a candidate's
        Lagrangian value). So what holds against these two holds all the more against every other candidate of the site.
        """
        prices, found = np.array(solution.certificate.multipliers), []
        for rows, item, group in zip(self.sets, solution.choice, self.groups, strict=True):
            priced = rows.loss + group.costs @ prices
            sides = map(np.flatnonzero, (rows.params < rows.params[item], rows.params > rows.params[item]))
            found.append(tuple(rows.candidate(int(side[priced[side].argmin()])) for side in sides if len(side)))
        return found


@dataclass(frozen=True, eq=False)
class Decision:
    """A plan, and the instance whose exact solution made it or bounds it."""

    plan: Plan
    instance: Instance
    solution: Solution


def as_knapsack(sets: Sequence[CandidateSet], limits: Mapping[str, int]) -> Instance:
    """The knapsack of these candidates.

    Args:
        limits: the most that all sites may take together, by cost column; every site has a candidate whose costs are
            known, the dense one.
    """
    known, groups = [], []
    for rows in sets:
        costs = np.column_stack([rows.cost(column) for column in limits])
        certain = (costs != UNKNOWN).all(axis=1)
        known.append(rows.at(certain))
        groups.append(Group(rows.site, rows.loss[certain], costs[certain]))
    return Instance(tuple(known), tuple(groups), limits)


def decide(problem: Problem) -> Decision:
    """The plan that loses least within the recipe's limits, with its certificate.

    Raises:
        BudgetError: a limit cannot be met.
        ProfileError: a latency is limited, and the profile lacks it.
    """
    limits = allowed(problem.recipe, problem.dense)
    instance = as_knapsack(problem.candidates(limits), limits)
    solution = instance.solve()
    plan = assemble(
        problem.sites,
        instance.chosen(solution),
        problem.dense_ns,
        problem.recipe,
        problem.measured,
        solution.certificate,
        instance.alternatives(solution),
    )
    assert not any(limit.over for limit in plan.limits), f"{plan.limits} chosen"
    return Decision(plan, instance, solution)


def assemble(
    sites: Sequence[Site],
    chosen: Sequence[Candidate],
    dense_ns: Sequence[int | None],
    recipe: Recipe,
    measured: Measured,
    certificate: Certificate,
    alternatives: Sequence[tuple[Candidate, ...]] | None = None,
) -> Plan:
    """Write down one chosen candidate a site.

    Args:
        dense_ns: latency of the dense sites, one a workload; None where unknown.
        alternatives: for each site what it could have had instead; None where that is not known.
    """
    others = alternatives or [()] * len(sites)
    choices = tuple(SiteChoice.of(*one) for one in zip(sites, chosen, others, strict=True))
    weights = [weight for choice in choices for weight in choice.weights]
    workloads = _workloads(recipe.deployment.workloads, chosen, dense_ns)
    limits = []
    for column, fraction in recipe.fractions.items():
        found = amounts(weights, workloads, column)
        assert found is not None, f"{column} of a chosen candidate is unknown"
        used, whole = found
        limit = floored(fraction, whole)
        limits.append(Limit(column, fraction, limit, used, whole, max(0, used - limit)))
    loss = float(sum(choice.loss for choice in choices))
    return Plan(
        schema_version=SCHEMA,
        gac_version=__version__,
        recipe=recipe,
        measured=measured,
        limits=tuple(limits),
        workloads=workloads,
        prediction=Prediction(loss, measured.perplexity(0.0), measured.perplexity(loss)),
        certificate=certificate,
        sites=choices,
    )


def _workloads(
    names: Sequence[str], chosen: Sequence[Candidate], dense_ns: Sequence[int | None]
) -> tuple[WorkloadLatency, ...]:
    found = []
    for at, (name, dense, ns) in enumerate(zip(names, dense_ns, summed_latency(chosen), strict=True)):
        weights = sum(len(one.dims) for one in chosen)
        unknown = sum(len(one.dims) for one in chosen if one.latency_ns[at] is None)
        interpolated = sum(one.interpolated[at] for one in chosen)
        found.append(WorkloadLatency(name, dense, ns, weights - interpolated - unknown, interpolated, unknown))
    return tuple(found)


def summed_latency(candidates: Sequence[Candidate]) -> tuple[int | None, ...]:
    """Summed ns for each workload; None where one is unknown."""
    columns = zip(*(one.latency_ns for one in candidates), strict=True)
    return tuple(None if None in column else sum(ns for ns in column if ns is not None) for column in columns)
