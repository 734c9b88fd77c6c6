"""The table of all sites, which the page sorts and filters."""

from collections.abc import Iterable
from typing import NamedTuple

from gac.allocation.reproduce import rule_of
from gac.plan import Plan, SiteChoice, WeightChoice
from gac.reporting.report.formatting import chosen, duration, nats
from gac.reporting.report.reasons import trades


class Entry(NamedTuple):
    """``value`` is what sorting compares: a number, or None for text, which is compared as it is shown."""

    text: str
    value: float | None = None


class SiteTable(NamedTuple):
    """``columns``: heading, and whether it holds numbers; ``rows``: the forms of a site's weights, and its entries."""

    columns: list[tuple[str, bool]]
    rows: list[tuple[list[str], list[Entry]]]
    forms: list[str]


def site_table(plan: Plan) -> SiteTable:
    """Every site, in model order; the nearest smaller candidate where the plan knows it."""
    columns = [("Layer", True), ("Site", False), ("Becomes", False), ("Parameters", True), ("Kept", True)]
    columns += [("Loss", True), *((one.workload, True) for one in plan.workloads)]
    told = rule_of(plan) is None and any(site.alternatives for site in plan.sites)
    if told:
        columns += [("Nearest smaller", False), ("Frees", True), ("Loses more", True), ("Worth elsewhere", True)]
    rows = [(_forms(site.weights), _entries(plan, site, told)) for site in plan.sites]
    return SiteTable(columns, rows, _forms(plan.weights))


def _forms(weights: Iterable[WeightChoice]) -> list[str]:
    return list(dict.fromkeys(weight.form for weight in weights))


def _entries(plan: Plan, site: SiteChoice, told: bool) -> list[Entry]:
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
    if not told:
        return entries
    smaller = next((trade for trade in trades(plan, site) if trade.freed > 0), None)
    if smaller is None:
        return [*entries, Entry("none"), *(Entry("", -1) for _ in range(3))]
    lost, worth = (Entry(nats(amount), amount) for amount in (smaller.lost, smaller.worth))
    return [*entries, Entry(smaller.choice), Entry(f"{smaller.freed:,}", smaller.freed), lost, worth]
