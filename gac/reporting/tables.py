"""Plans as rich tables, at most 100 columns wide: one by itself, and several beside each other; nothing is printed."""

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Group
from rich.text import Text

from gac.forms import DENSE, form_named
from gac.models.sites import Site, short_names
from gac.plan.plan import Plan, PlanComparison, SiteChoice, WeightChoice
from gac.plan.summary import FUSED, latencies, speed, stored
from gac.reporting.formatting import choice, duration, legend, megabytes, new_table
from gac.schemes import DEFAULT_SCHEME

# --- one plan -------------------------------------------------------------------------------------------------------


def plan_summary(plan: Plan) -> Text:
    """``Plan.summary`` with its first line standing out."""
    text = Text(plan.summary())
    text.stylize("bold", 0, text.plain.index("\n"))
    return text


def plan_table(plan: Plan) -> Group:
    """One row a layer: the form and dim of every weight, the parameters kept and the loss in nats a token."""
    layers = weights_by_layer(plan)
    kinds = kinds_of(layers)
    columns = [("layer", ">"), *((kind.removesuffix("_proj"), ">") for kind in kinds), ("kept", ">"), ("loss", ">")]
    table = new_table(columns)
    for layer, weights in layers.items():
        sites = [site for site in plan.sites if site.layer == layer]
        kept = sum(site.params for site in sites) / sum(site.dense_params for site in sites)
        cells = (cell_of(weights[kind]) if kind in weights else "" for kind in kinds)
        table.add_row(str(layer), *cells, f"{kept:.3f}", f"{sum(site.loss for site in sites):.4f}")
    return Group(table, legend(legend_of(plan)))


def short_names_of(sites: Iterable[Site | SiteChoice]) -> dict[str, str]:
    """What to call every weight of a model, by its name: ``short_names`` layer by layer."""
    layers: dict[int, list[str]] = {}
    for site in sites:
        layers.setdefault(site.layer, []).extend(weight.name for weight in site.weights)
    return {name: short for names in layers.values() for name, short in short_names(names).items()}


def weights_by_layer(plan: Plan) -> dict[int, dict[str, WeightChoice]]:
    """Layer by layer, what every weight becomes, by its short name."""
    called = short_names_of(plan.sites)
    layers: dict[int, dict[str, WeightChoice]] = {}
    for site in plan.sites:
        layers.setdefault(site.layer, {}).update({called[weight.name]: weight for weight in site.weights})
    return layers


def kinds_of(layers: Mapping[int, Mapping[str, WeightChoice]]) -> list[str]:
    """The short names in any of the layers, in the order of the model."""
    return list(dict.fromkeys(kind for weights in layers.values() for kind in weights))


def cell_of(weight: WeightChoice) -> str:
    """Form, dim and a scheme that rounds in a few letters: ``r 192 w4a16``; a dash for dense."""
    form = form_named(weight.form)
    told = form.symbol if form.latency.axis(weight.weight) is None else form.label(weight.dim)
    return told if weight.scheme == DEFAULT_SCHEME else f"{told} {weight.scheme}"


def legend_of(plan: Plan) -> str:
    """What the letters of the cells mean, of the forms in the plan and of dense, and that schemes round."""
    names = dict.fromkeys(weight.form for weight in plan.weights if not weight.is_dense)
    told = dict.fromkeys(f"{form.symbol}: {form.meaning}" for form in (*map(form_named, names), DENSE))
    rounded = sorted({weight.scheme for weight in plan.weights} - {DEFAULT_SCHEME})
    return "; ".join([*told, *([f"{', '.join(rounded)}: rounded"] if rounded else [])])


def plan_line(plan: Plan) -> Text:
    """Budget, alignment and predicted latencies of a plan, a line each."""
    budget, chosen = plan.budget, sum(plan.alignment.values())
    return Text(
        f"budget     {budget.used:,} of {budget.total:,} targeted parameters; {budget.limit:,} allowed\n"
        f"alignment  {plan.aligned_fraction:.1%} of {chosen} chosen dims are multiples of 8"
        + "".join(f"\nlatency    {told}, predicted" for told in latencies(plan))
    )


# --- plans beside each other ----------------------------------------------------------------------------------------


def plan_figures(plan: Plan, workloads: Iterable[str]) -> dict[str, str]:
    """What plans are compared by: what one keeps, by how much it overshoots, and what it predicts."""
    ns = {one.workload: one.plan_ns for one in plan.workloads}
    return {
        "kept": f"{plan.budget.kept:.4f}",
        "over": f"{plan.budget.over:,}",
        "loss": f"{plan.prediction.loss:.4f}" if plan.measured.predicted else "unknown",
        "perplexity": f"{plan.prediction.perplexity:,.2f}" if plan.measured.predicted else "unknown",
        **{workload: duration(ns.get(workload)) for workload in workloads},
        "aligned": f"{plan.aligned_fraction:.1%}",
    }


def memory_figures(plan: Plan) -> dict[str, str]:
    """What a plan makes of the bytes of the targeted weights and of the model, of bits, and of the cache."""
    weights, model, (cached, whole) = plan.bytes, plan.model_bytes, plan.kv_numbers
    return {
        "weights": megabytes(weights[0]),
        "bits": f"{plan.bits[0]:.2f}",
        "model": megabytes(model[0]),
        "of the model": f"{model[0] / model[1]:.4f}",
        "cache": f"{cached / whole:.4f}" if whole else "",
    }


def memory_table(plans: Sequence[tuple[str, Plan]]) -> Group:
    """One row a plan, and last what the dense model takes.

    Args:
        plans: each with the name to show; all for one model.
    """
    plan, columns = plans[0][1], memory_figures(plans[0][1])
    table = new_table([("", "<"), *((column, ">") for column in columns), ("schemes", "<")])
    for name, one in plans:
        table.add_row(name, *memory_figures(one).values(), stored(one))
    bits = 8 * plan.bytes[1] / plan.budget.total
    cache = "1.0000" if plan.kv_numbers[1] else ""
    dense = megabytes(plan.bytes[1]), f"{bits:.2f}", megabytes(plan.model_bytes[1]), "1.0000", cache
    table.add_row("dense", *dense, "")
    notes = (
        "weights: the targeted ones, with scales and zero points; bits: of these, for each dense parameter\n"
        "model: with embeddings, head and all else; what is not rounded counts as 16 bits\n"
        "cache: numbers that the KV cache keeps of a token, over the dense model's"
    )
    return Group(table, legend(notes))


def dense_figures(plans: Sequence[Plan], workloads: Iterable[str]) -> dict[str, dict[str, str]]:
    """Likewise of the dense model, GEMM by GEMM and with shared ones, where the plans agree on what that takes."""
    found: dict[str, dict[str, str]] = {"dense": {}, FUSED: {}}
    for name in workloads:
        timed = [one for plan in plans for one in plan.workloads if one.workload == name]
        for what, known in (("dense", {one.dense_ns for one in timed}), (FUSED, {one.fused_ns for one in timed})):
            if len(known := known - {None}) == 1 and (what == "dense" or name in found["dense"]):
                found[what][name] = duration(*known)
    return {what: {"kept": "1.0000", **times} for what, times in found.items() if times}


def comparison_table(plans: Sequence[tuple[str, Plan]]) -> Group:
    """One row a plan: what it keeps, by how much it overshoots, and what it predicts; last what the dense model takes.

    Args:
        plans: each with the name to show; all for one model.
    """
    workloads = dict.fromkeys(workload.workload for _, plan in plans for workload in plan.workloads)
    first = plans[0][1]
    columns = list(plan_figures(first, workloads))
    rows = [(name, *plan_figures(plan, workloads).values()) for name, plan in plans]
    dense = dense_figures([plan for _, plan in plans], workloads)
    rows += [(name, *(figures.get(column, "") for column in columns)) for name, figures in dense.items()]
    table = new_table([("plan", "<"), *((column, ">") for column in columns)], rows)
    notes = [
        "kept, over: parameters of the targeted weights, and how many are beyond the limit",
        "loss, perplexity: predicted on calibration text; aligned: chosen dims that are multiples of 8",
    ]
    if FUSED in dense:
        notes.append(f"{FUSED}: with shared first GEMMs, which loses nothing")
    if not all(first.compare(plan).same_prediction for _, plan in plans):
        notes.append("predicted by different methods, shots or text: these losses are not of one scale")
    notes += [f"speed of {name}: {told}" for name, plan in plans if (told := speed(plan))]
    return Group(table, legend("\n".join(notes)), memory_table(plans))


def differences_table(comparison: PlanComparison, most: int = 10) -> Group | Text:
    """The weights that two plans choose differently, those first whose bytes differ most.

    Args:
        most: how many of them.
    """
    differing, weights = len(comparison.differences), len(comparison.first.weights)
    if not differing:
        return Text(f"all {weights} weights become the same")
    ranked = sorted(comparison.differences, key=lambda one: -abs(one.bytes))
    rows = [
        (one.first.name, choice(one.first), choice(one.second), f"{one.params:+,}", f"{one.bytes:+,}")
        for one in ranked[:most]
    ]
    columns = [("weight", "<"), *((name, ">") for name in ("first", "second", "parameters", "bytes"))]
    table = new_table(columns, rows)
    shown = f", the {most} that differ most" if differing > most else ""
    return Group(table, legend(f"{differing} of {weights} weights differ{shown}"))
