"""Who runs in a benchmark: the dense model, a compressor's own dims, what is usually done about them, GAC's plans."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gac.allocation.assemble import Provenance, total_ns
from gac.allocation.candidates import candidate_at
from gac.allocation.fastest import Fastest, fastest
from gac.allocation.problem import Problem
from gac.allocation.rules import RULES
from gac.allocation.weight_rules import Rounding
from gac.curves import LossCurves
from gac.errors import BudgetError
from gac.forms import DEFAULT_FORMS, form_named
from gac.forms.planned_sites import as_planned
from gac.models.sites import Site
from gac.plan import Plan, WeightChoice
from gac.workloads import Workload

DENSE, FUSED = "dense", "dense, fused"
UNALIGNED = "unaligned"
FASTEST = "GAC, parameters and latency"
ONE_ROW = ", one row in Triton"
PADS = (8, 16, 64)
NEAREST = (8, 32)
COARSE = 32


@dataclass(frozen=True, eq=False)
class Contestant:
    """One model to time.

    Attributes:
        name: as tables call it.
        choices: form and dim of every weight, in model order.
        fused: whether weights that read the same input run their first GEMMs as one.
        loss: predicted, nats a token more than dense.
        table_ns: what the latency table sums up to, by workload; None where it lacks a shape.
        compiled: whether the layers run through ``torch.compile`` with ``shape_padding``.
        one_row: whether one row runs in Triton.
    """

    name: str
    choices: tuple[WeightChoice, ...]
    fused: bool
    loss: float
    table_ns: Mapping[str, int | None]
    compiled: bool = False
    one_row: bool = False

    @property
    def params(self) -> int:
        """Of the targeted weights."""
        return sum(choice.params for choice in self.choices)

    @property
    def neurons(self) -> float:
        """The fraction of the MLPs' neurons that there are."""
        kept = total = 0
        for choice in self.choices:
            if choice.neurons == "out":
                weight, form = choice.weight, form_named(choice.form)
                total += weight.out_features
                kept += form.size(weight, choice.dim) if form.shortens(weight) == "out" else weight.out_features
        return kept / total if total else 1.0


@dataclass(frozen=True, eq=False)
class Field:
    """What contestants are made from.

    Attributes:
        sites: of the model, as its family gives them.
        curves: of the model.
        problem: for its profile and workloads; its own sites, forms and alignment are those of GAC's plans, unfused.
        made_from: of its plans.
    """

    sites: Sequence[Site]
    curves: LossCurves
    problem: Problem
    made_from: Provenance

    def posed(
        self,
        forms: Sequence[str],
        align: bool | int,
        fused: bool,
        workloads: Sequence[Workload] | None = None,
        one_row: bool = False,
    ) -> tuple[Problem, Provenance]:
        """The same model with these forms, alignment and fusing, and one row in Triton or not."""
        shortened = any(site.taken_by(form_named(form)) for site in self.sites for form in forms)
        # Where no form takes several weights, each is chosen by itself: the same choices, and far fewer to weigh.
        sites = self.sites if shortened or fused else _one_by_one(self.sites)
        planned = as_planned(sites, forms, fused)
        problem = replace(
            self.problem,
            sites=planned,
            curves=self.curves,
            forms=tuple(forms),
            align=align,
            workloads=self.problem.workloads if workloads is None else tuple(workloads),
            one_row=one_row,
        )
        return problem, replace(self.made_from, forms=tuple(forms), align=align, fused=fused, one_row=one_row)

    def plan(
        self,
        budget: float,
        forms: Sequence[str],
        align: bool | int,
        fused: bool,
        rule: str = "loss",
        one_row: bool = False,
    ) -> Plan:
        """A plan limited in parameters alone."""
        problem, made_from = self.posed(forms, align, fused, one_row=one_row)
        return RULES.get(rule).decide(problem, budget, {}, made_from).plan

    def dense(self, fused: bool, one_row: bool = False) -> Contestant:
        """The dense model."""
        plan = self.plan(1.0, (), True, fused, one_row=one_row)
        return contestant((FUSED if fused else DENSE) + (ONE_ROW if one_row else ""), plan)

    def padded(self, plan: Plan, name: str, step: int, fused: bool) -> Contestant:
        """A plan's dims brought up to multiples of ``step``, as zeros would fill them: the loss stays the plan's."""
        problem, _ = self.posed(plan.forms, False, fused)
        dims = {choice.name: _rounded(choice, Rounding("pad", step)) for choice in plan.weights}
        return self._with_dims(plan, name, dims, problem, fused, plan.prediction.loss)

    def nearest(self, plan: Plan, step: int) -> Contestant:
        """A plan's dims rounded to the nearest multiples of ``step``, with the loss that they then have."""
        problem, _ = self.posed(plan.forms, False, False)
        dims = {choice.name: _rounded(choice, Rounding("nearest", step)) for choice in plan.weights}
        loss = _loss(plan, dims, problem.curves)
        return self._with_dims(plan, f"nearest {step}", dims, problem, False, loss)

    def _with_dims(
        self, plan: Plan, name: str, dims: Mapping[str, int], problem: Problem, fused: bool, loss: float
    ) -> Contestant:
        choices = {choice.name: replace(choice, dim=dims[choice.name]) for choice in plan.weights}
        rows = []
        for site in problem.sites:
            ours = [choices[weight.name] for weight in site.weights]
            rows.append(candidate_at(site, [one.form for one in ours], [one.dim for one in ours], 0.0, problem.timing))
        table = {str(workload): total_ns(column, rows)[0] for column, workload in enumerate(problem.workloads)}
        return Contestant(name, tuple(choices.values()), fused, loss, table)


def contestant(name: str, plan: Plan) -> Contestant:
    """A plan as it is."""
    table = {workload.workload: workload.plan_ns for workload in plan.workloads}
    return Contestant(name, plan.weights, plan.fused is True, plan.prediction.loss, table, one_row=plan.one_row)


def shared_contestants(field: Field, budget: float) -> list[Contestant]:
    """Those of a budget that are the same for every workload.

    The compressor's own dims are the exact choice of ranks, of which any integer will do, without fusing. Padding to
    64 is there with fusing too, so that what fusing wins is not counted as what alignment does.
    """
    own = field.plan(budget, ("low_rank",), False, False)
    found = [
        contestant(UNALIGNED, own),
        contestant("uniform", field.plan(budget, ("low_rank",), False, False, "uniform")),
    ]
    found += [field.padded(own, f"pad {step}", step, fused=False) for step in PADS]
    found.append(field.padded(own, "pad 64, fused", 64, fused=True))
    found += [field.nearest(own, step) for step in NEAREST]
    found.append(contestant("GAC, parameters", field.plan(budget, DEFAULT_FORMS, True, True)))
    return found


def fastest_contestants(field: Field, budget: float, workload: Workload, most_loss: float) -> list[Contestant]:
    """GAC's plan of least latency that keeps the budget and loses at most that much, in dims that are multiples of 32.

    Fused or not, whichever the table says is faster; where neither can be had, the error says so. For workloads of one
    row whose shapes the table holds in Triton, the dense model and GAC's plan with it follow.

    Raises:
        BudgetError: no aligned choice within the budget loses as little.
    """
    found = [_fastest(field, budget, workload, most_loss, one_row=False)]
    if workload.rows == 1:
        dense = field.dense(fused=True, one_row=True)
        if dense.table_ns[str(workload)] is not None:
            found += [dense, _fastest(field, budget, workload, most_loss, one_row=True)]
    return found


def _fastest(field: Field, budget: float, workload: Workload, most_loss: float, one_row: bool) -> Contestant:
    found: list[tuple[Fastest, bool]] = []
    failures: list[BudgetError] = []
    for fused in (True, False):
        problem, _ = field.posed(DEFAULT_FORMS, COARSE, fused, [workload], one_row)
        try:
            found.append((fastest(problem, budget, str(workload), most_loss), fused))
        except BudgetError as failure:
            failures.append(failure)
    if not found:
        raise failures[0]
    best, fused = min(found, key=lambda pair: pair[0].ns)
    name, table = FASTEST + (ONE_ROW if one_row else ""), {str(workload): best.ns}
    return Contestant(name, best.choices, fused, best.loss, table, one_row=one_row)


def compiled_contestants(field: Field, contestants: Sequence[Contestant]) -> list[Contestant]:
    """The dense model, the unaligned one and the fastest, their layers through ``torch.compile``."""
    chosen = [field.dense(fused=True), *(one for one in contestants if one.name in (UNALIGNED, FASTEST))]
    return [replace(one, name=f"{one.name}, compiled", compiled=True) for one in chosen]


def _one_by_one(sites: Sequence[Site]) -> list[Site]:
    return [Site(weight.name, site.layer, weight.name, (weight,)) for site in sites for weight in site.weights]


def _rounded(choice: WeightChoice, rounding: Rounding) -> int:
    """No more than the full dim, which stays as it is."""
    full = form_named(choice.form).full(choice.weight)
    return full if choice.dim == full else min(rounding.dim(choice.dim), full)


def _loss(plan: Plan, dims: Mapping[str, int], curves: LossCurves) -> float:
    """What these ranks lose; dense weights nothing."""
    changed = [(one, curves.of(form_named(one.form), one.weight)) for one in plan.weights if one.form != "dense"]
    return sum(float(curve.loss[dims[one.name]]) for one, curve in changed if curve)
