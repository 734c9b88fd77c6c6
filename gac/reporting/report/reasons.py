"""Why a site is not smaller and not larger, from the plan's own alternatives and prices."""

from dataclasses import dataclass

from gac.allocation.reproduce import rule_of
from gac.costs import COSTS, KV_NUMBERS, ns_of
from gac.plan import Candidate, Plan, SiteChoice, counted
from gac.reporting.report.formatting import choices, duration, nats
from gac.reporting.report.formatting import counted as told


@dataclass(frozen=True)
class Trade:
    """What taking an alternative instead would change.

    Attributes:
        choice: the alternative in words.
        freed: parameters that it uses less; negative: more.
        lost: nats a token that it loses more; negative: less.
        worth: what all that it uses less is worth at the prices of the certificate, in nats a token.
        slower: ns that it takes more, by limited workload, where known.
        cached: numbers that the KV cache keeps of a token less, where that is limited; else 0.
    """

    choice: str
    freed: int
    lost: float
    worth: float
    slower: tuple[tuple[str, int], ...]
    cached: int


def trades(plan: Plan, site: SiteChoice) -> tuple[Trade, ...]:
    """One for each of the site's alternatives, the smaller one first."""
    return tuple(_trade(plan, site, other) for other in site.alternatives)


def _trade(plan: Plan, site: SiteChoice, other: Candidate) -> Trade:
    more = {limit.column: _more(plan, site, other, limit.column) for limit in plan.limits}
    prices = plan.certificate.multipliers
    latencies = ((column.removeprefix("ns:"), ns) for column, ns in more.items() if column.startswith("ns:"))
    return Trade(
        choices(site.weights, other.forms, other.dims),
        site.params - other.params,
        other.loss - site.loss,
        sum(price * -(amount or 0) for price, amount in zip(prices, more.values(), strict=True)),
        tuple((workload, ns) for workload, ns in latencies if ns is not None),
        -(more.get(KV_NUMBERS) or 0),
    )


def _more(plan: Plan, site: SiteChoice, other: Candidate, column: str) -> int | None:
    """What the alternative takes more of a cost column; None where that is unknown."""
    if column in COSTS:
        theirs = other.choices([one.weight for one in site.weights])
        return counted(theirs, column)[0] - counted(site.weights, column)[0]
    at = [ns_of(one.workload) for one in plan.workloads].index(column)
    before, after = site.latency_ns[at], other.latency_ns[at]
    return None if before is None or after is None else after - before


def reasons(plan: Plan, site: SiteChoice) -> tuple[str, ...]:
    """Sentences: why no smaller candidate, why no larger one."""
    if rule := rule_of(plan):
        return (f"The rule {rule} gave this; it weighs no other choice.",)
    found = trades(plan, site)
    if not found:
        return (unweighed(plan),)
    said = [_smaller(plan, trade) if trade.freed > 0 else _larger(plan, trade) for trade in found]
    if found[0].freed < 0:
        said.insert(0, "No candidate is smaller.")
    if found[-1].freed > 0:
        whole = all(weight.form == "dense" for weight in site.weights)
        said.append("Dense is the largest there is." if whole else "No candidate is larger.")
    return tuple(said)


def unweighed(plan: Plan) -> str:
    """Why a site has no alternatives."""
    if any(site.alternatives for site in plan.sites):
        return "None of the plan's forms gives this site another candidate."
    return "The plan does not hold what its sites could have had instead; gac allocate writes that now."


def _smaller(plan: Plan, trade: Trade) -> str:
    offer = f"Why not smaller: {trade.choice} would free {told(trade.freed, 'parameter')}{_beside(trade)} and "
    offer += f"{_change(trade.lost)}. "
    if not any(plan.certificate.multipliers):
        return f"{offer}No limit binds, so nothing would be won with what is freed."
    near = "no less than it loses, yet no choice elsewhere was found that uses it"
    verdict = "less than it loses" if trade.worth < trade.lost else near
    return f"{offer}Spent elsewhere, that is worth {nats(trade.worth)}: {verdict}."


def _larger(plan: Plan, trade: Trade) -> str:
    offer = f"Why not larger: {trade.choice} would take {told(-trade.freed, 'parameter')} more{_beside(trade)} and "
    offer += f"{_change(trade.lost)}. "
    near = "no more than it wins, yet the limits leave no room for it"
    verdict = "more than it wins" if -trade.worth > -trade.lost else near
    said = f"{offer}Elsewhere, that is worth {nats(-trade.worth)}: {verdict}."
    left = plan.budget.limit - plan.budget.used
    return said if -trade.freed <= left else f"{said} The budget has {left:,} left."


def _change(lost: float) -> str:
    return f"lose {nats(lost)} nats a token more" if lost >= 0 else f"lose {nats(-lost)} nats a token less"


def _beside(trade: Trade) -> str:
    """What it changes of the other limits."""
    parts = [f"{duration(abs(ns))} {'slower' if ns > 0 else 'faster'} at {name}" for name, ns in trade.slower if ns]
    if trade.cached:
        parts.append(f"{abs(trade.cached):,} numbers a token {'less' if trade.cached > 0 else 'more'} in the cache")
    return "".join(f", {part}" for part in parts)
