"""Plans beside each other as rich tables; nothing is printed here."""

from collections.abc import Sequence

from rich.console import Group
from rich.text import Text

from gac.plan import Plan, PlanComparison, WeightChoice
from gac.reporting.frontier import cost_of
from gac.reporting.layout import legend, new_table

_UNLIKE = "predicted by different methods, shots or text: these losses are not of one scale"


def comparison_table(plans: Sequence[tuple[str, Plan]]) -> Group:
    """One row a plan: what it keeps, by how much it overshoots, and what it predicts.

    Args:
        plans: each with the name to show; all for one model.
    """
    workloads = list(dict.fromkeys(workload.workload for _, plan in plans for workload in plan.workloads))
    columns = ["kept", "over", "loss", "perplexity", *workloads, "aligned"]
    rows = [(name, *_figures(plan, workloads)) for name, plan in plans]
    table = new_table([("plan", "<"), *((column, ">") for column in columns)], rows)
    notes = ["kept, over: parameters of the targeted weights, and how many are beyond the limit", *_reading(plans)]
    return Group(table, legend("\n".join(notes)))


def _figures(plan: Plan, workloads: Sequence[str]) -> tuple[str, ...]:
    budget, prediction = plan.budget, plan.prediction
    latencies = ("unknown" if ns is None else f"{ns / 1e6:.3f} ms" for ns in (cost_of(plan, one) for one in workloads))
    kept, loss = (f"{budget.kept:.4f}", f"{budget.over:,}"), (f"{prediction.loss:.4f}", f"{prediction.perplexity:.2f}")
    return *kept, *loss, *latencies, f"{plan.aligned_fraction:.1%}"


def _reading(plans: Sequence[tuple[str, Plan]]) -> list[str]:
    first = plans[0][1]
    notes = ["loss, perplexity: predicted on calibration text; aligned: chosen dims that are multiples of 8"]
    return notes if all(first.compare(plan).same_prediction for _, plan in plans) else [*notes, _UNLIKE]


def differences_table(comparison: PlanComparison, most: int = 10) -> Group | Text:
    """The weights that two plans choose differently, those first whose parameters differ most.

    Args:
        most: how many of them.
    """
    differing, weights = len(comparison.differences), len(comparison.first.weights)
    if not differing:
        return Text(f"all {weights} weights become the same")
    ranked = sorted(comparison.differences, key=lambda one: -abs(one.params))
    rows = [(one.first.name, _choice(one.first), _choice(one.second), f"{one.params:+,}") for one in ranked[:most]]
    table = new_table([("weight", "<"), ("first", ">"), ("second", ">"), ("parameters", ">")], rows)
    shown = f", the {most} that differ most" if differing > most else ""
    return Group(table, legend(f"{differing} of {weights} weights differ{shown}"))


def _choice(weight: WeightChoice) -> str:
    return weight.form if weight.form == "dense" else f"{weight.form} {weight.dim}"
