"""Commands that plan, make models smaller, verify and convert them."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

import gac
from gac.cli.command import Answer, Command, frontier_document, note, plan_document
from gac.cli.options import (
    FILE,
    Figure,
    Target,
    flag,
    option,
    overwrite_option,
    reject_options,
    several,
    tokenizer_option,
)
from gac.cli.recipe import FIRST, STATISTICS_KEPT, recipe_options
from gac.core.distributed.launch import leads
from gac.core.errors import CheckpointError, PlanError
from gac.healing.records import TOKENS
from gac.plan.costs import COSTS
from gac.plan.evidence import Healed
from gac.plan.recipe import Recipe

_DIRECTORY = Target(CheckpointError, directory=True)
_FRONTIER = Target(PlanError, early=False)


@click.command(cls=Command, resume=STATISTICS_KEPT, first=FIRST)
@click.argument("model")
@recipe_options(limits=True)
@flag("--solve-again", "Solve the knapsack again with HiGHS; fail if it finds a better choice.")
@option(
    "--check-text", "A text like those that the model will read: warn if the calibration text differs.", None, "FILE"
)
@option("-o --output", "The plan to write; an existing file is replaced.", Target(PlanError), default="plan.json")
def allocate(model: str, output: Path, solve_again: bool, check_text: str | None, **options: Any) -> Answer:
    """Choose the form and dim of every weight of MODEL.

    MODEL is a directory, a hub id, or a packaged model (smollm2, gemma3-270m). The choice is that of least predicted
    loss within the limits, with a proof.
    """
    plan = gac.allocate(model, **request(options), solve_again=solve_again, check_text=check_text)
    from gac.plan.layers import plan_table
    from gac.reporting.tables import plan_summary

    if leads():
        plan.save(output)
    note(f"saved as {output}")
    return Answer({"path": str(output)} | plan_document(plan), lambda: [plan_table(plan), plan_summary(plan)])


def request(options: dict[str, Any]) -> dict[str, Any]:
    """Convert the options of a recipe to ``recipe`` and ``tokenizer`` of ``gac.allocate``; refuse contradictions."""
    file, tokenizer, step = (options.pop(name) for name in ("recipe_file", "tokenizer", "step"))
    if file is not None:
        reject_options({*options, "step"}, "without --recipe: write it in the file.")
    if step is not None and options["align"] is False:
        raise click.UsageError("--align-to goes without --no-align.", click.get_current_context())
    options |= {} if step is None else {"align": step}
    chosen = {name: value for name, value in options.items() if value not in (None, ())}
    recipe = Recipe.of(**chosen) if file is None else Recipe.load(file)
    if tokenizer is not None:  # a wrong name is refused before the weights are read
        from gac.models.loading import load_tokenizer

        tokenizer = load_tokenizer(tokenizer)
    return {"recipe": recipe, "tokenizer": tokenizer}


@click.command(cls=Command, resume=STATISTICS_KEPT, first=(*FIRST, "points", "limit", "plot"))
@click.argument("source", metavar="MODEL|FILE")
@option("--points", "Number of budgets, from the smallest up.", int, default=100)
@option(
    "--limit",
    "The limited quantity: parameters, bytes (with --scheme), the KV cache (with a form such as latent), or a latency.",
    metavar="|".join((*COSTS, "WORKLOAD")),
    default="params",
)
@recipe_options(limits=False)
@option("-o --output", "The frontier to write; an existing file is replaced.", _FRONTIER, default="frontier.json")
@option("--plot", "Draw perplexity against sizes and latency (.png, .pdf or .svg).", Figure(), "FILE")
def frontier(source: str, points: int, limit: str, plot: Path | None, output: Path, **options: Any) -> Answer:
    """Choose for the whole range of budgets at once.

    MODEL is a directory, a hub id, or a packaged model (smollm2, gemma3-270m). Measures the loss of each choice on
    calibration text, once, then finds the least loss for each of many budgets, each with a proof. A FILE that this
    command wrote is shown again, without a model.
    """
    from gac.reporting.frontier import figure_of_frontier
    from gac.reporting.page import save

    if source.endswith(".json") or os.path.isfile(source):  # models are directories or names
        measuring = {parameter.name for parameter in click.get_current_context().command.params}
        reject_options(
            measuring - {"source", "plot", "as_json", "quiet"}, f"with a model; {source} is a saved frontier."
        )
        path, result = source, gac.Frontier.load(source)
    else:
        _FRONTIER.check(output)
        path, result = str(output), gac.frontier(source, **request(options), points=points, limit=limit)
        if leads():
            result.save(output)
        note(f"saved as {output}")
    if plot is not None and leads():
        save(figure_of_frontier(result), plot)
        note(f"drawn in {plot}")
    return Answer({"path": path} | frontier_document(result), lambda: [*result.tables()])


@click.command(cls=Command, resume=f"No checkpoint was written. {STATISTICS_KEPT}")
@click.argument("model")
@option("--plan plan_file", "A plan of gac allocate.", FILE, required=True)
@option("-o --output", "The directory to write.", _DIRECTORY, required=True)
@overwrite_option
@option(
    "--dtype",
    "Dtype of numbers without a scheme; the plan counts 16 bits. Default: MODEL's own, of a packaged one bfloat16.",
    click.Choice(["bfloat16", "float32"]),
)
@option(
    "--heal",
    f"Tokens to train on at the end, towards MODEL, from the calibration text. Default: {TOKENS} on a GPU with room "
    "for it, else 0.",
    int,
    "N",
)
@tokenizer_option
def compress(
    model: str,
    plan_file: Path,
    output: Path,
    overwrite: bool,
    dtype: str | None,
    heal: int | None,
    tokenizer: str | None,
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
    shots = " (in two shots)" if plan.recipe.measure.shots == 2 else ""
    statistics = f"its statistics ({plan.measured.calibration}) are read, or measured again if missing{shots}"
    note(f"loading {model}; {statistics}")
    reader = load_tokenizer(tokenizer or model)
    how = {"tokenizer": reader, "dtype": getattr(torch, dtype) if dtype else None, "heal": heal}
    small = gac.compress(model, plan, **how)
    gac.save(small, output, tokenizer=reader, overwrite=overwrite)
    sizes = {"parameters": count_parameters(small), "dense_parameters": plan.measured.params}
    applied = small.gac_plan
    healed = [_healed(each) for each in applied.healed]
    return _saved(output, sizes | {"plan": plan_document(applied)}, plan_line(applied), *healed)


@click.command(cls=Command, resume="No checkpoint was written; rerun the command to resume from its last state.")
@click.argument("directory", type=FILE)
@option("--against", "The dense model that the plan was made for.", metavar="MODEL", required=True)
@option("-o --output", "The directory to write.", _DIRECTORY, required=True)
@several(
    "--text texts",
    "Training text: wiki-sample, news-sample, python-reference, wikitext2, c4, chat, code or a file, and N windows of "
    "L tokens; without a size all of its calibration part. self: text that MODEL generates. Default: the plan's "
    "calibration text.",
    metavar="TEXT[:NxL]",
)
@option("--minutes", "Wall-clock time in total. Default: 5.", float, "M")
@option("--tokens", "Tokens to train on, instead of a time: the same run every time.", int, "N")
@option(
    "--learning-rate",
    "Learning rate, relative to the size of each weight. Default: by the size of the model.",
    float,
    "R",
)
@option("--blocks", "Fraction of the work for single decoder layers. Default: 0.1.", float, "F")
@flag("--dense", "Also train the weights that the plan leaves dense.")
@option("--labels", "Final weight of the text's own next tokens in the loss. Default: 0.", float, "F")
@option("--seed", "Seed of the order of the text, and of the text that MODEL generates.", int, default=0)
@option("--report", "Draw the loss curves (.png, .pdf or .svg).", Figure(), "FILE")
@overwrite_option
@tokenizer_option
def heal(
    directory: Path,
    against: str,
    output: Path,
    texts: tuple[str, ...],
    overwrite: bool,
    tokenizer: str | None,
    **options: Any,
) -> Answer:
    """Distil the dense model into a compressed one for some minutes, and save it.

    DIRECTORY was written by gac compress; it is not changed. Forms, dims, schemes and bytes stay as they are. The state
    with the least divergence on held-out text is saved, with a record of the training in its plan.
    """
    from gac.checkpoint.target import check_free
    from gac.healing.text import check_names
    from gac.models.loading import load_tokenizer

    check_free(output, overwrite)
    check_names(texts)
    small = gac.load(directory)
    before = small.gac_plan.healed
    chosen = {name: value for name, value in options.items() if value is not None}
    try:
        gac.heal(small, against=against, text=texts or None, tokenizer=tokenizer, **chosen)
    finally:
        if small.gac_plan.healed != before:  # also where a loss was not finite, in the best state before that
            gac.save(small, output, tokenizer=load_tokenizer(tokenizer or against), overwrite=overwrite)
            note(f"saved in {output}")
    healed = small.gac_plan.healed[-1]
    return _saved(output, {"healed": asdict(healed)}, _healed(healed))


@click.command(cls=Command, resume="Nothing was changed; run it again.")
@click.argument("directory", type=FILE)
def verify(directory: Path) -> Answer:
    """Check that a compressed model is as it was saved, to the last bit.

    DIRECTORY was written by gac compress or gac.save, with digests of every tensor, of the config and of all other
    files. Differences are listed. The printed digest covers everything: compare it with the one that the author
    published.
    """
    result = gac.verify(directory)
    lines = [
        f"{directory} is as it was saved",
        f"tensors      {result.tensors:,}, {result.bytes:,} bytes",
        f"planned      {_planned(result)}",
        f"config       {result.keys} keys",
        f"files        {result.files}",
        f"digest       {result.digest}",
    ]
    if result.not_checked:
        lines.append(f"not checked  {', '.join(result.not_checked)} (not there when it was saved)")
    return Answer({"directory": str(directory)} | asdict(result), lambda: ["\n".join(lines)])


def _planned(result: "gac.Verified") -> str:
    shapes = f", and {result.shape_bytes:,} for the shapes of packed matrices" if result.shape_bytes else ""
    if result.planned_bytes + result.shape_bytes == result.bytes:
        return f"{result.planned_bytes:,} bytes{shapes}: as in the files"
    return f"{result.planned_bytes:,} bytes, with 16 bits for each number that is not rounded{shapes}"


@click.command(cls=Command)
@click.argument("directory", type=FILE)
@option("-o --output", "The new directory; with --gguf the file.", Target(CheckpointError, early=False), required=True)
@flag("--merge", "Give every weight its dense dims again: neither smaller nor faster.")
@flag("--compressed-tensors", "Keep low-bit weights as they are, for readers of compressed-tensors.")
@flag(
    "--deci",
    "Write a DeciLM, whose layers may differ in width and heads or skip a block. vLLM serves it without GAC, given a "
    "class for its config. For a Llama, Mistral or Qwen2.",
)
@flag("--gguf", "Write one GGUF file, which llama.cpp runs, instead of a directory.")
@flag("--overwrite", "Replace an existing GGUF file.")
def export(directory: Path, output: Path, gguf: bool, overwrite: bool, **ways: Any) -> Answer:
    """Convert a compressed model to its stock architecture, or to DeciLM.

    DIRECTORY was written by gac compress. Tools without GAC open the new one. A stock architecture can keep the dims if
    only MLPs are narrower, by the same width in every layer, and every layer has as many experts. DeciLM can keep those
    of gac allocate --form narrow --form skip. --merge works for all plans but those of fewer or narrower experts.
    """
    from gac.checkpoint.target import check_free

    Target(CheckpointError, directory=not gguf).check(output)
    if gguf:
        reject_options({"compressed_tensors"}, "without --gguf.")
        merge, deci = ways["merge"], ways["deci"]
        written = gac.export_gguf(directory, output, merge=merge, deci=deci, overwrite=overwrite)
        from gac_extensions.gguf.tables import gguf_tables

        return Answer(asdict(written) | {"exact": written.exact, "merged": merge}, lambda: gguf_tables(written))
    reject_options({"overwrite"}, "with --gguf.")
    check_free(output)
    gac.export(directory, output, **ways)
    return _saved(output, {"merged": ways["merge"]} | {name: ways[name] for name in ("compressed_tensors", "deci")})


def _healed(healed: Healed) -> str:
    divergence = f"divergence on text held out: {healed.before:.4f} -> {healed.after:.4f} nats a token"
    return f"healed on {healed}\n{divergence}"


def _saved(output: Path, document: dict[str, Any], *lines: Any) -> Answer:
    size = sum(file.stat().st_size for file in output.rglob("*") if file.is_file())
    document = {"directory": str(output), "bytes": size} | document
    return Answer(document, lambda: [f"saved in {output}, {size / 1e6:,.1f} MB", *lines])
