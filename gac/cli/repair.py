"""The command that zero-pads a compressed checkpoint to aligned dims."""

from collections.abc import Sequence
from pathlib import Path

import click

from gac.cli.checks import check_writable
from gac.cli.options import table_option, workloads_option
from gac.cli.verb import Answer, Verb
from gac.errors import CheckpointError


@click.command(cls=Verb, resume="No checkpoint was written; run it again.")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The directory to write.")
@click.option(
    "--strategy",
    default="minimal",
    show_default=True,
    help="What a dim becomes: the next multiple of 8 (minimal) or 16 (optimal); the next of FlashAttention-2's head "
    "dims, beyond 256 of 64 (predefined); if it is no multiple of 8, the next one of 32, else of 16, else of 8, that "
    "adds at most 10 % (tradeoff); the cheapest measured one (profile).",
)
@click.option(
    "--max-overhead",
    type=float,
    metavar="F",
    help="Keep a dim as it is if it would grow by more than this fraction, such as 0.1.",
)
@table_option
@workloads_option("What times are given for")
@click.option("--measure", is_flag=True, help="Also time the GEMMs before and after on this machine's GPU.")
@click.option("--allow-pickle", is_flag=True, help="Read .bin and .pt files too, as tensors only.")
@click.option("--overwrite", is_flag=True, help="Replace an existing checkpoint of GAC.")
def repair(
    directory: Path,
    output: Path,
    strategy: str,
    max_overhead: float | None,
    profile: str | None,
    workloads: Sequence[str],
    measure: bool,
    allow_pickle: bool,
    overwrite: bool,
) -> Answer:
    """Zero-pad the dims of a compressed checkpoint, without changing its outputs.

    DIRECTORY holds factored weights as SVD-LLM, ASVD or PaLU store them, MLPs with pruned neurons, latent attention, or
    a checkpoint of GAC. It is never written to.
    """
    check_writable(output, CheckpointError)
    from gac.repairs.run import repair as repaired_by
    from gac.repairs.tables import repair_document, repair_tables

    repaired = repaired_by(
        directory,
        output,
        strategy=strategy,
        max_overhead=max_overhead,
        profile=profile,
        workloads=workloads,
        measure=measure,
        allow_pickle=allow_pickle,
        overwrite=overwrite,
    )
    return Answer(repair_document(repaired), lambda: repair_tables(repaired))
