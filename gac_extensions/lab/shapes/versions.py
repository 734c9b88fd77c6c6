"""Versions to benchmark: the dense model, a compressor's dims, these padded and rounded, and GAC's plans."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import fsum
from typing import Any

from gac.allocation.candidates import candidate_at
from gac.allocation.decide import fastest, summed_latency
from gac.allocation.dense import total
from gac.allocation.problem import Problem
from gac.allocation.resolve import speed_defaults
from gac.allocation.rules import RULES
from gac.allocation.weight_rules import Rounding
from gac.core.errors import BudgetError, ModelError
from gac.core.workloads import Workload
from gac.forms import DEFAULT_FORMS, form_named
from gac.forms.planned_sites import as_planned
from gac.models.sites import Site
from gac.plan.costs import BYTES, KV_NUMBERS, ns_of
from gac.plan.engines import VLLM
from gac.plan.evidence import RoundedHead
from gac.plan.plan import Plan, WeightChoice, counted
from gac.plan.recipe import Recipe
from gac.schemes import DEFAULT_SCHEME

DENSE, FUSED = "dense", "dense, fused"
PLAIN = f"{FUSED}, plain"
UNALIGNED = "unaligned"
DEFAULT = "GAC, by default"
FASTEST = "GAC, parameters and latency"
FOR_ONE = ", for one GPU"
FASTEST_IN_SCHEMES = "GAC in schemes, loses no more than"
PADS = (8, 16, 64)
NEAREST = (8, 32)
COARSE = 32
UNIFORM = f"uniform:nearest{COARSE}"


@dataclass(frozen=True, eq=False)
class Version:
    """A version of a model to time."""

    name: str  # for tables
    choices: tuple[WeightChoice, ...]  # the choice of every weight, in model order
    fused: bool | tuple[Site, ...]  # True if weights with the same input share their first GEMM; or the sites that do
    loss: float  # predicted, nats a token
    table_ns: Mapping[str, int | None]  # latency by the latency table, by workload; None if it lacks a shape
    compiled: bool = False  # the layers run through ``torch.compile`` with ``shape_padding``
    gpus: int = 1  # the number of GPUs of the table's latency
    plain: bool = False  # norms, activations and rotary embeddings run as in transformers, not fused
    head: RoundedHead | None = None  # the quantised embedding and LM head, if any

    @property
    def params(self) -> int:
        return sum(choice.params for choice in self.choices)

    @property
    def bytes(self) -> int:
        """Of the targeted weights, in their schemes."""
        return counted(self.choices, BYTES)[0]

    @property
    def kv_numbers(self) -> int:
        return counted(self.choices, KV_NUMBERS)[0]


@dataclass(frozen=True, eq=False)
class Planner:
    """Plans versions of a model, from a problem with its family's sites, curves, workloads and number of GPUs."""

    problem: Problem

    @property
    def gpus(self) -> int:
        return self.problem.recipe.deployment.tensor_parallel

    @property
    def alone(self) -> "Planner":
        recipe = self.problem.recipe
        recipe = replace(recipe, deployment=replace(recipe.deployment, tensor_parallel=1))
        return Planner(replace(self.problem, recipe=recipe))

    def problem_of(self, budget: float, **options: Any) -> Problem:
        """The problem of the same model with another recipe; options as for ``Recipe.of``."""
        base = self.problem.recipe
        defaults = {
            "method": base.measure.method,
            "workloads": base.deployment.workloads,
            "tensor_parallel": self.gpus,
            "engine": base.deployment.engine,
        }
        defaults |= {"refit": "none", "fuse": False, "latency": "any", "slack": 0}
        recipe = Recipe.of(budget, **(defaults | options))
        forms, fuse, sites = recipe.space.forms, recipe.deployment.fuse, self.problem.sites
        if not fuse and not any(site.joint_weights(form_named(form)) for site in sites for form in forms):
            # No form takes several weights, so each is chosen by itself: the same choices, and far fewer candidates.
            sites = [Site(each.name, site.layer, each.name, (each,)) for site in sites for each in site.weights]
        planned = as_planned(sites, forms, fuse)
        return replace(self.problem, sites=planned, recipe=speed_defaults(recipe, planned, self.problem.profile))

    def plan(self, budget: float, **options: Any) -> Plan:
        """A plan; by default only its parameters are limited."""
        problem = self.problem_of(budget, **options)
        return RULES.get(problem.recipe.rule).decide(problem).plan

    def plan_by_default(self, budget: float, **options: Any) -> Plan:
        """The plan of ``gac.allocate`` for this budget and these options."""
        fuse = True if self.problem.recipe.deployment.engine == VLLM.name else "auto"
        defaults = {"forms": DEFAULT_FORMS, "fuse": fuse, "latency": None, "slack": None}
        return self.plan(budget, **(defaults | options))

    def by_default(self, budget: float, **options: Any) -> Version:
        plan = self.plan_by_default(budget, **options)
        sites = as_planned(self.problem.sites, plan.recipe.space.forms, plan.recipe.deployment.fuse)
        shared = tuple(site for site, choice in zip(sites, plan.sites, strict=True) if choice.shared)
        return replace(version_of(DEFAULT, plan), fused=shared)

    def uniform(self, scheme: str) -> Version:
        return version_of(f"uniform {scheme}", self.plan(1.0, forms=(), fuse=True, schemes=(scheme,)))

    def dense(self, fused: bool) -> Version:
        return version_of(FUSED if fused else DENSE, self.plan(1.0, forms=(), fuse=fused))

    def dense_versions(self) -> tuple[Version, Version, Version]:
        """The fused dense model as transformers runs it, and as compressed models run, not fused and fused."""
        dense, fused = self.dense(fused=False), self.dense(fused=True)
        return replace(fused, name=PLAIN, plain=True), dense, fused

    def rounded(self, plan: Plan, rounding: Rounding, fused: bool = False) -> Version:
        """A plan with its dims rounded, except full ones; padding with zeros (``pad``) keeps the loss.

        Dims that the GPUs do not divide have no latency.
        """
        problem = self.problem_of(plan.budget.asked, forms=plan.recipe.space.forms, align=False, fuse=fused)
        choices = {}
        for choice in plan.weights:
            full = form_named(choice.form).full(choice.weight)
            dim = full if choice.dim == full else min(rounding.dim(choice.dim), full)
            choices[choice.name] = replace(choice, dim=dim)
        gpus = self.gpus if all(choice.divides(self.gpus) for choice in choices.values()) else 1
        table = _table_latency(problem, choices) if gpus == self.gpus else {}
        loss = plan.prediction.loss
        if rounding.way != "pad":
            changed = [choice for choice in choices.values() if choice.form != "dense"]
            curves = [problem.curves.of(form_named(choice.form), choice.weight) for choice in changed]
            loss = sum(float(curve.loss[each.dim]) for each, curve in zip(changed, curves, strict=True) if curve)
        name = f"{rounding.way} {rounding.step}{', fused' if fused else ''}"
        return Version(name, tuple(choices.values()), fused, loss, table, gpus=gpus)


def _table_latency(problem: Problem, choices: Mapping[str, WeightChoice]) -> dict[str, int | None]:
    rows = []
    for site in problem.sites:
        chosen = [choices[weight.name] for weight in site.weights]
        forms, dims = [choice.form for choice in chosen], [choice.dim for choice in chosen]
        rows.append(candidate_at(site, forms, dims, 0.0, problem.timing))
    return {str(workload): total(rows, ns_of(workload)) for workload in problem.timing.workloads}


def version_of(name: str, plan: Plan) -> Version:
    table = {workload.workload: workload.plan_ns for workload in plan.workloads}
    fused = plan.recipe.deployment.fuse is True
    return Version(name, plan.weights, fused, plan.prediction.loss, table, gpus=plan.gpus)


def versions_at(planner: Planner, budget: float) -> list[Version]:
    """The versions at a budget that are the same for every workload.

    The compressor's dims are the exact choice of ranks with any integer allowed, not fused. Padding to 64 is also timed
    fused, to separate the gain of fusing from that of alignment. With several GPUs the compressor's dims are those for
    one, and GAC's plan for one is also timed.
    """
    ranks: dict[str, Any] = {"forms": DEFAULT_FORMS[:1], "align": False}
    unaligned = planner.alone.plan(budget, **ranks)
    versions = [
        version_of(UNALIGNED, unaligned),
        version_of("uniform", planner.alone.plan(budget, rule="uniform", **ranks)),
        *(planner.rounded(unaligned, Rounding("pad", step)) for step in PADS),
        planner.rounded(unaligned, Rounding("pad", 64), fused=True),
        *(planner.rounded(unaligned, Rounding("nearest", step)) for step in NEAREST),
        version_of("GAC, parameters", planner.plan(budget, forms=DEFAULT_FORMS, fuse=True)),
        planner.by_default(budget),
    ]
    if planner.gpus > 1:
        versions.append(replace(planner.alone.by_default(budget), name=DEFAULT + FOR_ONE))
    return versions


def fastest_versions(planner: Planner, budget: float, workload: Workload, max_loss: float) -> list[Version]:
    """As ``fastest_version``; with several GPUs also the fastest for one, if the table has it and it exists."""
    versions = [fastest_version(planner, budget, workload, max_loss)]
    if planner.gpus > 1 and planner.alone.dense(fused=True).table_ns[str(workload)] is not None:
        with suppress(BudgetError):
            alone = fastest_version(planner.alone, budget, workload, max_loss)
            versions.append(replace(alone, name=alone.name + FOR_ONE))
    return versions


def fastest_version(
    planner: Planner, budget: float, workload: Workload, max_loss: float, more_forms: Sequence[str] = ()
) -> Version:
    """GAC's plan of least latency within the budget and the loss, with dims that are multiples of 32, fused or not.

    A BudgetError if no such choice loses as little.
    """
    best = _fastest(_problems(planner, budget, workload, more_forms), workload, max_loss)
    return replace(best, name=", ".join([best.name, *more_forms]))


def _problems(
    planner: Planner,
    budget: float,
    workload: Workload,
    more_forms: Sequence[str] = (),
    schemes: Sequence[str] = (DEFAULT_SCHEME,),
) -> list[Problem]:
    forms = (*DEFAULT_FORMS, *more_forms)
    options = {"workloads": [str(workload)], "align": COARSE, "forms": forms, "schemes": schemes}
    return [planner.problem_of(budget, fuse=fused, **options) for fused in (True, False)]


def _fastest(problems: Sequence[Problem], workload: Workload, max_loss: float) -> Version:
    versions, failures, column = list[Version](), list[BudgetError](), ns_of(workload)
    for problem in problems:
        deployment = problem.recipe.deployment
        try:
            limits = problem.dense.allowed(problem.recipe)
            problem.dense.amount(column)
            instance, _ = fastest(problem.candidates([*limits, column]), limits, {column: 1.0}, max_loss, max_loss)
            chosen = instance.chosen(instance.solve())
        except BudgetError as failure:
            failures.append(failure)
            continue
        pairs = zip(problem.sites, chosen, strict=True)
        choices = tuple(choice for site, candidate in pairs for choice in candidate.choices(site.weights))
        [ns] = summed_latency(chosen, problem.dense.rest_ns)
        loss, table = fsum(candidate.loss for candidate in chosen), {str(workload): ns}
        fused = deployment.fuse is True
        versions.append(Version(FASTEST, choices, fused, loss, table, gpus=deployment.tensor_parallel))
    if not versions:
        raise failures[0]
    return min(versions, key=lambda version: version.table_ns[str(workload)] or 0)


def scheme_versions(planner: Planner, budget: float, schemes: Sequence[str]) -> list[Version]:
    """All weights in each scheme, and unless the budget is 1 GAC's plans for it in 16 bits and in each scheme."""
    versions = [planner.uniform(scheme) for scheme in schemes]
    if budget < 1:
        versions.append(planner.by_default(budget))
        for scheme in schemes:
            versions.append(replace(planner.by_default(budget, schemes=(scheme,)), name=f"{DEFAULT}, in {scheme}"))
    return versions


def fastest_in_schemes(
    planner: Planner, workload: Workload, schemes: Sequence[str], references: Sequence[Version]
) -> tuple[list[Version], list[str]]:
    """The fastest versions that lose no more than each of the references, with the best scheme for every weight.

    Also returns a line with the reason for each that does not exist.
    """
    versions, missing = list[Version](), list[str]()
    problems = _problems(planner, 1.0, workload, schemes=(DEFAULT_SCHEME, *schemes))
    for reference in references:
        name = f"{FASTEST_IN_SCHEMES} {reference.name}"
        try:
            versions.append(replace(_fastest(problems, workload, reference.loss), name=name))
        except BudgetError as failure:
            missing.append(f"{name}: {failure}")
    return versions, missing


def with_head(
    planner: Planner, workload: Workload, schemes: Sequence[str], references: Sequence[Version], head: RoundedHead
) -> tuple[list[Version], list[str]]:
    """As ``fastest_in_schemes``, with the head quantised (not of the references), and all weights in each scheme."""
    suffix = f", head in {head.scheme}"
    possible = [replace(each, loss=each.loss - head.loss) for each in references if each.loss >= head.loss]
    versions, missing = fastest_in_schemes(planner, workload, schemes, possible)
    impossible = [each.name for each in references if each.loss < head.loss]
    missing += [f"{FASTEST_IN_SCHEMES} {name}: the head alone loses more" for name in impossible]
    versions = [*map(planner.uniform, schemes), *versions]
    quantized = [replace(each, name=each.name + suffix, loss=each.loss + head.loss, head=head) for each in versions]
    return quantized, [line + suffix for line in missing]


def check_cached(planner: Planner, budget: float, kv_cache: float, forms: Sequence[str]) -> None:
    """Raise a GacError, before anything is planned, if a form or its loss is unknown, or a limit is out of range."""
    known = {form for form, *_ in planner.problem.curves.by_key}
    if unknown := [form for form in forms if form_named(form).name not in known]:
        problem, expected = f"no loss curve of the form {unknown[0]} is known", f"one of {', '.join(sorted(known))}"
        raise ModelError(problem, expected, "Take another form.")
    planner.problem_of(budget, forms=forms, kv_cache=kv_cache, align=COARSE)


def cache_versions(planner: Planner, budget: float, kv_cache: float, forms: Sequence[str]) -> list[Version]:
    """Versions with a share of the KV cache: equal ranks in all layers, and GAC's plans of least loss, fused or not.

    Dims are multiples of 32, so that layers share kernels. Equal ranks use the first of the forms. A BudgetError if the
    forms cannot reach the share within the budget.
    """
    name = f"{kv_cache:g} of the cache"
    options: dict[str, dict[str, Any]] = {f"GAC, {name}": {"fuse": False}, f"GAC, {name}, fused": {"fuse": True}}
    if form_named(forms[0]).rule_resource:
        options = {f"uniform {forms[0]}, {name}": {"rule": UNIFORM, "forms": forms[:1]}} | options
    common = {"forms": forms, "kv_cache": kv_cache, "align": COARSE}
    return [version_of(label, planner.plan(budget, **(common | extra))) for label, extra in options.items()]


def compiled_versions(planner: Planner, versions: Sequence[Version]) -> list[Version]:
    """The dense model, the unaligned one and the fastest, with layers compiled by ``torch.compile``."""
    chosen = [planner.dense(fused=True), *(each for each in versions if each.name in (UNALIGNED, FASTEST))]
    return [replace(each, name=f"{each.name}, compiled", compiled=True) for each in chosen]
