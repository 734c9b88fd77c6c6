"""Compare a tensor-parallel plan with the single-GPU plan from the same loss curves."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import numpy as np

from gac.allocation.candidate_set import CandidateSet, weight_candidates, with_fused_gemm
from gac.allocation.decide import Decision, decide
from gac.allocation.latencies import Timing
from gac.allocation.problem import Problem, total
from gac.core.errors import BudgetError
from gac.forms import form_named
from gac.models.sites import Site
from gac.plan.costs import ns_of
from gac.plan.plan import Plan, SingleGpuComparison, SiteChoice, WeightChoice
from gac.schemes import scheme_named


def attach_single_gpu_comparison(problem: Problem, decision: Decision) -> Decision:
    """Attach the comparison with the single-GPU plan; a decision for one GPU stays as it is.

    That plan keeps the same limits, but for latencies that the table lacks for one GPU. Where no plan can keep
    them, nothing is attached.
    """
    run, limits = problem.recipe.deployment, problem.recipe.limits
    if run.tensor_parallel == 1:
        return decision
    single = replace(problem, recipe=replace(problem.recipe, deployment=replace(run, tensor_parallel=1)))
    known = {workload for workload, ns in zip(run.workloads, single.dense_ns, strict=True) if ns is not None}
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
            total(known, ns_of(workload)) if len(known) == len(split) else None for workload in problem.workloads
        ),
    )


def _sound(choice: WeightChoice, site: SiteChoice, timing: Timing) -> bool:
    form = form_named(choice.form)
    if form.latency.axis(choice.weight) is None:
        return True
    shared = site.shared and choice.weight.input_group is not None
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
