"""The decision: the plan of least loss, or the fastest of those that lose hardly more."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import reduce
from math import floor, frexp, ldexp

import numpy as np

from gac.allocation.candidate_set import CandidateSet
from gac.allocation.candidates import weight_candidates, with_fused_gemm
from gac.allocation.dense import total
from gac.allocation.knapsack import Group, Solution
from gac.allocation.latencies import Timing
from gac.allocation.problem import LOSS, Instance, Problem, as_knapsack
from gac.core.errors import BudgetError
from gac.core.version import __version__
from gac.forms import form_named
from gac.models.sites import Site
from gac.plan.costs import floored, ns_of
from gac.plan.plan import (
    SCHEMA,
    AnyLatency,
    Candidate,
    Certificate,
    Limit,
    Measured,
    Plan,
    Prediction,
    SingleGpuComparison,
    SiteChoice,
    Speed,
    WeightChoice,
    WorkloadLatency,
    amounts,
)
from gac.plan.recipe import Recipe
from gac.schemes import scheme_named

_SLACK_BITS, _LOSS_BITS = 44, 60


@dataclass(frozen=True, eq=False)
class Decision:
    """A plan, and the instance whose exact solution made it or bounds it.

    Attributes:
        faster: the instance of least latency within the slack, and its solution, where that made the plan.
    """

    plan: Plan
    instance: Instance
    solution: Solution
    faster: tuple[Instance, Solution] | None = None


def decide(problem: Problem) -> Decision:
    """Return the plan of least loss within the recipe's limits, with its certificate.

    Where the recipe has a slack, and the profile holds a latency, it is the fastest of the plans that lose at most that
    much more, with a certificate of its own. Where the latency of none is known, it is the plan of least loss.

    Raises:
        BudgetError: a limit cannot be met.
        ProfileError: a latency is limited, and the profile lacks it.
    """
    slack, limits = problem.recipe.slack, problem.dense.allowed(problem.recipe)
    latencies = zip(problem.timing.workloads, problem.dense.latency_ns, strict=True)
    weights = {ns_of(workload): 1 / ns for workload, ns in latencies if ns and slack}
    instance = as_knapsack(problem.candidates(limits, minimised=weights), limits)
    least, faster, speed = instance.solve(), None, None
    if slack and weights and all(rows.known(weights).any() for rows in instance.sets):
        with suppress(BudgetError):  # the choices of known latency may not keep the limits
            faster, alternatives, speed = _fastest_within_slack(problem, instance, least, weights, slack)
    if faster is None:
        alternatives = instance.alternatives(least)
    decided, solution = faster or (instance, least)
    plan = plan_of(problem, decided.chosen(solution), least.certificate, alternatives, speed)
    assert not any(limit.over for limit in plan.limits), f"{plan.limits} chosen"
    plan = replace(plan, any_latency=_any_latency(problem, limits, least.certificate))
    return Decision(plan, instance, least, faster)


def _any_latency(problem: Problem, limits: Mapping[str, int], least: Certificate) -> AnyLatency | None:
    """Choose again without the limits of latency, if one binds."""
    latency = {*map(ns_of, problem.timing.workloads)}
    if not any(price for column, price in zip(limits, least.multipliers, strict=True) if column in latency):
        return None
    others = {column: limit for column, limit in limits.items() if column not in latency}
    instance = as_knapsack(problem.candidates(others), others)
    solution = instance.solve()
    if solution.certificate.value >= least.value:
        return None
    return AnyLatency(solution.certificate.value, summed_latency(instance.chosen(solution), problem.dense.rest_ns))


def _fastest_within_slack(
    problem: Problem, instance: Instance, least: Solution, weights: Mapping[str, float], slack: float
) -> tuple[tuple[Instance, Solution], Sequence[tuple[Candidate, ...]] | None, Speed]:
    value, known = least.certificate.value, [rows.known(weights) for rows in instance.sets]
    quick, unit = fastest(instance.sets, instance.limits, weights, value * (1 + slack), value * slack)
    start = None
    if all(mask[item] for mask, item in zip(known, least.choice, strict=True)):
        start = [int(mask[:item].sum()) for mask, item in zip(known, least.choice, strict=True)]
    solution = quick.solve(start)
    *prices, nat = solution.certificate.multipliers
    proof = replace(solution.certificate, multipliers=(*prices, nat / unit))
    speed = Speed(value, summed_latency(instance.chosen(least), problem.dense.rest_ns), proof)
    priced = nat > 0 and all(ns_of(workload) in quick.limits for workload in problem.timing.workloads)
    return (quick, solution), quick.alternatives(solution) if priced else None, speed


def plan_of(
    problem: Problem,
    chosen: Sequence[Candidate],
    certificate: Certificate,
    alternatives: Sequence[tuple[Candidate, ...]] | None = None,
    speed: Speed | None = None,
) -> Plan:
    """Make a plan from one candidate for each site of a problem."""
    return assemble(
        problem.sites,
        chosen,
        problem.dense.latency_ns,
        problem.dense.rest_ns,
        problem.recipe,
        problem.evidence(chosen),
        certificate,
        alternatives,
        speed,
        problem.loss_beyond_sum(chosen),
    )


def assemble(
    sites: Sequence[Site],
    chosen: Sequence[Candidate],
    dense_ns: Sequence[int | None],
    rest_ns: Sequence[int],
    recipe: Recipe,
    measured: Measured,
    certificate: Certificate,
    alternatives: Sequence[tuple[Candidate, ...]] | None = None,
    speed: Speed | None = None,
    beyond_sum: float = 0.0,
) -> Plan:
    """Make a plan from one candidate for each site.

    Args:
        dense_ns: latency of the dense model, one a workload; None where unknown.
        rest_ns: the part of it beside the GEMMs of the sites, which every choice takes too.
        alternatives: of each site; None where they are not known.
        beyond_sum: loss of the choices beyond the sum of their losses.
    """
    choices = tuple(
        SiteChoice(
            site=site.name,
            layer=site.layer,
            kind=site.kind,
            weights=candidate.choices(site.weights),
            params=candidate.params,
            dense_params=site.params,
            loss=candidate.loss,
            latency_ns=candidate.latency_ns,
            shared=candidate.shared,
            alternatives=others,
        )
        for site, candidate, others in zip(sites, chosen, alternatives or [()] * len(sites), strict=True)
    )
    weights = [weight for choice in choices for weight in choice.weights]
    workloads, limits = _workloads(recipe.deployment.workloads, chosen, dense_ns, rest_ns), []
    for column, fraction in recipe.fractions.items():
        counted = amounts(weights, workloads, column)
        assert counted is not None, f"{column} of a chosen candidate is unknown"
        used, dense_amount = counted
        limit = floored(fraction, dense_amount)
        limits.append(Limit(column, fraction, limit, used, dense_amount, max(0, used - limit)))
    head = measured.lost_by_head
    loss = float(sum(choice.loss for choice in choices)) + beyond_sum + head
    return Plan(
        schema_version=SCHEMA,
        gac_version=__version__,
        recipe=recipe,
        measured=measured,
        limits=tuple(limits),
        workloads=workloads,
        prediction=Prediction(loss, measured.perplexity(0.0), measured.perplexity(loss), beyond_sum, head),
        certificate=certificate,
        sites=choices,
        speed=speed,
    )


def _workloads(
    names: Sequence[str], chosen: Sequence[Candidate], dense_ns: Sequence[int | None], rest_ns: Sequence[int]
) -> tuple[WorkloadLatency, ...]:
    columns = zip(names, dense_ns, summed_latency(chosen, rest_ns), rest_ns, strict=True)
    weights, rows = sum(len(candidate.dims) for candidate in chosen), []
    for column, (name, dense, ns, rest) in enumerate(columns):
        known = [candidate for candidate in chosen if candidate.latency_ns[column] is not None]
        unknown = weights - sum(len(candidate.dims) for candidate in known)
        interpolated = sum(candidate.interpolated[column] for candidate in known)
        modelled = sum(candidate.modelled[column] for candidate in known if candidate.modelled)
        measured = weights - unknown - interpolated - modelled
        rows.append(WorkloadLatency(name, dense, ns, measured, interpolated, unknown, modelled, rest_ns=rest))
    return tuple(rows)


def summed_latency(candidates: Sequence[Candidate], rest_ns: Sequence[int]) -> tuple[int | None, ...]:
    """Sum the ns for each workload, and the engine's rest; None where a candidate's is unknown."""
    columns = zip(zip(*(candidate.latency_ns for candidate in candidates), strict=True), rest_ns, strict=True)
    return tuple(None if None in column else sum((ns or 0 for ns in column), rest) for column, rest in columns)


def fastest(
    sets: Sequence[CandidateSet], limits: Mapping[str, int], weights: Mapping[str, float], most: float, slack: float
) -> tuple[Instance, float]:
    """Return the knapsack of least latency among the choices that lose at most ``most``, and its unit of loss in nats.

    Its limits are those by cost column, and last ``LOSS`` in whole units. Every candidate's loss is rounded up to
    them, so that no choice within the limits loses more.

    Args:
        weights: value of a ns, by latency column; candidates of which one is unknown are left out.
        most: nats a token.
        slack: the part of ``most`` that is given for speed; the unit is about a ``2**44``th of it, a power of two.
    """
    exponent = max(frexp(slack)[1] - _SLACK_BITS, frexp(most)[1] - _LOSS_BITS)
    limit = floor(ldexp(most, -exponent))
    within = as_knapsack([rows.pick(rows.known(weights)) for rows in sets], limits)
    groups = []
    for rows, group in zip(within.sets, within.groups, strict=True):
        ns = np.sum([weight * rows.cost(column) for column, weight in weights.items()], axis=0)
        loss = np.ceil(np.ldexp(np.minimum(rows.loss, most), -exponent)).astype(np.int64)
        loss[rows.loss > most] = limit + 1
        groups.append(Group(group.name, ns, np.column_stack([group.costs, loss])))
    return Instance(within.sets, tuple(groups), {**limits, LOSS: limit}), ldexp(1.0, exponent)


# --- several GPUs -----------------------------------------------------------------------------------------------------


def attach_single_gpu_comparison(problem: Problem, decision: Decision) -> Decision:
    """Attach to a decision for several GPUs the comparison with the single-GPU plan.

    That plan keeps the same limits, but for latencies that the table lacks for one GPU. Where no plan can keep
    them, nothing is attached.
    """
    run, limits = problem.recipe.deployment, problem.recipe.limits
    single = replace(problem, recipe=replace(problem.recipe, deployment=replace(run, tensor_parallel=1)))
    known = {workload for workload, ns in zip(run.workloads, single.dense.latency_ns, strict=True) if ns is not None}
    latency = {workload: share for workload, share in (limits.latency or {}).items() if workload in known}
    try:
        plan = decide(replace(single, recipe=replace(single.recipe, limits=replace(limits, latency=latency)))).plan
    except BudgetError:
        return decision
    return replace(decision, plan=replace(decision.plan, one_gpu=_compare(problem, decision.plan, plan)))


def _compare(problem: Problem, plan: Plan, single: Plan) -> SingleGpuComparison:
    timing, gpus = problem.timing, plan.gpus
    forms = Counter[str]()
    for choice in single.weights:
        forms[form_named(choice.form).kind] += choice.weight.params
    split = [_split(site, choice, timing) for site, choice in zip(problem.sites, single.sites, strict=True)]
    known = [rows for rows in split if rows is not None]
    pairs = zip(plan.weights, single.weights, strict=True)
    even = [(choice, site) for site in single.sites for choice in site.weights if choice.divides(gpus)]
    return SingleGpuComparison(
        loss=single.prediction.loss,
        forms=dict(sorted(forms.items())),
        otherwise=sum(ours.becomes != theirs.becomes for ours, theirs in pairs),
        uneven=len(single.weights) - len(even),
        unsound=sum(not _sound(choice, site, timing) for choice, site in even),
        latency_ns=tuple(
            total(known, ns_of(workload)) if len(known) == len(split) else None for workload in timing.workloads
        ),
    )


def _sound(choice: WeightChoice, site: SiteChoice, timing: Timing) -> bool:
    form, shared = form_named(choice.form), site.shared and choice.weight.input_group is not None
    if form.latency.axis(choice.weight) is None:
        return True
    return bool(timing.sound(form, choice.weight, np.array([choice.dim]), shared, scheme_named(choice.scheme))[0])


def _split(site: Site, choice: SiteChoice, timing: Timing) -> CandidateSet | None:
    layout = site.with_fusion(choice.shared) if site.fusion_optional else site
    rows = []
    for position, weight in enumerate(choice.weights):
        alike = [other for other in choice.weights if (other.form, other.dim) == (weight.form, weight.dim)]
        if (dim := _padded_dim(alike, timing.gpus)) is None:
            return None
        form, scheme = form_named(weight.form), scheme_named(weight.scheme)
        rows.append(weight_candidates(layout, position, form, scheme, np.array([dim]), None, timing))
    combined = reduce(CandidateSet.paired, rows)
    return with_fused_gemm(combined, layout, timing) if layout.fused else combined


def _padded_dim(choices: Sequence[WeightChoice], gpus: int) -> int | None:
    """The common dim of these weights, or the next that leaves all GPUs equal parts; None where there is none.

    Heads cannot be padded: a key-value head of zeros would still be attended to.
    """
    first = choices[0]
    form = form_named(first.form)
    most = first.dim if form.dim_counts_units else min(form_named(other.form).full(other.weight) for other in choices)
    dims = range(first.dim, most + 1)
    return next((dim for dim in dims if all(replace(other, dim=dim).divides(gpus) for other in choices)), None)
