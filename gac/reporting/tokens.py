"""How many tokens each layer keeps, as a rich table."""

from typing import TYPE_CHECKING

from rich.console import RenderableType

from gac.reporting.formatting import nats, new_table

if TYPE_CHECKING:
    from gac.tokens.plan import TokenPlan


def tokens_tables(plan: "TokenPlan") -> list[RenderableType]:
    """One row a layer: its tokens, and what they lose; then the sums."""
    table = new_table([("layer", ">"), ("tokens", ">"), ("share", ">"), ("loss", ">")])
    for one in plan.layers:
        table.add_row(str(one.layer), f"{one.kept:,}", f"{one.kept / plan.context:.3f}", nats(one.loss))
    proof, kept = plan.certificate, f"{plan.used:,} of {plan.total:,} tokens"
    lines = [
        f"press     {plan.press}, contexts of {plan.context:,} tokens of {plan.text}",
        f"kept      {kept} ({plan.used / plan.total:.4f}), limit {plan.limit:,}",
        f"loss      {nats(plan.loss)} nats a token predicted, {proof.status}, gap {proof.gap:.3g}",
    ]
    if plan.whole:
        lines.append(f"whole     {len(plan.whole)} layers of a sliding window, which no limit counts")
    return [table, "\n".join(lines)]
