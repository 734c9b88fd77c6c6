"""The decision: the plan that loses least, or the fastest of those that lose hardly more."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import floor, frexp, ldexp

import numpy as np

from gac.allocation.attention_latencies import knows
from gac.allocation.candidate_set import CandidateSet
from gac.allocation.candidates import dense_candidate
from gac.allocation.dims import check_forms_divide, full_dim, that_run
from gac.allocation.knapsack import Group, Solution
from gac.allocation.latencies import Timing
from gac.allocation.problem import LOSS, Instance, Problem, allowed, as_knapsack, total
from gac.allocation.split_latencies import check_collectives, timing_of
from gac.core.errors import BudgetError, ProfileError
from gac.core.version import __version__
from gac.forms import DENSE, form_named
from gac.forms.tensor_parallel import check_splits
from gac.models.sites import Site
from gac.plan.costs import floored, ns_of
from gac.plan.plan import (
    SCHEMA,
    Candidate,
    Certificate,
    Limit,
    Measured,
    Plan,
    Prediction,
    SiteChoice,
    Speed,
    WorkloadLatency,
    amounts,
)
from gac.plan.recipe import Recipe
from gac.profiling.table import Profile
from gac.schemes import DEFAULT_SCHEME, scheme_named

SLACK = 0.003
"""How much more than the least loss may be lost for speed, where nothing is said."""

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


def settled(recipe: Recipe, sites: Sequence[Site], profile: Profile) -> Recipe:
    """The recipe with what it leaves open of speed decided, see ``Recipe.slack`` and ``Limits.latency``.

    Where the profile lacks one of the schemes or has no latency of a form (``Form.timed``), no latency is limited, and
    no loss is given for speed. It has a scheme where it knows what all dense weights take in it, of those that can be
    stored so.

    Raises:
        GacError: the GPUs do not divide every weight, see ``gac.forms.tensor_parallel.check_splits``, or no dim of a
            form.
        ProfileError: a latency is limited that the profile has of 16-bit numbers and lacks of a scheme, or that no
            profile has of a form; or it lacks the collectives of a split model, and not every latency is allowed.
    """
    exact, limits, run = recipe.rule == "loss", recipe.limits, recipe.deployment
    check_splits(sites, run.tensor_parallel)
    check_forms_divide(sites, recipe.space, run.tensor_parallel)
    if limits.latency != {}:
        check_collectives(profile, run, sites)
    latency, slack = limits.latency, recipe.slack
    timing = replace(timing_of(profile, run), triton=False)
    known = {
        name: [one for one, ns in zip(run.workloads, _dense_ns(sites, timing, name), strict=True) if ns is not None]
        for name in dict.fromkeys((DEFAULT_SCHEME, *recipe.space.schemes))
    }
    for name, of_scheme in known.items():
        lacking = [one for one in known[DEFAULT_SCHEME] if one in (latency or ()) and one not in of_scheme]
        if lacking:
            raise ProfileError(
                f"a limit of latency for {lacking[0]} with scheme {name}, which the profile does not have",
                f"schemes that it was measured in, such as {DEFAULT_SCHEME}",
                f"Measure it with gac profile --model NAME --scheme {name}, or plan without the limit or the scheme.",
            )
    untimed = [name for name in recipe.space.forms if not knows(timing, form_named(name), sites)]
    if untimed and (latency or slack):
        raise ProfileError(
            f"a limit of latency, or loss for speed, with form {untimed[0]}",
            "forms whose latency is measured",
            _untimed_remedy(untimed[0], sites, run.workloads),
        )
    timed = not untimed and all(of_scheme == known[DEFAULT_SCHEME] for of_scheme in known.values())
    if slack is None:
        slack = SLACK if exact and not latency and timed else 0.0
    if latency is None:
        latency = dict.fromkeys(known[DEFAULT_SCHEME] if exact and timed else (), 1.0)
    return replace(recipe, limits=replace(limits, latency=latency), slack=slack)


def _untimed_remedy(name: str, sites: Sequence[Site], workloads: Sequence[str]) -> str:
    """What to do about a form of unknown latency: of one that attention reads, tables can have what that takes."""
    weights = [weight for site in sites for weight in site.weights]
    variants = [(one, weight) for weight in weights for one in form_named(name).variants(weight)]
    measured = any(one.applies_to(weight) and one.cache.axis(weight) for one, weight in variants)
    decoding = " ".join(f"--workload {one}" for one in workloads if one.startswith("decode"))
    if not (measured and decoding):
        return "Leave the form out, or plan without the limit."
    return f"Measure it with gac profile --model NAME --form {name} {decoding}, or leave the form or the limit out."


def _dense_ns(sites: Sequence[Site], timing: Timing, scheme: str) -> tuple[int | None, ...]:
    """What the dense sites whose weights it runs take in a scheme, by workload."""
    stored, whole = scheme_named(scheme), DENSE

    def runs(site: Site) -> bool:
        return all(len(that_run(whole, stored, weight, full_dim(weight), timing.gpus)) for weight in site.weights)

    dense = [dense_candidate(site, timing, stored) for site in sites if runs(site)]
    return tuple(total(dense, ns_of(workload)) for workload in timing.workloads)


def decide(problem: Problem) -> Decision:
    """The plan that loses least within the recipe's limits, with its certificate.

    Where the recipe has a slack, and the profile holds a latency, it is the fastest of the plans that lose at most that
    much more, with a certificate of its own. Where the latency of none is known, it is the one that loses least.

    Raises:
        BudgetError: a limit cannot be met.
        ProfileError: a latency is limited, and the profile lacks it.
    """
    slack, limits = problem.recipe.slack, allowed(problem.recipe, problem.dense)
    known = zip(problem.workloads, problem.dense_ns, strict=True)
    weights = {ns_of(workload): 1 / ns for workload, ns in known if ns and slack}
    sets = problem.candidates(limits, besides=weights)
    instance = as_knapsack(sets, limits)
    solution = instance.solve()
    if slack and weights and all(rows.known(weights).any() for rows in instance.sets):
        value, start = solution.certificate.value, _start(instance, solution, weights)
        quick, unit = fastest(instance.sets, limits, weights, value * (1 + slack), value * slack)
        with suppress(BudgetError):  # the choices of known latency may not keep the limits
            return _faster(problem, instance, solution, quick, unit, start)
    plan = _plan(problem, instance.chosen(solution), solution.certificate, instance.alternatives(solution))
    return Decision(plan, instance, solution)


def _start(instance: Instance, least: Solution, columns: Iterable[str]) -> list[int] | None:
    """The choice of least loss among the candidates whose latency is known; None where it is not among them."""
    known = [rows.known(columns) for rows in instance.sets]
    if all(one[item] for one, item in zip(known, least.choice, strict=True)):
        return [int(one[:item].sum()) for one, item in zip(known, least.choice, strict=True)]
    return None


def _faster(
    problem: Problem, instance: Instance, least: Solution, quick: Instance, unit: float, start: Sequence[int] | None
) -> Decision:
    """The decision of least latency, whose plan says what the choice of least loss would have taken."""
    solution = quick.solve(start)
    *prices, nat = solution.certificate.multipliers
    proof = replace(solution.certificate, multipliers=(*prices, nat / unit))
    speed = Speed(least.certificate.value, summed_latency(instance.chosen(least)), proof)
    priced = nat > 0 and all(ns_of(workload) in quick.limits for workload in problem.workloads)
    others = quick.alternatives(solution) if priced else None
    plan = _plan(problem, quick.chosen(solution), least.certificate, others, speed)
    return Decision(plan, instance, least, (quick, solution))


def _plan(
    problem: Problem,
    chosen: Sequence[Candidate],
    certificate: Certificate,
    alternatives: Sequence[tuple[Candidate, ...]] | None,
    speed: Speed | None = None,
) -> Plan:
    """The plan of a choice that keeps every limit."""
    sites, recipe, dense = problem.sites, problem.recipe, (problem.dense_ns, problem.fused_ns)
    measured, together = problem.evidence(chosen), problem.together(chosen)
    plan = assemble(sites, chosen, dense, recipe, measured, certificate, alternatives, speed, together)
    assert not any(limit.over for limit in plan.limits), f"{plan.limits} chosen"
    return plan


def assemble(
    sites: Sequence[Site],
    chosen: Sequence[Candidate],
    dense: tuple[Sequence[int | None], Sequence[int | None]],
    recipe: Recipe,
    measured: Measured,
    certificate: Certificate,
    alternatives: Sequence[tuple[Candidate, ...]] | None = None,
    speed: Speed | None = None,
    together: float = 0.0,
) -> Plan:
    """Write down one chosen candidate a site.

    Args:
        dense: latency of the dense sites, one a workload, GEMM by GEMM and with shared ones; None where unknown.
        alternatives: for each site what it could have had instead; None where that is not known.
        speed: where the choice is the fastest that loses hardly more than the least.
        together: what the choices lose beyond the sum of their losses.
    """
    others = alternatives or [()] * len(sites)
    choices = tuple(SiteChoice.of(*one) for one in zip(sites, chosen, others, strict=True))
    weights = [weight for choice in choices for weight in choice.weights]
    workloads = _workloads(recipe.deployment.workloads, chosen, *dense)
    limits = []
    for column, fraction in recipe.fractions.items():
        found = amounts(weights, workloads, column)
        assert found is not None, f"{column} of a chosen candidate is unknown"
        used, whole = found
        limit = floored(fraction, whole)
        limits.append(Limit(column, fraction, limit, used, whole, max(0, used - limit)))
    head = measured.lost_by_head
    loss = float(sum(choice.loss for choice in choices)) + together + head
    return Plan(
        schema_version=SCHEMA,
        gac_version=__version__,
        recipe=recipe,
        measured=measured,
        limits=tuple(limits),
        workloads=workloads,
        prediction=Prediction(loss, measured.perplexity(0.0), measured.perplexity(loss), together, head),
        certificate=certificate,
        sites=choices,
        speed=speed,
    )


def _workloads(
    names: Sequence[str],
    chosen: Sequence[Candidate],
    dense_ns: Sequence[int | None],
    fused_ns: Sequence[int | None],
) -> tuple[WorkloadLatency, ...]:
    found = []
    planned = summed_latency(chosen)
    for at, (name, dense, fused, ns) in enumerate(zip(names, dense_ns, fused_ns, planned, strict=True)):
        weights = sum(len(one.dims) for one in chosen)
        known = [one for one in chosen if one.latency_ns[at] is not None]
        unknown = weights - sum(len(one.dims) for one in known)
        interpolated = sum(one.interpolated[at] for one in known)
        modelled = sum(one.modelled[at] for one in known if one.modelled)
        measured = weights - unknown - interpolated - modelled
        found.append(WorkloadLatency(name, dense, ns, measured, interpolated, unknown, modelled, fused))
    return tuple(found)


def summed_latency(candidates: Sequence[Candidate]) -> tuple[int | None, ...]:
    """Summed ns for each workload; None where one is unknown."""
    columns = zip(*(one.latency_ns for one in candidates), strict=True)
    return tuple(None if None in column else sum(ns for ns in column if ns is not None) for column in columns)


def fastest(
    sets: Sequence[CandidateSet], limits: Mapping[str, int], weights: Mapping[str, float], most: float, slack: float
) -> tuple[Instance, float]:
    """The knapsack of least latency among the choices that lose at most ``most``.

    Its limits are those given, and last ``LOSS`` in whole units. Every candidate's loss is rounded up to them, so that
    no choice within the limits loses more.

    Args:
        limits: by cost column.
        weights: how much a ns counts, by latency column; candidates of which one is unknown are left out.
        most: nats a token.
        slack: the part of ``most`` that is given for speed; the unit is a ``2**44``th of it.

    Returns:
        The instance, and the unit of loss in nats, a power of two.
    """
    exponent = max(frexp(slack)[1] - _SLACK_BITS, frexp(most)[1] - _LOSS_BITS)
    limit = floor(ldexp(most, -exponent))
    within = as_knapsack([rows.at(rows.known(weights)) for rows in sets], limits)
    groups = []
    for rows, group in zip(within.sets, within.groups, strict=True):
        ns = np.sum([weight * rows.cost(column) for column, weight in weights.items()], axis=0)
        loss = np.ceil(np.ldexp(np.minimum(rows.loss, most), -exponent)).astype(np.int64)
        loss[rows.loss > most] = limit + 1
        groups.append(Group(group.name, ns, np.column_stack([group.costs, loss])))
    return Instance(within.sets, tuple(groups), {**limits, LOSS: limit}), ldexp(1.0, exponent)
