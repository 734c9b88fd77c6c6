"""The command that chooses how many tokens the cache of every layer keeps."""

from pathlib import Path
from typing import Any

import click

import gac
from gac.cli.measuring import tokenizer_option
from gac.cli.options import Target, latency_option, output_option, table_option, tokens_document, workloads_option
from gac.cli.verb import Answer, Verb, note
from gac.core.errors import PlanError
from gac.tokens.defaults import FOLLOWING, KEEP, PRESS, SHARES, STEP, TEXT


@click.command(cls=Verb, resume="Windows that were measured are kept in GAC_HOME; the same command goes on from there.")
@click.argument("model")
@click.option(
    "--keep", type=float, default=KEEP, show_default=True, metavar="F", help="Kept fraction of all layers' tokens."
)
@click.option(
    "--press",
    default=PRESS,
    show_default=True,
    metavar="NAME",
    help="What evicts, of kvpress: snapkv, expectedattention, knorm, tova, ...",
)
@click.option(
    "--calibration",
    default=TEXT,
    show_default=True,
    metavar="TEXT[:NxL]",
    help="The text, and N windows of L tokens: a context and the tokens that follow.",
)
@click.option(
    "--following",
    type=click.IntRange(min=1),
    default=FOLLOWING,
    show_default=True,
    metavar="N",
    help="Tokens of a window that follow the context; losses are theirs.",
)
@click.option(
    "--share",
    "shares",
    type=float,
    multiple=True,
    default=SHARES,
    show_default="every eighth",
    metavar="F",
    help="A share of the context that a layer may keep. Repeatable; all of it is always there.",
)
@click.option(
    "--step",
    type=click.IntRange(min=1),
    default=STEP,
    show_default=True,
    metavar="N",
    help="Keep multiples of so many tokens.",
)
@table_option
@workloads_option(
    "What attention over the cache is looked up for",
    default=(),
    shown="decode:1@C with the contexts' C",
    kinds="decode:B@C, of which each layer keeps its share of C tokens",
)
@latency_option(
    "Allowed fraction of the dense model's latency of attention, for every workload or (repeatable) for one. "
    "Default: any, no limit."
)
@output_option(Target(PlanError), "The plan to write; an existing file is replaced.", default="tokens.json")
@tokenizer_option
def tokens(model: str, output: Path, workloads: tuple[str, ...], latency: Any, **asked: Any) -> Answer:
    """Choose how many tokens of a context the cache of every layer of MODEL keeps.

    MODEL is a directory, a hub id, or a packaged model (smollm2, gemma3-270m). Measures what each layer loses at each
    share by a press of kvpress, then picks one share a layer: the least loss within the limits, with a proof. The
    latency table says what attention over the rest takes. In Python, gac.press(plan) evicts accordingly.
    """
    limit = None if latency == "any" else latency
    plan = gac.allocate_tokens(model, workloads=workloads or None, latency=limit, **asked)
    from gac.reporting.tokens import tokens_tables

    plan.save(output)
    note(f"saved as {output}")
    return Answer({"path": str(output)} | tokens_document(plan), lambda: tokens_tables(plan))
