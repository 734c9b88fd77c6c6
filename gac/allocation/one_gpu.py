"""A plan for several GPUs beside the one that the same curves give for one: what is otherwise, and why."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import numpy as np

from gac.allocation.candidate_set import CandidateSet
from gac.allocation.decide import Decision, decide
from gac.allocation.latencies import Timing
from gac.allocation.options import options_of, with_fused_gemm
from gac.allocation.problem import Problem, total
from gac.core.errors import BudgetError
from gac.forms import form_named
from gac.models.sites import Site
from gac.plan.costs import ns_of
from gac.plan.plan import OneGpu, Plan, SiteChoice, WeightChoice
from gac.schemes import scheme_named


def beside_one_gpu(problem: Problem, decision: Decision) -> Decision:
    """The decision with what would be chosen for one GPU in its plan; a decision for one GPU as it is.

    That plan keeps the same limits, but for latencies that the table does not hold for one GPU. Where none can keep
    them, nothing is said of it.
    """
    run, limits = problem.recipe.deployment, problem.recipe.limits
    if run.tensor_parallel == 1:
        return decision
    alone = replace(problem, recipe=replace(problem.recipe, deployment=replace(run, tensor_parallel=1)))
    known = [one for one, ns in zip(run.workloads, alone.dense_ns, strict=True) if ns is not None]
    latency = {one: share for one, share in (limits.latency or {}).items() if one in known}
    try:
        made = decide(replace(alone, recipe=replace(alone.recipe, limits=replace(limits, latency=latency)))).plan
    except BudgetError:
        return decision
    return replace(decision, plan=replace(decision.plan, one_gpu=_differences(problem, decision.plan, made)))


def _differences(problem: Problem, plan: Plan, alone: Plan) -> OneGpu:
    timing, gpus = problem.timing, plan.gpus
    forms = Counter[str]()
    for one in alone.weights:
        forms[form_named(one.form).kind] += one.weight.params
    split = [_split(site, made, timing) for site, made in zip(problem.sites, alone.sites, strict=True)]
    known = [rows for rows in split if rows is not None]
    pairs = zip(plan.weights, alone.weights, strict=True)
    even = [(one, made) for made in alone.sites for one in made.weights if one.divides(gpus)]
    return OneGpu(
        loss=alone.prediction.loss,
        forms=dict(sorted(forms.items())),
        otherwise=sum(ours.becomes != theirs.becomes for ours, theirs in pairs),
        uneven=len(alone.weights) - len(even),
        unsound=sum(not _sound(one, made, timing) for one, made in even),
        latency_ns=tuple(
            total(known, ns_of(workload)) if len(known) == len(split) else None for workload in problem.workloads
        ),
    )


def _sound(one: WeightChoice, made: SiteChoice, timing: Timing) -> bool:
    form = form_named(one.form)
    if form.latency.axis(one.weight) is None:
        return True
    shared = made.shared and one.weight.input_group is not None
    return bool(timing.sound(form, one.weight, np.array([one.dim]), shared, scheme_named(one.scheme))[0])


def _split(site: Site, made: SiteChoice, timing: Timing) -> CandidateSet | None:
    """What a site takes on several GPUs as it was chosen for one; None where zeros cannot make its dims even."""
    run = site.with_fusion(made.shared) if site.fusion_optional else site
    rows = []
    for at, one in enumerate(made.weights):
        together = [other for other in made.weights if (other.form, other.dim) == (one.form, one.dim)]
        if (dim := _filled(together, timing.gpus)) is None:
            return None
        form, scheme = form_named(one.form), scheme_named(one.scheme)
        rows.append(options_of(run, at, form, scheme, np.array([dim]), None, timing))
    found = reduce(CandidateSet.beside, rows)
    return with_fused_gemm(found, run, timing) if run.fused else found


def _filled(choices: Sequence[WeightChoice], gpus: int) -> int | None:
    """The dim of these weights, which is one, or the next that all GPUs have equal parts of; None where none is left.

    Heads cannot be filled in: a key-value head of zeros would still be attended to.
    """
    first = choices[0]
    form = form_named(first.form)
    most = first.dim if form.dim_counts_units else min(form_named(one.form).full(one.weight) for one in choices)
    dims = range(first.dim, most + 1)
    return next((dim for dim in dims if all(replace(one, dim=dim).divides(gpus) for one in choices)), None)
