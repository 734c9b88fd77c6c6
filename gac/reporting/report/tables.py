"""The tables of the page: what stayed dense, plans beside each other, and all sites."""

from collections import Counter
from typing import NamedTuple

from gac.plan import Plan, SiteChoice
from gac.plan_summary import rule_of
from gac.reporting.formatting import choices, duration, nats, ranges
from gac.reporting.report.charts import letter_of
from gac.reporting.report.reasons import nearest_smaller, unweighed
from gac.reporting.report.sources import Sources
from gac.reporting.tables import plan_figures, short_names_of


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
            if weight.form == "dense":
                dense.setdefault(called[weight.name], []).append(site)
    columns = [("Projection", False), ("Dense", False), ("Layers", False)]
    rows = []
    for name, sites in dense.items():
        where = ranges([site.layer for site in sites])
        rows.append([name, f"{len(sites)} of {layers[name]}", where, *_nearest(plan, sites)])
    if any(len(row) > len(columns) for row in rows):
        columns += [("Nearest smaller", False), ("Frees", True), ("Loses (nats)", True), ("Worth elsewhere", True)]
    return Table(columns, [list(map(Entry, row)) for row in rows])


def _nearest(plan: Plan, sites: list[SiteChoice]) -> list[str]:
    smaller = [(trade, site.layer) for site in sites if (trade := nearest_smaller(plan, site))]
    if rule_of(plan) or not smaller:
        return []
    trade, layer = min(smaller, key=lambda pair: pair[0].lost - pair[0].worth)
    return [f"{trade.choice} in layer {layer}", f"{trade.freed:,}", nats(trade.lost), nats(trade.worth)]


def about_dense(plan: Plan) -> str:
    """How to read that table."""
    if rule := rule_of(plan):
        return f"The rule {rule} weighs no other choice against staying dense."
    if not any(site.alternatives for site in plan.sites):
        return unweighed(plan)
    return (
        "A site stays dense where each smaller candidate loses more than the parameters that it frees would win "
        "elsewhere. Of each projection, the candidate that came nearest:"
    )


def plans_table(sources: Sources) -> Table:
    """One row a plan, the page's own first."""
    workloads = [one.workload for one in sources.plan.workloads]
    figures = plan_figures(sources.plan, workloads)
    columns = [("Mark", False), ("Plan", False)]
    columns += [(name if name in workloads else name.capitalize(), True) for name in figures]
    columns += [("Proof", False), *([("Weights that differ", True)] if sources.against else [])]
    rows = [["P", sources.name, *figures.values(), sources.plan.certificate.status, ""]]
    for at, (name, beside) in enumerate(sources.comparisons.items()):
        other, differing = beside.second, f"{len(beside.differences):,}"
        rows.append(
            [letter_of(at), name, *plan_figures(other, workloads).values(), other.certificate.status, differing]
        )
    return Table(columns, [list(map(Entry, row[: len(columns)])) for row in rows])


def sites_table(plan: Plan) -> Table:
    """Every site, in model order; the nearest smaller candidate where the plan knows it."""
    columns = [("Layer", True), ("Site", False), ("Becomes", False), ("Parameters", True), ("Kept", True)]
    columns += [("Loss", True), *((one.workload, True) for one in plan.workloads)]
    if rule_of(plan) or not any(site.alternatives for site in plan.sites):
        return Table(columns, list(map(_site, plan.sites)))
    columns += [("Nearest smaller", False), ("Frees", True), ("Loses more", True), ("Worth elsewhere", True)]
    return Table(columns, [[*_site(site), *_traded(plan, site)] for site in plan.sites])


def _site(site: SiteChoice) -> list[Entry]:
    kept = site.params / site.dense_params
    return [
        Entry(str(site.layer), site.layer),
        Entry(site.kind),
        Entry(choices(site.weights)),
        Entry(f"{site.params:,}", site.params),
        Entry(f"{kept:.1%}", kept),
        Entry(nats(site.loss), site.loss),
        *(Entry(duration(ns), -1 if ns is None else ns) for ns in site.latency_ns),
    ]


def _traded(plan: Plan, site: SiteChoice) -> list[Entry]:
    smaller = nearest_smaller(plan, site)
    if smaller is None:
        return [Entry("none"), *[Entry("", -1)] * 3]
    lost, worth = (Entry(nats(amount), amount) for amount in (smaller.lost, smaller.worth))
    return [Entry(smaller.choice), Entry(f"{smaller.freed:,}", smaller.freed), lost, worth]
