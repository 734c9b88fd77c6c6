"""The command that aligns checkpoints that others have compressed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

import gac
from gac.cli.command import Answer, Command
from gac.cli.options import FILE, Target, flag, option, overwrite_option, table_option, workloads_option
from gac.core.errors import CheckpointError


@click.command(cls=Command, resume="No checkpoint was written; run it again.")
@click.argument("directory", type=FILE)
@option("-o --output", "The directory to write.", Target(CheckpointError, directory=True), required=True)
@option(
    "--strategy",
    "The padded dim: the next multiple of 8 (minimal) or 16 (optimal); the next head_dim of FlashAttention-2, beyond "
    "256 of 64 (predefined); if it is no multiple of 8, the next multiple of 32, else of 16, else of 8, that adds at "
    "most 10 % (tradeoff); the fastest measured dim (profile).",
    default="minimal",
)
@option("--max-overhead", "Keep a dim that would grow by more than this fraction, such as 0.1.", float, "F")
@table_option
@workloads_option("Workload to show latencies for")
@flag("--measure", "Also time the GEMMs before and after on this machine's GPU.")
@flag("--allow-pickle", "Read .bin and .pt files too, as tensors only.")
@overwrite_option
def repair(directory: Path, output: Path, workloads: Sequence[str], **options: Any) -> Answer:
    """Zero-pad the dims of a compressed checkpoint, without changing its outputs.

    DIRECTORY holds factored weights as SVD-LLM, ASVD or PaLU store them, MLPs with pruned neurons, latent attention, or
    a checkpoint of GAC. It is never written to.
    """
    repaired = gac.repair(directory, output, workloads=workloads, **options)
    from gac_extensions.repairs.report import repair_document, repair_tables

    return Answer(repair_document(repaired), lambda: repair_tables(repaired))
