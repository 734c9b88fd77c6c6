"""The heat map: layers by projections, with facts and reasons for every weight."""

from collections.abc import Iterator
from typing import NamedTuple

from gac.plan import Plan, SiteChoice, WeightChoice
from gac.reporting.formatting import choice, choices, duration, nats
from gac.reporting.report.reasons import next_dims, reasons
from gac.reporting.report.sources import Sources
from gac.reporting.tables import cell_of, kinds_of, weights_by_layer

SHADES = (0.8, 0.65, 0.5, 0.35, 0.2, 0.1)
"""The least kept fraction of each shade but the last; a weight as large as dense has none."""


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


class HeatMap(NamedTuple):
    """``rows``: by layer, one entry a column; None where the layer has no such weight. ``cells``: in reading order."""

    columns: list[str]
    rows: dict[int, list[Cell | None]]
    cells: list[Cell]


def heat_map(sources: Sources) -> HeatMap:
    """Every weight of the plan."""
    layers = weights_by_layer(sources.plan)
    columns = kinds_of(layers)
    found = HeatMap(columns, {}, [])
    site_of = {weight.name: site for site in sources.plan.sites for weight in site.weights}
    others = {other: {weight.name: weight for weight in plan.weights} for other, plan in sources.against.items()}
    for layer, weights in layers.items():
        cells: dict[str, Cell] = {}
        for name in (name for name in columns if name in weights):
            weight = weights[name]
            theirs = {f"In {other}": of[weight.name] for other, of in others.items()}
            cells[name] = _cell(len(found.cells), name, sources, site_of[weight.name], weight, theirs)
            found.cells.append(cells[name])
        found.rows[layer] = [cells.get(name) for name in columns]
    return found


def _cell(
    number: int, name: str, sources: Sources, site: SiteChoice, weight: WeightChoice, others: dict[str, WeightChoice]
) -> Cell:
    kept = weight.params / weight.weight.params
    shade = 1 + next((at for at, least in enumerate(SHADES) if kept >= least), len(SHADES))
    theirs = ((other, choice(one.form, one.dim)) for other, one in others.items())
    return Cell(
        number,
        cell_of(weight),
        0 if weight.form == "dense" else shade,
        f"layer {site.layer}, {name}: {choice(weight.form, weight.dim)}, {kept:.0%} kept",
        (*_facts(sources.plan, site, weight), *theirs),
        (*reasons(sources.plan, site), *next_dims(sources.plan, sources.profile, weight, shared=site.shared)),
    )


def _facts(plan: Plan, site: SiteChoice, weight: WeightChoice) -> Iterator[tuple[str, str]]:
    dense = weight.weight.params
    yield "Weight", f"{weight.name}, {weight.weight.out_features:,} x {weight.weight.in_features:,}"
    yield "Becomes", choice(weight.form, weight.dim)
    yield "Parameters", f"{weight.params:,} of {dense:,} ({weight.params / dense:.1%})"
    if len(site.weights) > 1:
        what = choices(site.weights)
        yield "Site", f"{site.site}: {what}; {site.params:,} parameters. Loss and latency are the site's."
    yield "Loss", f"+{nats(site.loss)} nats a token"
    for workload, ns in zip(plan.workloads, site.latency_ns, strict=True):
        yield workload.workload, duration(ns)
