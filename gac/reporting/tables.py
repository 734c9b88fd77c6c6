"""Plans as tables, by themselves and side by side."""

from collections.abc import Iterable, Sequence

from rich.console import Group
from rich.text import Text

from gac.core.display import Table
from gac.core.rich_tables import stacked
from gac.core.words import duration, megabytes
from gac.plan.costs import COSTS
from gac.plan.layers import choice
from gac.plan.plan import Plan, PlanComparison
from gac.plan.summary import facts, lines, speed, stored


def plan_summary(plan: Plan) -> Text:
    first, rest = plan.summary().split("\n", 1)
    return Text.assemble((first, "bold"), f"\n{rest}")


def plan_line(plan: Plan) -> Text:
    return Text(lines(fact for fact in facts(plan) if fact[0] in ("parameters", "alignment", "latency")))


def plan_figures(plan: Plan, workloads: Iterable[str]) -> dict[str, str]:
    """Figures that plans are compared by: sizes, excess over the budget, predictions."""
    ns = {timed.workload: timed.plan_ns for timed in plan.workloads}
    return {
        "kept": f"{plan.budget.kept:.4f}",
        "over": f"{plan.budget.over:,}",
        "loss": f"{plan.prediction.loss:.4f}" if plan.measured.predicted else "unknown",
        "perplexity": f"{plan.prediction.perplexity:,.2f}" if plan.measured.predicted else "unknown",
        **{workload: duration(ns.get(workload)) for workload in workloads},
        "aligned": f"{plan.aligned_fraction:.1%}",
    }


def memory_figures(plan: Plan) -> dict[str, str]:
    """Bytes of the targeted weights and of the model, bits a parameter, and what the KV cache keeps."""
    weights, model = plan.bytes, plan.model_bytes
    cached = {cost.label: plan.amount(name) for name, cost in COSTS.items() if not cost.of_weights}
    return {
        "weights": megabytes(weights[0]),
        "bits": f"{plan.bits[0]:.2f}",
        "model": megabytes(model[0]),
        "of the model": f"{model[0] / model[1]:.4f}",
        **{label: f"{used / total:.4f}" if total else "" for label, (used, total) in cached.items()},
    }


def memory_table(plans: Sequence[tuple[str, Plan]]) -> Table:
    """One row a plan, with the name to show, and last the dense model; all for one model."""
    plan, figures = plans[0][1], memory_figures(plans[0][1])
    dense = {name: "1.0000" if value else "" for name, value in figures.items()} | {
        "weights": megabytes(plan.bytes[1]),
        "bits": f"{8 * plan.bytes[1] / plan.budget.total:.2f}",
        "model": megabytes(plan.model_bytes[1]),
    }
    notes = [
        "weights: the targeted ones, with scales and zero points; bits: of these, for each dense parameter",
        "model: with embeddings, head and all else; what is not rounded counts as 16 bits",
        *(f"{cost.label}: {cost.unit}, over the dense model's" for cost in COSTS.values() if not cost.of_weights),
    ]
    rows = [(name, *memory_figures(plan).values(), stored(plan)) for name, plan in plans]
    columns = [("", "<"), *((column, ">") for column in figures), ("schemes", "<")]
    return Table(columns, [*rows, ("dense", *dense.values(), "")], notes="\n".join(notes))


def dense_figures(plans: Sequence[Plan], workloads: Iterable[str]) -> dict[str, str]:
    """The same figures of the dense model, where the plans agree on its latency."""
    figures = {"kept": "1.0000"}
    for name in workloads:
        times = {each.dense_ns for plan in plans for each in plan.workloads if each.workload == name}
        if len(known := times - {None}) == 1:
            figures[name] = duration(*known)
    return figures


def comparison_table(plans: Sequence[tuple[str, Plan]]) -> Group:
    """One row a plan and last the dense model: sizes, excess over the budget, predictions; then their memory."""
    workloads = dict.fromkeys(workload.workload for _, plan in plans for workload in plan.workloads)
    first = plans[0][1]
    columns = list(plan_figures(first, workloads))
    rows = [(name, *plan_figures(plan, workloads).values()) for name, plan in plans]
    dense = dense_figures([plan for _, plan in plans], workloads)
    rows.append(("dense", *(dense.get(column, "") for column in columns)))
    notes = [
        "kept, over: parameters of the targeted weights, and how many are beyond the limit",
        "loss, perplexity: predicted on calibration text; aligned: chosen dims that are multiples of 8",
    ]
    if not all(first.compare(plan).same_prediction for _, plan in plans):
        notes.append("predicted by different methods, shots or text: these losses are not of one scale")
    notes += [f"speed of {name}: {words}" for name, plan in plans if (words := speed(plan))]
    headings = [("plan", "<"), *((column, ">") for column in columns)]
    return stacked([Table(headings, rows, notes="\n".join(notes)), memory_table(plans)])


def differences_table(comparison: PlanComparison, most: int = 10) -> Table | Text:
    """The weights that two plans choose differently, at most so many, sorted by their difference in bytes."""
    differing, weights = len(comparison.differences), len(comparison.first.weights)
    if not differing:
        return Text(f"all {weights} weights become the same")
    ranked = sorted(comparison.differences, key=lambda pair: -abs(pair.bytes))
    rows = [
        (pair.first.name, choice(pair.first), choice(pair.second), f"{pair.params:+,}", f"{pair.bytes:+,}")
        for pair in ranked[:most]
    ]
    columns = [("weight", "<"), *((name, ">") for name in ("first", "second", "parameters", "bytes"))]
    shown = f", the {most} that differ most" if differing > most else ""
    return Table(columns, rows, notes=f"{differing} of {weights} weights differ{shown}")
