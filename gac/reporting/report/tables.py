"""The tables of the page: the heat map with reasons, what stayed dense, plans beside each other, and all sites."""

from collections import Counter
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

from gac.plan.costs import BYTES
from gac.plan.plan import Plan, SiteChoice, WeightChoice, counted
from gac.plan.summary import rule_of
from gac.reporting.formatting import choice, choices, duration, nats, ranges
from gac.reporting.report.charts import letter_of
from gac.reporting.report.reasons import Trade, nearest_smaller, next_dims, reasons, sizes, unweighed
from gac.reporting.report.sources import Sources
from gac.reporting.tables import cell_of, kinds_of, memory_figures, plan_figures, short_names_of, weights_by_layer

# --- the heat map ---------------------------------------------------------------------------------------------------

SHADES = (0.8, 0.65, 0.5, 0.35, 0.2, 0.1)
"""The least kept fraction of the bytes of each shade but the last; a weight that is as it was has none."""


class Cell(NamedTuple):
    """One weight: the text of its cell, its facts, and the reasons for its choice.

    Attributes:
        number: its place in reading order.
        text: for example ``r 128``; a dash where dense.
        shade: 0 as large as dense, then 1 to 7, the less is kept the larger.
        label: the cell in words.
        facts: name and value pairs.
        reasons: sentences.
    """

    number: int
    text: str
    shade: int
    label: str
    facts: tuple[tuple[str, str], ...]
    reasons: tuple[str, ...]


def heat_map(sources: Sources) -> tuple[list[str], dict[int, list[Cell | None]]]:
    """The short names of the columns, and for each layer a cell a column; None where it has no such weight."""
    layers = weights_by_layer(sources.plan)
    columns, number = kinds_of(layers), count()
    site_of = {weight.name: site for site in sources.plan.sites for weight in site.weights}
    others = {f"In {other}": {one.name: one for one in plan.weights} for other, plan in sources.against.items()}

    def cell(kind: str, weight: WeightChoice) -> Cell:
        plan, site = sources.plan, site_of[weight.name]
        kept = weight.bytes / weight.dense_bytes
        shade = 1 + next((at for at, least in enumerate(SHADES) if kept >= least), len(SHADES))
        theirs = ((other, choice(of[weight.name])) for other, of in others.items())
        return Cell(
            next(number),
            cell_of(weight),
            shade if weight.changed else 0,
            f"layer {site.layer}, {kind}: {choice(weight)}, {kept:.0%} kept",
            (*_facts(plan, site, weight), *theirs),
            (*reasons(plan, site), *next_dims(plan, sources.profile, weight, shared=site.shared)),
        )

    rows = ([cell(kind, of[kind]) if kind in of else None for kind in columns] for of in layers.values())
    return columns, dict(zip(layers, rows, strict=True))


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


class Entry(NamedTuple):
    """``value`` is what sorting compares: a number, or None for text, which is compared as it is shown."""

    text: str
    value: float | None = None


class Table(NamedTuple):
    """``columns``: heading, and whether it holds numbers."""

    columns: list[tuple[str, bool]]
    rows: list[list[Entry]]


def stayed_dense(plan: Plan) -> Table:
    """The dense weights by projection, with the smaller candidate of any layer that came nearest where it is known."""
    called = short_names_of(plan.sites)
    layers = Counter(called[weight.name] for weight in plan.weights)
    dense: dict[str, list[SiteChoice]] = {}
    for site in plan.sites:
        for weight in site.weights:
            if weight.is_dense:
                dense.setdefault(called[weight.name], []).append(site)
    columns = [("Projection", False), ("Dense", False), ("Layers", False)]
    rows = []
    for name, sites in dense.items():
        row = map(Entry, (name, f"{len(sites)} of {layers[name]}", ranges([site.layer for site in sites])))
        rows.append([*row, *_nearest(plan, sites)])
    if any(len(row) > len(columns) for row in rows):
        columns += _traded_columns("Loses (nats)")
    return Table(columns, rows)


def _nearest(plan: Plan, sites: list[SiteChoice]) -> list[Entry]:
    smaller = [(trade, site.layer) for site in sites if (trade := nearest_smaller(plan, site))]
    if rule_of(plan) or not smaller:
        return []
    trade, layer = min(smaller, key=lambda pair: pair[0].lost - pair[0].worth)
    return _traded(trade, f" in layer {layer}")


def _traded_columns(loses: str) -> list[tuple[str, bool]]:
    return [("Nearest smaller", False), ("Frees", True), (loses, True), ("Worth elsewhere", True)]


def _traded(trade: Trade, where: str = "") -> list[Entry]:
    lost, worth = (Entry(nats(amount), amount) for amount in (trade.lost, trade.worth))
    return [Entry(f"{trade.choice}{where}"), Entry(f"{trade.freed:,}", trade.freed), lost, worth]


def about_dense(plan: Plan) -> str:
    """How to read that table."""
    if rule := rule_of(plan):
        return f"The rule {rule} weighs no other choice against staying dense."
    if not any(site.alternatives for site in plan.sites):
        return unweighed(plan)
    return (
        f"A site stays dense where each smaller candidate loses more than the {sizes(plan)}s that it frees would win "
        "elsewhere. Of each projection, the candidate that came nearest:"
    )


def plans_table(sources: Sources) -> Table:
    """One row a plan, the page's own first."""
    workloads = [one.workload for one in sources.plan.workloads]
    columns = [("Mark", False), ("Plan", False)]
    columns += [
        (name if name in workloads else name.capitalize(), True) for name in plan_figures(sources.plan, workloads)
    ]
    columns += [(name.capitalize(), True) for name in memory_figures(sources.plan)]
    columns += [("Proof", False), *([("Weights that differ", True)] if sources.against else [])]
    plans = [("P", sources.name, sources.plan, "")]
    for at, (name, beside) in enumerate(sources.comparisons.items()):
        plans.append((letter_of(at), name, beside.second, f"{len(beside.differences):,}"))
    rows = [
        [letter, name, *_all_figures(plan, workloads), plan.certificate.status, differing]
        for letter, name, plan, differing in plans
    ]
    return Table(columns, [list(map(Entry, row[: len(columns)])) for row in rows])


def _all_figures(plan: Plan, workloads: list[str]) -> Iterator[str]:
    yield from plan_figures(plan, workloads).values()
    yield from memory_figures(plan).values()


def sites_table(plan: Plan) -> Table:
    """Every site, in model order; the nearest smaller candidate where the plan knows it."""
    columns = [("Layer", True), ("Site", False), ("Becomes", False), ("Parameters", True), ("Kept", True)]
    columns += [("Bytes", True), ("Loss", True), *((one.workload, True) for one in plan.workloads)]
    rows = list(map(_site, plan.sites))
    if not rule_of(plan) and any(site.alternatives for site in plan.sites):
        columns += _traded_columns("Loses more")
        for row, site in zip(rows, plan.sites, strict=True):
            smaller = nearest_smaller(plan, site)
            row += [Entry("none"), *[Entry("", -1)] * 3] if smaller is None else _traded(smaller)
    return Table(columns, rows)


def _site(site: SiteChoice) -> list[Entry]:
    kept, size = site.params / site.dense_params, counted(site.weights, BYTES)[0]
    return [
        Entry(str(site.layer), site.layer),
        Entry(site.kind),
        Entry(choices(site.weights)),
        Entry(f"{site.params:,}", site.params),
        Entry(f"{kept:.1%}", kept),
        Entry(f"{size:,}", size),
        Entry(nats(site.loss), site.loss),
        *(Entry(duration(ns), -1 if ns is None else ns) for ns in site.latency_ns),
    ]
