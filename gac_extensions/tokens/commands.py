"""The command that chooses how many tokens each layer caches."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import gac
from gac.cli.command import Answer, Command, note, plain_document
from gac.cli.options import (
    AT_LEAST_1,
    Target,
    latency_option,
    option,
    several,
    table_option,
    tokenizer_option,
    workloads_option,
)
from gac.core.errors import PlanError
from gac_extensions.tokens.defaults import FOLLOWING, KEEP, PRESS, SHARES, STEP, TEXT

if TYPE_CHECKING:
    from gac_extensions.tokens.plan import TokenPlan


@click.command(cls=Command, resume="Measured windows are saved in GAC_HOME; rerun the command to resume.")
@click.argument("model")
@option("--keep", "Kept fraction of all layers' tokens.", float, "F", default=KEEP)
@option("--press", "A press of kvpress: snapkv, expectedattention, knorm, tova, ...", None, "NAME", default=PRESS)
@option("--calibration", "The text, and N windows of L tokens each.", None, "TEXT[:NxL]", default=TEXT)
@option("--following", "Tokens at the end of a window, to measure the loss on.", AT_LEAST_1, "N", default=FOLLOWING)
@several("--share shares", "A share of the context to price.", float, "F", default=SHARES, show_default="every eighth")
@option("--step", "Keep multiples of this number of tokens.", AT_LEAST_1, "N", default=STEP)
@table_option
@workloads_option(
    "Workload to predict attention latency for",
    default=(),
    shown="decode:1@C with the contexts' C",
    kinds="decode:B@C, of which each layer keeps its share of C tokens",
)
@latency_option(
    "Allowed fraction of the dense model's latency of attention, for every workload or (repeatable) for one. "
    "Default: any, no limit."
)
@option("-o --output", "The plan to write; an existing file is replaced.", Target(PlanError), default="tokens.json")
@tokenizer_option
def tokens(model: str, output: Path, workloads: tuple[str, ...], latency: Any, **options: Any) -> Answer:
    """Choose how many tokens of a context the cache of every layer of MODEL keeps.

    MODEL is a directory, a hub id, or a packaged model (smollm2, gemma3-270m). Measures the loss of each layer at each
    share with a press of kvpress, then picks one share a layer: the least loss within the limits, with a proof. The
    latency table gives the latency of attention over the kept tokens. In Python, gac.press(plan) evicts accordingly.
    """
    limit = None if latency == "any" else latency
    plan = gac.allocate_tokens(model, workloads=workloads or None, latency=limit, **options)

    plan.save(output)
    note(f"saved as {output}")
    return Answer({"path": str(output)} | tokens_document(plan), lambda: [*plan.tables()])


def tokens_document(plan: "TokenPlan") -> dict[str, Any]:
    sizes = {length: plan.cache_bytes(length) for length in plan.contexts}
    cache = {str(length): {"used": used, "total": total} for length, (used, total) in sizes.items()}
    return plain_document(plan) | {"used": plan.used, "total": plan.total, "loss": plan.loss, "cache_bytes": cache}
