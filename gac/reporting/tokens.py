"""A plan of tokens kept, as rich tables: layer by layer, and what it saves and loses in words."""

from collections.abc import Iterable, Mapping

from rich.console import Group, RenderableType
from rich.text import Text

from gac.plan.plan import WorkloadLatency
from gac.plan.summary import how_known
from gac.plan.token_plan import TokenPlan
from gac.reporting.formatting import counted, duration, legend, megabytes, nats, new_table


def tokens_tables(plan: TokenPlan) -> list[RenderableType]:
    """One row a layer: its tokens, and what they lose; then the sums."""
    table = new_table([("layer", ">"), ("tokens", ">"), ("share", ">"), ("loss", ">")])
    for one in plan.layers:
        table.add_row(str(one.layer), f"{one.kept:,}", f"{one.kept / plan.context:.3f}", nats(one.loss))
    return [table, Text("\n".join(f"{name:<10}{value}" for name, value in facts(plan)))]


def facts(plan: TokenPlan) -> list[tuple[str, str]]:
    """Name and value pairs: what was asked, what is kept, what that loses, and what it saves."""
    proof = plan.certificate
    kept = f"{plan.used:,} of {plan.total:,} tokens ({plan.used / plan.total:.4f})"
    return [
        ("press", f"{plan.press}, contexts of {plan.context:,} tokens of {plan.text}"),
        ("kept", f"{kept}, limit {plan.limit:,}"),
        ("loss", f"{nats(plan.loss)} nats a token predicted, {proof.status}, gap {proof.gap:.3g}"),
        *(("memory", memory(plan, tokens)) for tokens in plan.contexts),
        *(("latency", latency(plan, one)) for one in plan.workloads),
        *([("profile", f"{used.gpu}, {used.digest[:12]}; {used.note}")] if (used := plan.profile) else []),
        *([("whole", whole(plan))] if plan.whole else []),
    ]


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


def memory(plan: TokenPlan, tokens: int) -> str:
    """The cache of one context, in words."""
    used, dense = plan.cache_bytes(tokens)
    return f"{megabytes(used)} of {megabytes(dense)} cached of {tokens:,} tokens, in 16 bits ({used / dense:.4f})"


def latency(plan: TokenPlan, one: WorkloadLatency) -> str:
    """Attention in all layers at a workload, in words."""
    limit = f", {plan.latency[one.workload]:g} allowed" if one.workload in plan.latency else ""
    if one.dense_ns is None or one.plan_ns is None:
        lacks = f"over what {counted(one.unknown, 'layer')} keep" if one.unknown else "over the whole cache"
        measures = f"gac profile --model ... --tokens --workload {one.workload}"
        return f"{one.workload}: unknown, the table lacks attention {lacks} ({measures} measures it)"
    ratio = f"{one.plan_ns / one.dense_ns:.3f}x{limit}; {how_known(one)}"
    return f"{one.workload}: attention {duration(one.plan_ns)} of {duration(one.dense_ns)} dense ({ratio})"


def whole(plan: TokenPlan) -> str:
    """The layers that no press cuts, in words."""
    size = f"of a window of {plan.window:,} tokens" if plan.window else "that are not cut"
    return f"{counted(len(plan.whole), 'layer')} {size}, which no limit of tokens counts"
