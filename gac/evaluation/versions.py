"""What a benchmark times: the dense model, a compressor's own dims, what is usually done about them, GAC's plans."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import fsum
from typing import Any

from gac.allocation.candidates import candidate_at
from gac.allocation.decide import fastest, settled, summed_latency
from gac.allocation.problem import Problem, allowed, dense_total, total
from gac.allocation.rules import RULES
from gac.allocation.weight_rules import Rounding
from gac.core.errors import BudgetError, ModelError
from gac.core.workloads import Workload
from gac.forms import DEFAULT_FORMS, form_named
from gac.forms.loss_curves import LossCurves
from gac.forms.planned_sites import as_planned
from gac.models.sites import Site
from gac.plan.costs import BYTES, COSTS, KV_NUMBERS, ns_of
from gac.plan.evidence import RoundedHead
from gac.plan.plan import Plan, WeightChoice
from gac.plan.recipe import Recipe
from gac.plan.summary import FUSED
from gac.schemes import DEFAULT_SCHEME, scheme_named

DENSE, PLAIN = "dense", f"{FUSED}, plain"
UNALIGNED = "unaligned"
DEFAULT = "GAC, by default"
FASTEST = "GAC, parameters and latency"
FOR_ONE = ", for one GPU"
FASTEST_IN_SCHEMES = "GAC in schemes, loses no more than"
IN_TRITON = ", decode kernel in Triton"
PADS = (8, 16, 64)
NEAREST = (8, 32)
COARSE = 32
UNIFORM = f"uniform:nearest{COARSE}"


@dataclass(frozen=True, eq=False)
class Version:
    """One version of a model, to time.

    Attributes:
        name: as tables call it.
        choices: form and dim of every weight, in model order.
        fused: whether weights that read the same input run their first GEMMs as one; or the sites whose weights do.
        loss: predicted, nats a token more than dense.
        table_ns: what the latency table sums up to, by workload; None where it lacks a shape.
        compiled: whether the layers run through ``torch.compile`` with ``shape_padding``.
        triton: whether one row runs in Triton, in the decode kernel.
        gpus: over how many the weights are split that the table's sums are of.
        plain: whether norms, activations and rotary embeddings run as in transformers, not in one launch each.
        head: embedding and head where they are rounded; None: they are as in the dense model.
    """

    name: str
    choices: tuple[WeightChoice, ...]
    fused: bool | tuple[Site, ...]
    loss: float
    table_ns: Mapping[str, int | None]
    compiled: bool = False
    triton: bool = False
    gpus: int = 1
    plain: bool = False
    head: RoundedHead | None = None

    @property
    def params(self) -> int:
        """Of the targeted weights."""
        return sum(choice.params for choice in self.choices)

    @property
    def bytes(self) -> int:
        """Of the targeted weights, in their schemes."""
        return self._cost(BYTES)

    @property
    def kv_numbers(self) -> int:
        """Of a token, in the KV cache."""
        return self._cost(KV_NUMBERS)

    def _cost(self, name: str) -> int:
        of = COSTS[name]
        return sum(of(form_named(one.form), scheme_named(one.scheme), one.weight, one.dim) for one in self.choices)


@dataclass(frozen=True, eq=False)
class Planner:
    """What versions are planned with.

    Attributes:
        problem: its sites and curves are those of the model's family; its recipe has the workloads, and the GPUs over
            which weights are split.
    """

    problem: Problem

    @property
    def gpus(self) -> int:
        """Over how many GPUs weights are split, where nothing else is said."""
        return self.problem.recipe.deployment.tensor_parallel

    @property
    def alone(self) -> "Planner":
        """The same for one GPU."""
        recipe = self.problem.recipe
        recipe = replace(recipe, deployment=replace(recipe.deployment, tensor_parallel=1))
        return replace(self, problem=replace(self.problem, recipe=recipe))

    def problem_of(self, budget: float, **options: Any) -> Problem:
        """The same model, with another recipe.

        Args:
            options: as for ``Recipe.of``.
        """
        base = self.problem.recipe
        plain = {"method": base.measure.method, "workloads": base.deployment.workloads, "refit": "none"}
        options = plain | {"fuse": False, "latency": "any", "slack": 0, "tensor_parallel": self.gpus} | options
        recipe = Recipe.of(budget, **options)
        forms, fuse = recipe.space.forms, recipe.deployment.fuse
        sites = self.problem.sites
        if not fuse and not any(site.joint_weights(form_named(form)) for site in sites for form in forms):
            # Where no form takes several weights, each is chosen by itself: the same choices, and far fewer to weigh.
            sites = _one_by_one(sites)
        planned = as_planned(sites, forms, fuse)
        recipe = settled(recipe, planned, self.problem.profile)
        return replace(self.problem, sites=planned, recipe=recipe)

    def plan(self, budget: float, **options: Any) -> Plan:
        """A plan limited in parameters alone."""
        problem = self.problem_of(budget, **options)
        return RULES.get(problem.recipe.rule).decide(problem).plan

    def plan_by_default(self, budget: float, **options: Any) -> Plan:
        """What ``gac.allocate`` plans where nothing but a budget is asked for, and these options."""
        return self.plan(budget, **({"forms": DEFAULT_FORMS, "fuse": "auto", "latency": None, "slack": None} | options))

    def by_default(self, budget: float, **options: Any) -> Version:
        """That plan, to time."""
        plan = self.plan_by_default(budget, **options)
        sites = as_planned(self.problem.sites, plan.recipe.space.forms, "auto")
        shared = tuple(site for site, one in zip(sites, plan.sites, strict=True) if one.shared)
        return replace(version_of(DEFAULT, plan), fused=shared)

    def uniform(self, scheme: str) -> Version:
        """Every weight dense in one scheme, fused."""
        return version_of(f"uniform {scheme}", self.plan(1.0, forms=(), fuse=True, schemes=(scheme,)))

    def dense(self, fused: bool, triton: bool = False) -> Version:
        """The dense model."""
        plan = self.plan(1.0, forms=(), fuse=fused, decode_kernel=_kernel(triton))
        return version_of((FUSED if fused else DENSE) + (IN_TRITON if triton else ""), plan)

    def dense_versions(self) -> tuple[Version, Version, Version]:
        """The dense model as transformers runs it but for shared GEMMs; as it is, and fused, as compressed ones run."""
        dense, fused = self.dense(fused=False), self.dense(fused=True)
        return replace(fused, name=PLAIN, plain=True), dense, fused

    def rounded(self, plan: Plan, rounding: Rounding, fused: bool = False) -> Version:
        """A plan's dims rounded, a full one left as it is, with the loss that they then have.

        Where zeros fill them up (``pad``) the loss stays the plan's. Dims that the GPUs do not divide have no latency.
        """
        problem = self.problem_of(plan.budget.asked, forms=plan.recipe.space.forms, align=False, fuse=fused)
        choices = {choice.name: _rounded(choice, rounding) for choice in plan.weights}
        gpus = self.gpus if all(one.divides(self.gpus) for one in choices.values()) else 1
        table = _summed(problem, choices) if gpus == self.gpus else {}
        loss = plan.prediction.loss if rounding.way == "pad" else _loss(choices.values(), problem.curves)
        name = f"{rounding.way} {rounding.step}{', fused' if fused else ''}"
        return Version(name, tuple(choices.values()), fused, loss, table, gpus=gpus)


def _summed(problem: Problem, choices: Mapping[str, WeightChoice]) -> dict[str, int | None]:
    """What the table sums up to for these choices, by workload."""
    rows = []
    for site in problem.sites:
        ours = [choices[weight.name] for weight in site.weights]
        rows.append(candidate_at(site, [one.form for one in ours], [one.dim for one in ours], 0.0, problem.timing))
    return {str(workload): total(rows, ns_of(workload)) for workload in problem.workloads}


def version_of(name: str, plan: Plan) -> Version:
    """A plan as it is."""
    table, run = {workload.workload: workload.plan_ns for workload in plan.workloads}, plan.recipe.deployment
    loss = plan.prediction.loss
    return Version(name, plan.weights, run.fuse is True, loss, table, triton=run.triton, gpus=plan.gpus)


def versions_at(planner: Planner, budget: float) -> list[Version]:
    """The versions at a budget that are the same for every workload.

    The compressor's own dims are the exact choice of ranks, of which any integer will do, without fusing. Padding to
    64 is there with fusing too, so that what fusing wins is not counted as what alignment does. Over several GPUs a
    compressor's dims are those for one, and GAC's plan for one is there too.
    """
    ranks: dict[str, Any] = {"forms": DEFAULT_FORMS[:1], "align": False}
    own = planner.alone.plan(budget, **ranks)
    found = [version_of(UNALIGNED, own), version_of("uniform", planner.alone.plan(budget, rule="uniform", **ranks))]
    found += [planner.rounded(own, Rounding("pad", step)) for step in PADS]
    found.append(planner.rounded(own, Rounding("pad", 64), fused=True))
    found += [planner.rounded(own, Rounding("nearest", step)) for step in NEAREST]
    found.append(version_of("GAC, parameters", planner.plan(budget, forms=DEFAULT_FORMS, fuse=True)))
    found.append(planner.by_default(budget))
    if planner.gpus > 1:
        found.append(replace(planner.alone.by_default(budget), name=DEFAULT + FOR_ONE))
    return found


def fastest_versions(planner: Planner, budget: float, workload: Workload, most_loss: float) -> list[Version]:
    """What ``fastest_version`` finds; for workloads of one row whose shapes the table holds in Triton, in it too.

    There the dense model comes first. Over several GPUs what it finds for one is the last, where the table
    has that and it can be had.

    Raises:
        BudgetError: no aligned choice within the budget loses as little.
    """
    found = [fastest_version(planner, budget, workload, most_loss)]
    if workload.rows == 1:
        dense = planner.dense(fused=True, triton=True)
        if dense.table_ns[str(workload)] is not None:
            found += [dense, fastest_version(planner, budget, workload, most_loss, triton=True)]
    if planner.gpus > 1 and planner.alone.dense(fused=True).table_ns[str(workload)] is not None:
        with suppress(BudgetError):
            alone = fastest_version(planner.alone, budget, workload, most_loss)
            found.append(replace(alone, name=alone.name + FOR_ONE))
    return found


def fastest_version(
    planner: Planner,
    budget: float,
    workload: Workload,
    most_loss: float,
    triton: bool = False,
    more_forms: Sequence[str] = (),
    schemes: Sequence[str] = (DEFAULT_SCHEME,),
) -> Version:
    """GAC's plan of least latency that keeps the budget and loses at most that much, in dims that are multiples of 32.

    Fused or not, as the table says is faster; where neither can be had, the error says so.

    Args:
        triton: whether one row runs in Triton.
        more_forms: beside those that compete by default.
        schemes: that compete.

    Raises:
        BudgetError: no aligned choice within the budget loses as little.
    """
    race = _race(planner, budget, workload, triton, more_forms, schemes)
    best = _fastest(race, workload, most_loss)
    return replace(best, name=", ".join([best.name, *more_forms]))


@dataclass(frozen=True, eq=False)
class _Racing:
    """The choices of which the fastest is looked for, with shared GEMMs or without; the same for every loss."""

    problem: Problem
    workload: Workload
    fused: bool
    triton: bool

    def fastest(self, most_loss: float) -> Version:
        """The choice of least latency within the problem's budget and that loss."""
        problem, column = self.problem, ns_of(self.workload)
        limits = allowed(problem.recipe, problem.dense)
        dense_total(problem.dense, column)
        instance, _ = fastest(problem.candidates([*limits, column]), limits, {column: 1.0}, most_loss, most_loss)
        chosen, sites = instance.chosen(instance.solve()), problem.sites
        choices = [choice for site, one in zip(sites, chosen, strict=True) for choice in one.choices(site.weights)]
        [ns] = summed_latency(chosen)
        name, loss = FASTEST + (IN_TRITON if self.triton else ""), fsum(one.loss for one in chosen)
        table, gpus = {str(self.workload): ns}, problem.recipe.deployment.tensor_parallel
        return Version(name, tuple(choices), self.fused, loss, table, triton=self.triton, gpus=gpus)


def _race(
    planner: Planner, budget: float, workload: Workload, triton: bool, more_forms: Sequence[str], schemes: Sequence[str]
) -> list[_Racing]:
    options = {"workloads": [str(workload)], "decode_kernel": _kernel(triton), "align": COARSE}
    options |= {"forms": (*DEFAULT_FORMS, *more_forms), "schemes": schemes}
    return [
        _Racing(planner.problem_of(budget, fuse=fused, **options), workload, fused, triton) for fused in (True, False)
    ]


def _fastest(race: Sequence[_Racing], workload: Workload, most_loss: float) -> Version:
    found: list[Version] = []
    failures: list[BudgetError] = []
    for one in race:
        try:
            found.append(one.fastest(most_loss))
        except BudgetError as failure:
            failures.append(failure)
    if not found:
        raise failures[0]
    return min(found, key=lambda version: version.table_ns[str(workload)] or 0)


def scheme_versions(planner: Planner, budget: float, schemes: Sequence[str]) -> list[Version]:
    """Each scheme in all weights, and GAC's plans for the budget in 16 bits and in it: the same for every workload.

    Args:
        budget: kept fraction of the parameters; with 1 there is nothing to plan.
    """
    found = [planner.uniform(scheme) for scheme in schemes]
    if budget < 1:
        found.append(planner.by_default(budget))
        found += [
            replace(planner.by_default(budget, schemes=(scheme,)), name=f"{DEFAULT}, in {scheme}") for scheme in schemes
        ]
    return found


def fastest_in_schemes(
    planner: Planner, workload: Workload, schemes: Sequence[str], bars: Sequence[Version]
) -> tuple[list[Version], list[str]]:
    """The fastest that lose no more than each of the bars, where every weight has the scheme that is best for it.

    Returns:
        The versions, and a line for each that cannot be had, with the reason.
    """
    found, missing = list[Version](), list[str]()
    race = _race(planner, 1.0, workload, False, (), (DEFAULT_SCHEME, *schemes))
    for bar in bars:
        name = f"{FASTEST_IN_SCHEMES} {bar.name}"
        try:
            one = _fastest(race, workload, bar.loss)
        except BudgetError as failure:
            missing.append(f"{name}: {failure}")
        else:
            found.append(replace(one, name=name))
    return found, missing


def with_head(
    planner: Planner, workload: Workload, schemes: Sequence[str], bars: Sequence[Version], head: RoundedHead
) -> tuple[list[Version], list[str]]:
    """Every weight in each scheme, and the fastest that lose no more than the bars, with embedding and head rounded.

    Args:
        bars: whose own heads are not rounded.

    Returns:
        As ``fastest_in_schemes``.
    """
    said = f", head in {head.scheme}"
    left = [replace(bar, loss=bar.loss - head.loss) for bar in bars if bar.loss >= head.loss]
    found, missing = fastest_in_schemes(planner, workload, schemes, left)
    missing += [f"{FASTEST_IN_SCHEMES} {bar.name}: the head alone loses more" for bar in bars if bar.loss < head.loss]
    found = [*map(planner.uniform, schemes), *found]
    rounded = [replace(one, name=one.name + said, loss=one.loss + head.loss, head=head) for one in found]
    return rounded, [one + said for one in missing]


def check_cached(planner: Planner, budget: float, kv_cache: float, forms: Sequence[str]) -> None:
    """Refuse what ``cache_versions`` cannot plan, as far as that is known before anything is planned.

    Raises:
        ModelError: nobody knows what a form loses.
        GacError: a form is unknown, or a limit is none.
    """
    known = {form for form, *_ in planner.problem.curves.by_key}
    if unknown := [form for form in forms if form_named(form).name not in known]:
        raise ModelError(
            f"no loss curve of the form {unknown[0]} is known",
            f"one of {', '.join(sorted(known))}",
            "Take another form.",
        )
    planner.problem_of(budget, forms=forms, kv_cache=kv_cache, align=COARSE)


def cache_versions(planner: Planner, budget: float, kv_cache: float, forms: Sequence[str]) -> list[Version]:
    """With a share of the KV cache: equal ranks in all layers, and GAC's plans of least loss, also with shared GEMMs.

    Dims are multiples of 32, so that layers have few kernels between them.

    Args:
        forms: that compete with staying dense; equal ranks have the first.

    Raises:
        BudgetError: the forms cannot reach the share, or not within the budget.
        ModelError: nobody knows what a form loses.
    """
    check_cached(planner, budget, kv_cache, forms)
    name, limits = f"{kv_cache:g} of the cache", {"kv_cache": kv_cache, "align": COARSE}
    asked: dict[str, dict[str, Any]] = {f"GAC, {name}": {"fuse": False}, f"GAC, {name}, fused": {"fuse": True}}
    if form_named(forms[0]).rule_resource:
        asked = {f"uniform {forms[0]}, {name}": {"rule": UNIFORM, "forms": forms[:1]}} | asked
    return [version_of(one, planner.plan(budget, **{"forms": forms} | limits | how)) for one, how in asked.items()]


def compiled_versions(planner: Planner, versions: Sequence[Version]) -> list[Version]:
    """The dense model, the unaligned one and the fastest, their layers through ``torch.compile``."""
    chosen = [planner.dense(fused=True), *(one for one in versions if one.name in (UNALIGNED, FASTEST))]
    return [replace(one, name=f"{one.name}, compiled", compiled=True) for one in chosen]


def _kernel(triton: bool) -> str:
    return "triton" if triton else "torch"


def _one_by_one(sites: Sequence[Site]) -> list[Site]:
    return [Site(weight.name, site.layer, weight.name, (weight,)) for site in sites for weight in site.weights]


def _rounded(choice: WeightChoice, rounding: Rounding) -> WeightChoice:
    full = form_named(choice.form).full(choice.weight)
    return choice if choice.dim == full else replace(choice, dim=min(rounding.dim(choice.dim), full))


def _loss(choices: Iterable[WeightChoice], curves: LossCurves) -> float:
    """What these ranks lose; dense weights nothing."""
    changed = [(one, curves.of(form_named(one.form), one.weight)) for one in choices if not one.is_dense]
    return sum(float(curve.loss[one.dim]) for one, curve in changed if curve)
