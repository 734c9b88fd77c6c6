"""The heat map: layers by projections, with facts and reasons for every weight."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from gac.plan import SiteChoice, WeightChoice
from gac.reporting.report.formatting import choice, chosen, duration, nats
from gac.reporting.report.next_dims import NextDims
from gac.reporting.report.reasons import reasons
from gac.reporting.report.sources import Sources
from gac.reporting.tables import cell_of, kinds_of, weights_by_layer

SHADES = (0.8, 0.65, 0.5, 0.35, 0.2, 0.1)
"""The least kept fraction of each shade but the last; a weight as large as dense has none."""


@dataclass(frozen=True)
class Cell:
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


@dataclass(frozen=True)
class HeatMap:
    """``rows``: by layer, one entry a column; None where the layer has no such weight."""

    columns: tuple[str, ...]
    rows: tuple[tuple[int, tuple[Cell | None, ...]], ...]

    @property
    def cells(self) -> Iterator[Cell]:
        """In reading order."""
        return (cell for _, row in self.rows for cell in row if cell is not None)


def heat_map(sources: Sources) -> HeatMap:
    """Every weight of the plan."""
    plan = sources.plan.plan
    layers = weights_by_layer(plan)
    columns = tuple(kinds_of(layers))
    site_of = {weight.name: site for site in plan.sites for weight in site.weights}
    others = [{weight.name: weight for weight in other.plan.weights} for other in sources.against]
    teller = _Teller(sources, NextDims(plan, sources.profile), others)
    number = count()
    rows = []
    for layer, weights in layers:
        found = {name: (site_of[weight.name], weight) for name, weight in weights.items()}
        cells = (teller.cell(next(number), name, *found[name]) if name in found else None for name in columns)
        rows.append((layer, tuple(cells)))
    return HeatMap(columns, tuple(rows))


@dataclass(frozen=True)
class _Teller:
    sources: Sources
    next_dims: NextDims
    others: Sequence[dict[str, WeightChoice]]

    def cell(self, number: int, name: str, site: SiteChoice, weight: WeightChoice) -> Cell:
        dense = weight.weight.params
        kept = weight.params / dense
        what = choice(weight.form, weight.dim)
        return Cell(
            number,
            cell_of(weight),
            0 if weight.form == "dense" else shade(kept),
            f"layer {site.layer}, {name}: {what}, {kept:.0%} kept",
            tuple(self._facts(site, weight)),
            (*reasons(self.sources.plan.plan, site), *self.next_dims.sentences(weight, shared=site.shared)),
        )

    def _facts(self, site: SiteChoice, weight: WeightChoice) -> Iterator[tuple[str, str]]:
        dense = weight.weight.params
        yield "Weight", f"{weight.name}, {weight.weight.out_features:,} x {weight.weight.in_features:,}"
        yield "Becomes", choice(weight.form, weight.dim)
        yield "Parameters", f"{weight.params:,} of {dense:,} ({weight.params / dense:.1%})"
        if len(site.weights) > 1:
            yield "Site", f"{site.site}: {chosen(site)}; {site.params:,} parameters. Loss and latency are the site's."
        yield "Loss", f"+{nats(site.loss)} nats a token"
        plan = self.sources.plan.plan
        for workload, ns in zip(plan.workloads, site.latency_ns, strict=True):
            yield workload.workload, duration(ns)
        for other, weights in zip(self.sources.against, self.others, strict=True):
            theirs = weights[weight.name]
            yield f"In {other.name}", choice(theirs.form, theirs.dim)


def shade(kept: float) -> int:
    """Of what is not dense: 1 where most is kept, 7 where least is."""
    return 1 + next((at for at, least in enumerate(SHADES) if kept >= least), len(SHADES))
