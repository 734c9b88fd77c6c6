"""Commands that make models smaller: choose a plan or a range of them, apply one, write plain models, pad others'."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import gac
from gac.cli.measuring import STATISTICS_KEPT, recipe_options, tokenizer_option
from gac.cli.options import (
    FILE,
    Figure,
    Target,
    output_option,
    plan_document,
    plot_option,
    refuse_given,
    table_option,
    workloads_option,
)
from gac.cli.verb import Answer, Verb, note
from gac.core.distributed.launch import leads
from gac.core.errors import CheckpointError, PlanError

if TYPE_CHECKING:
    from gac.allocation.frontier import Frontier

_NEW = Target(CheckpointError, directory=True)
_EITHER = Target(CheckpointError, early=False)
_FRONTIER = Target(PlanError, early=False)


@click.command(cls=Verb, resume=STATISTICS_KEPT)
@click.argument("model")
@recipe_options(limits=True)
@click.option("--verify", is_flag=True, help="Solve it a second time with HiGHS, and fail if the two disagree.")
@click.option(
    "--check",
    metavar="FILE",
    help="A text like what the model will serve: compare the calibration text with it first, and warn if it is far.",
)
@output_option(Target(PlanError), "The plan to write; an existing file is replaced.", default="plan.json")
def allocate(model: str, asked: Callable[[str], dict[str, Any]], output: Path, **checks: Any) -> Answer:
    """Choose what every weight of MODEL becomes.

    MODEL is a directory, a hub id, or a packaged model (smollm2, gemma3-270m). Measures what each choice loses on
    calibration text, then picks the form and dim of every weight at once: the least loss within the budget, with a
    proof.
    """
    plan = gac.allocate(model, **asked(model), **checks)
    from gac.reporting.tables import plan_summary, plan_table

    if leads():
        plan.save(output)
    note(f"saved as {output}")
    return Answer({"path": str(output)} | plan_document(plan), lambda: [plan_table(plan), plan_summary(plan)])


@click.command(cls=Verb, resume=STATISTICS_KEPT)
@click.argument("source", metavar="MODEL|FILE")
@click.option("--points", type=int, default=100, show_default=True, help="How many budgets, from the smallest up.")
@click.option(
    "--limit",
    default="params",
    show_default=True,
    metavar="params|bytes|kv_numbers|WORKLOAD",
    help="What is limited: parameters, bytes (with --scheme), the KV cache (with a form such as latent), or the "
    "latency of one of the workloads.",
)
@recipe_options(limits=False)
@output_option(_FRONTIER, "The frontier to write; an existing file is replaced.", default="frontier.json")
@plot_option("Draw perplexity against sizes and latency")
def frontier(
    source: str, plot: Path | None, output: Path, asked: Callable[[str], dict[str, Any]], **steps: Any
) -> Answer:
    """Choose for the whole range of budgets at once.

    MODEL is a directory, a hub id, or a packaged model (smollm2, gemma3-270m). Measures what each choice loses on
    calibration text, once, then finds the least loss for each of many budgets, each with a proof. A FILE that this
    command wrote is shown again, without a model.
    """
    from gac.reporting.frontier import figure_of_frontier, frontier_table
    from gac.reporting.page import save

    if source.endswith(".json") or os.path.isfile(source):  # models are directories or names
        measuring = {parameter.name for parameter in click.get_current_context().command.params}
        refuse_given(measuring - {"source", "plot", "as_json", "quiet"}, f"with a model; {source} is a saved frontier.")
        path, found = source, gac.Frontier.load(source)
    else:
        _FRONTIER.check(output)
        path, found = str(output), gac.frontier(source, **asked(source), **steps)
        if leads():
            found.save(output)
        note(f"saved as {output}")
    if plot is not None and leads():
        save(figure_of_frontier(found), plot)
        note(f"drawn in {plot}")
    return Answer({"path": path} | _range(found), lambda: [frontier_table(found)])


def _range(found: "Frontier") -> dict[str, Any]:
    """The frontier without its sites and choices, and with the fractions that follow from them."""
    from gac.core.io import to_json

    document: dict[str, Any] = json.loads(to_json(found))
    del document["sites"]
    for point, made in zip(document["points"], found.points, strict=True):
        del point["choice"]
        point["kept"] = point["params"] / found.dense_params
        point |= {"bytes": found.bytes(made), "bits": found.bits(made), "kv_numbers": found.kv_numbers(made)}
    sizes = {"params": found.dense_params, "bytes": found.dense_bytes, "kv_numbers": found.dense_kv_numbers}
    dense = sizes | {"perplexity": found.dense_perplexity, "latency_ns": found.dense_ns}
    return document | {"dense": dense}


@click.command(cls=Verb, resume=f"No checkpoint was written. {STATISTICS_KEPT}")
@click.argument("model")
@click.option("--plan", "plan_file", type=FILE, required=True, help="A plan that gac allocate wrote.")
@output_option(_NEW, "The directory to write.", required=True)
@click.option("--overwrite", is_flag=True, help="Replace an existing compressed checkpoint.")
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float32"]),
    help="Of the numbers that no scheme stores; the plan counts 16 bits for each. Default: MODEL's own, for a packaged "
    "model bfloat16.",
)
@tokenizer_option
def compress(
    model: str, plan_file: Path, output: Path, overwrite: bool, dtype: str | None, tokenizer: str | None
) -> Answer:
    """Apply a plan to MODEL and save the smaller model.

    MODEL is the one that the plan was made for. The directory holds safetensors, the config, the plan, the
    tokenizer and a model card; gac.load opens it.
    """
    import torch

    from gac.checkpoint.target import check_free
    from gac.models.loading import load_tokenizer
    from gac.reporting.tables import plan_line
    from gac.runtime.storage.modules import count_parameters

    check_free(output, overwrite)
    plan = gac.Plan.load(plan_file)
    note(
        f"loading {model}; its statistics on {plan.measured.calibration} are "
        "read, or taken again where they are gone" + (" (in two shots)" if plan.recipe.measure.shots == 2 else "")
    )
    reader = load_tokenizer(tokenizer or model)
    small = gac.compress(model, plan, tokenizer=reader, dtype=getattr(torch, dtype) if dtype else None)
    gac.save(small, output, tokenizer=reader, overwrite=overwrite)
    sizes = {
        "parameters": count_parameters(small),
        "dense_parameters": plan.measured.params,
    }
    return _saved(output, sizes | {"plan": plan_document(plan)}, plan_line(plan))


@click.command(cls=Verb, resume="No checkpoint was written; the same command goes on from its last state.")
@click.argument("directory", type=FILE)
@click.option("--against", required=True, metavar="MODEL", help="The dense model that the plan was made for.")
@output_option(_NEW, "The directory to write.", required=True)
@click.option(
    "--text",
    "texts",
    multiple=True,
    metavar="TEXT[:NxL]",
    help="What to heal on: wiki-sample, wikitext2, c4 or a file, and N windows of L tokens; without a size all of it "
    "that is for calibration. self: text that MODEL writes. Repeatable. Default: the plan's calibration text.",
)
@click.option("--minutes", type=float, metavar="M", help="Wall-clock time, everything counted; 5 by default.")
@click.option(
    "--tokens", type=int, metavar="N", help="Tokens to read in training, instead of a time: the same run every time."
)
@click.option("--learning-rate", type=float, metavar="R", help="Relative to the size of each weight.")
@click.option(
    "--blocks",
    type=float,
    metavar="F",
    help="The part of the work that goes to decoder layers by themselves; 0.1 by default.",
)
@click.option("--dense", is_flag=True, help="Train the weights, too, that the plan leaves dense.")
@click.option(
    "--labels",
    type=float,
    metavar="F",
    help="In the end, this part of the loss is the text's own next tokens; 0 by default: only what MODEL says counts.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the order of the text, and of MODEL's own.")
@click.option("--report", type=Figure(), metavar="FILE", help="Draw the loss curves (.png, .pdf or .svg).")
@click.option("--overwrite", is_flag=True, help="Replace an existing compressed checkpoint.")
@tokenizer_option
def heal(
    directory: Path,
    against: str,
    output: Path,
    texts: tuple[str, ...],
    overwrite: bool,
    tokenizer: str | None,
    **how: Any,
) -> Answer:
    """Train a compressed model for minutes towards the dense one, and save it.

    DIRECTORY was written by gac compress; it is not changed. Forms, dims, schemes and bytes stay as they are. The state
    that is best on text held out is kept, and the plan in the new directory says what it was healed on.
    """
    from gac.checkpoint.target import check_free
    from gac.healing.text import check_names
    from gac.models.loading import load_tokenizer

    check_free(output, overwrite)
    check_names(texts)
    small = gac.load(directory)
    given = small.gac_plan.healed
    asked = {name: value for name, value in how.items() if value is not None}
    try:
        gac.heal(small, against=against, text=texts or None, tokenizer=tokenizer, **asked)
    finally:
        if small.gac_plan.healed != given:  # also where a loss was not finite, in the best state before that
            gac.save(small, output, tokenizer=load_tokenizer(tokenizer or against), overwrite=overwrite)
            note(f"saved in {output}")
    healed = small.gac_plan.healed[-1]
    lost = f"divergence on text held out: {healed.before:.4f} -> {healed.after:.4f} nats a token"
    return _saved(output, {"healed": asdict(healed)}, f"healed on {healed}", lost)


@click.command(cls=Verb)
@click.argument("directory", type=FILE)
@output_option(_EITHER, "The new directory; with --gguf the file.", required=True)
@click.option("--merge", is_flag=True, help="Give every weight its dense dims again: neither smaller nor faster.")
@click.option(
    "--compressed-tensors",
    is_flag=True,
    help="Leave weights of few bits as they are, for readers of compressed-tensors.",
)
@click.option("--gguf", is_flag=True, help="Write one GGUF file, which llama.cpp runs, instead of a directory.")
@click.option("--overwrite", is_flag=True, help="Replace an existing GGUF file.")
def export(directory: Path, output: Path, merge: bool, compressed_tensors: bool, gguf: bool, overwrite: bool) -> Answer:
    """Write a compressed model as one of its stock architecture.

    DIRECTORY was written by gac compress. Tools that know nothing of GAC open the new one without any code. A stock
    architecture can keep the dims where MLPs alone are narrower, by as much in every layer; --merge does without.
    """
    Target(CheckpointError, directory=not gguf).check(output)
    if gguf:
        refuse_given({"compressed_tensors"}, "without --gguf.")
        return _gguf(directory, output, merge, overwrite)
    refuse_given({"overwrite"}, "with --gguf.")
    from gac.checkpoint.target import check_free

    check_free(output)
    gac.export(directory, output, merge=merge, compressed_tensors=compressed_tensors)
    return _saved(output, {"merged": merge, "compressed_tensors": compressed_tensors})


def _gguf(directory: Path, output: Path, merge: bool, overwrite: bool) -> Answer:
    """One file instead of a directory."""
    found = gac.export_gguf(directory, output, merge=merge, overwrite=overwrite)
    from gac.reporting.gguf import gguf_tables

    return Answer(asdict(found) | {"exact": found.exact, "merged": merge}, lambda: gguf_tables(found))


def _saved(output: Path, document: dict[str, Any], *lines: Any) -> Answer:
    """What was written, and how large it is."""
    size = sum(file.stat().st_size for file in output.rglob("*") if file.is_file())
    found = {"directory": str(output), "bytes": size} | document
    return Answer(found, lambda: [f"saved in {output}, {size / 1e6:,.1f} MB", *lines])


@click.command(cls=Verb, resume="No checkpoint was written; run it again.")
@click.argument("directory", type=FILE)
@output_option(_NEW, "The directory to write.", required=True)
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
def repair(directory: Path, output: Path, workloads: Sequence[str], **how: Any) -> Answer:
    """Zero-pad the dims of a compressed checkpoint, without changing its outputs.

    DIRECTORY holds factored weights as SVD-LLM, ASVD or PaLU store them, MLPs with pruned neurons, latent attention, or
    a checkpoint of GAC. It is never written to.
    """
    repaired = gac.repair(directory, output, workloads=workloads, **how)
    from gac.repairs.report import repair_document, repair_tables

    return Answer(repair_document(repaired), lambda: repair_tables(repaired))
