"""The table of all sites, which the page sorts and filters."""

from dataclasses import dataclass

from gac.allocation.reproduce import rule_of
from gac.plan import Plan, SiteChoice
from gac.reporting.report.why import trades
from gac.reporting.report.words import chosen, duration, nats


@dataclass(frozen=True)
class Entry:
    """``value`` is what sorting compares: a number, or None for text, which is compared as it is shown."""

    text: str
    value: float | None = None


@dataclass(frozen=True)
class Row:
    """One site; ``forms`` are those of its weights."""

    forms: tuple[str, ...]
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class SiteTable:
    """``columns``: heading, and whether it holds numbers."""

    columns: tuple[tuple[str, bool], ...]
    rows: tuple[Row, ...]
    forms: tuple[str, ...]


def site_table(plan: Plan) -> SiteTable:
    """Every site, in model order; the nearest smaller candidate where the plan knows it."""
    columns = [("Layer", True), ("Site", False), ("Becomes", False), ("Parameters", True), ("Kept", True)]
    columns += [("Loss", True), *((one.workload, True) for one in plan.workloads)]
    told = rule_of(plan) is None and any(site.alternatives for site in plan.sites)
    if told:
        columns += [("Nearest smaller", False), ("Frees", True), ("Loses more", True), ("Worth elsewhere", True)]
    rows = tuple(_row(plan, site, told) for site in plan.sites)
    forms = dict.fromkeys(weight.form for weight in plan.weights)
    return SiteTable(tuple(columns), rows, tuple(forms))


def _row(plan: Plan, site: SiteChoice, told: bool) -> Row:
    kept = site.params / site.dense_params
    entries = [
        Entry(str(site.layer), site.layer),
        Entry(site.kind),
        Entry(chosen(site)),
        Entry(f"{site.params:,}", site.params),
        Entry(f"{kept:.1%}", kept),
        Entry(nats(site.loss), site.loss),
        *(Entry(duration(ns), -1 if ns is None else ns) for ns in site.latency_ns),
    ]
    forms = tuple(dict.fromkeys(weight.form for weight in site.weights))
    return Row(forms, (*entries, *(_nearest(plan, site) if told else ())))


def _nearest(plan: Plan, site: SiteChoice) -> tuple[Entry, ...]:
    smaller = next((trade for trade in trades(plan, site) if trade.freed > 0), None)
    if smaller is None:
        return (Entry("none"), Entry("", -1), Entry("", -1), Entry("", -1))
    return (
        Entry(smaller.choice),
        Entry(f"{smaller.freed:,}", smaller.freed),
        Entry(nats(smaller.lost), smaller.lost),
        Entry(nats(smaller.worth), smaller.worth),
    )
