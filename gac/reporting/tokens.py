"""A plan of tokens kept, as rich tables: layer by layer, and what it saves and loses in words."""

from collections.abc import Iterable, Mapping

from rich.console import Group, RenderableType

from gac.core.rich_tables import legend, new_table
from gac.core.words import megabytes, nats
from gac.plan.token_plan import TokenPlan


def tokens_tables(plan: TokenPlan) -> list[RenderableType]:
    """One row a layer: its tokens, and what they lose; then the sums."""
    return [*plan.tables()]


def figures(plan: TokenPlan, workloads: Iterable[str]) -> dict[str, str]:
    """What plans are compared by: headings and values."""
    timed, (used, _) = {one.workload: one for one in plan.workloads}, plan.cache_bytes(plan.context)
    told = {
        "press": plan.press,
        "kept": f"{plan.used / plan.total:.4f}",
        "loss": nats(plan.loss),
        "cached": megabytes(used),
        "gap": f"{plan.certificate.gap:.3g}",
    }
    for workload in workloads:
        one = timed.get(workload)
        known = one is not None and one.plan_ns and one.dense_ns
        told[workload] = f"{one.plan_ns / one.dense_ns:.3f}x" if known else "unknown"  # type: ignore[union-attr, operator]
    return told


def tokens_comparison(plans: Mapping[str, TokenPlan]) -> RenderableType:
    """One row a plan: its press, what it keeps, loses and saves; then, of two, the layers that differ most."""
    workloads = dict.fromkeys(one.workload for plan in plans.values() for one in plan.workloads)
    told = {name: figures(plan, workloads) for name, plan in plans.items()}
    columns = [(heading, "<" if heading == "press" else ">") for heading in next(iter(told.values()))]
    table = new_table([("plan", "<"), *columns], [(name, *row.values()) for name, row in told.items()])
    notes = "loss: predicted, nats a token; cached: bytes of one context in 16 bits; latency: of attention over dense"
    return Group(table, legend(notes))


def layers_apart(plans: Mapping[str, TokenPlan], most: int = 10) -> RenderableType:
    """The layers of which two plans keep the most different numbers of tokens."""
    (name, first), (other, second) = plans.items()
    both = [(one.layer, one.kept, two.kept) for one, two in zip(first.layers, second.layers, strict=True)]
    apart = sorted((row for row in both if row[1] != row[2]), key=lambda row: -abs(row[1] - row[2]))
    if not apart:
        return f"all {len(both)} layers keep the same"
    rows = [(str(layer), f"{one:,}", f"{two:,}") for layer, one, two in apart[:most]]
    told = f"{len(apart)} of {len(both)} layers keep another number of tokens"
    return Group(new_table([("layer", ">"), (name, ">"), (other, ">")], rows), legend(told))
