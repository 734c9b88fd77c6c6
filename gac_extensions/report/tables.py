"""The tables of the page: the heat map with reasons, dense weights, plans side by side, and all sites."""

from collections import Counter
from collections.abc import Iterator
from itertools import count
from typing import Any

from gac.core.display import Table
from gac.core.words import duration, nats, ranges
from gac.plan.costs import COSTS, PARAMS
from gac.plan.layers import cell_of, choice, choices, kinds_of, short_names_of, weights_by_layer
from gac.plan.plan import Plan, SiteChoice, WeightChoice, counted
from gac.plan.summary import rule_of
from gac.reporting.tables import memory_figures, plan_figures
from gac_extensions.report.charts import letter_of
from gac_extensions.report.reasons import Trade, nearest_smaller, next_dims, no_alternatives_reason, reasons, size_noun
from gac_extensions.report.sources import Sources

# --- the heat map ---------------------------------------------------------------------------------------------------

# The least kept fraction of the bytes of each shade but the last, from 1 to 7; a weight that is as it was has shade 0.
SHADES = (0.8, 0.65, 0.5, 0.35, 0.2, 0.1)


def heat_map(sources: Sources) -> tuple[list[str], dict[int, list[dict[str, Any] | None]]]:
    """The short names of the columns, and for each layer a cell a column; None where it has no such weight."""
    layers = weights_by_layer(sources.plan)
    columns, number = kinds_of(layers), count()
    site_of = {weight.name: site for site in sources.plan.sites for weight in site.weights}
    others = {
        f"In {other}": {choice.name: choice for choice in plan.weights} for other, plan in sources.against.items()
    }

    def cell(kind: str, weight: WeightChoice) -> dict[str, Any]:
        plan, site = sources.plan, site_of[weight.name]
        kept = weight.bytes / weight.dense_bytes
        shade = 1 + sum(kept < least for least in SHADES)
        theirs = ((other, choice(by_name[weight.name])) for other, by_name in others.items())
        return {
            "number": next(number),  # in reading order
            "text": cell_of(weight),
            "shade": shade if weight.changed else 0,
            "label": f"layer {site.layer}, {kind}: {choice(weight)}, {kept:.0%} kept",
            "facts": (*_facts(plan, site, weight), *theirs),
            "reasons": (*reasons(plan, site), *next_dims(plan, sources.profile, weight, shared=site.shared)),
        }

    rows = {
        layer: [cell(kind, weights[kind]) if kind in weights else None for kind in columns]
        for layer, weights in layers.items()
    }
    return columns, rows


def _facts(plan: Plan, site: SiteChoice, weight: WeightChoice) -> Iterator[tuple[str, str]]:
    dense = weight.weight.params
    yield "Weight", f"{weight.name}, {weight.weight.out_features:,} x {weight.weight.in_features:,}"
    yield "Becomes", choice(weight)
    yield "Parameters", f"{weight.params:,} of {dense:,} ({weight.params / dense:.1%})"
    yield "Bytes", f"{weight.bytes:,} of {weight.dense_bytes:,} ({8 * weight.bytes / dense:.2f} bits a dense parameter)"
    if len(site.weights) > 1:
        what = choices(site.weights)
        yield "Site", f"{site.site}: {what}; {site.params:,} parameters. Loss and latency are the site's."
    yield "Loss", f"+{nats(site.loss)} nats a token"
    for workload, ns in zip(plan.workloads, site.latency_ns, strict=True):
        yield workload.workload, duration(ns)


# --- tables ---------------------------------------------------------------------------------------------------------

Values = list[tuple[str, float | None]]  # a row of cells, each with the number that it is sorted by; None for text


def stayed_dense(plan: Plan) -> Table:
    """The dense weights by projection, with the smaller candidate of any layer that came nearest where it is known."""
    short = short_names_of(plan.sites)
    layers = Counter(short[weight.name] for weight in plan.weights)
    dense: dict[str, list[SiteChoice]] = {}
    for site in plan.sites:
        for weight in site.weights:
            if weight.form == "dense":
                dense.setdefault(short[weight.name], []).append(site)
    columns = [("Projection", "<"), ("Dense", "<"), ("Layers", "<")]
    rows = []
    for name, sites in dense.items():
        row = [name, f"{len(sites)} of {layers[name]}", ranges([site.layer for site in sites])]
        rows.append([*row, *(text for text, _ in _nearest(plan, sites))])
    if any(len(row) > len(columns) for row in rows):
        columns += _traded_columns("Loses (nats)")
    return Table(columns, rows)


def _nearest(plan: Plan, sites: list[SiteChoice]) -> Values:
    smaller = [(trade, site.layer) for site in sites if (trade := nearest_smaller(plan, site))]
    if rule_of(plan) or not smaller:
        return []
    trade, layer = min(smaller, key=lambda pair: pair[0].lost - pair[0].worth)
    return _traded(trade, f" in layer {layer}")


def _traded_columns(loses: str) -> list[tuple[str, str]]:
    return [("Nearest smaller", "<"), ("Frees", ">"), (loses, ">"), ("Worth elsewhere", ">")]


def _traded(trade: Trade, where: str = "") -> Values:
    lost, worth = ((nats(amount), amount) for amount in (trade.lost, trade.worth))
    return [(f"{trade.choice}{where}", None), (f"{trade.freed:,}", trade.freed), lost, worth]


def about_dense(plan: Plan) -> str:
    if rule := rule_of(plan):
        return f"The rule {rule} weighs no other choice against staying dense."
    if not any(site.alternatives for site in plan.sites):
        return no_alternatives_reason(plan)
    return (
        f"A site stays dense where each smaller candidate loses more than the {size_noun(plan)}s that it frees would "
        "win elsewhere. Of each projection, the candidate that came nearest:"
    )


def plans_table(sources: Sources) -> Table:
    """A column a plan, under its mark and name: a screen has more room for rows than for columns."""
    workloads = [timed.workload for timed in sources.plan.workloads]
    plans = [("P", sources.name, sources.plan, "")]
    for number, (name, comparison) in enumerate(sources.comparisons.items()):
        plans.append((letter_of(number), name, comparison.second, f"{len(comparison.differences):,}"))
    figures = [plan_figures(plan, workloads) | memory_figures(plan) for _, _, plan, _ in plans]
    rows = [
        [name if name in workloads else name[0].upper() + name[1:], *(cells[name] for cells in figures)]
        for name in figures[0]
    ]
    rows.append(["Proof", *(plan.certificate.status for _, _, plan, _ in plans)])
    rows += [["Weights that differ", *(differing for *_, differing in plans)]] if sources.against else []
    return Table([("Plan", "<"), *((f"{letter}, {name}", ">") for letter, name, *_ in plans)], rows)


def sites_table(plan: Plan) -> tuple[Table, list[list[float | None]]]:
    """Every site, in model order, with the nearest smaller candidate where the plan knows it; and its sort keys."""
    others = {name: cost for name, cost in COSTS.items() if cost.of_weights and name != PARAMS}
    columns = [("Layer", ">"), ("Site", "<"), ("Becomes", "<"), ("Parameters", ">"), ("Kept", ">")]
    columns += [(cost.label.capitalize(), ">") for cost in others.values()]
    columns += [("Loss", ">"), *((timed.workload, ">") for timed in plan.workloads)]
    rows = [_site(site, [counted(site.weights, name)[0] for name in others]) for site in plan.sites]
    if not rule_of(plan) and any(site.alternatives for site in plan.sites):
        columns += _traded_columns("Loses more")
        for row, site in zip(rows, plan.sites, strict=True):
            smaller = nearest_smaller(plan, site)
            row += [("none", None), *[("", -1.0)] * 3] if smaller is None else _traded(smaller)
    texts, keys = ([[cell[i] for cell in row] for row in rows] for i in (0, 1))
    return Table(columns, texts), keys  # type: ignore[arg-type, return-value]


def _site(site: SiteChoice, sizes: list[int]) -> Values:
    kept = site.params / site.dense_params
    return [
        (str(site.layer), site.layer),
        (site.kind, None),
        (choices(site.weights), None),
        (f"{site.params:,}", site.params),
        (f"{kept:.1%}", kept),
        *((f"{size:,}", size) for size in sizes),
        (nats(site.loss), site.loss),
        *((duration(ns), -1 if ns is None else ns) for ns in site.latency_ns),
    ]
