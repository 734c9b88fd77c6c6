"""Commands that check models: perplexity, divergence and tasks (eval); latency on this machine's GPU (bench)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

import gac
from gac.cli.command import Answer, Command, note, plan_document
from gac.cli.options import (
    AT_LEAST_1,
    document_option,
    flag,
    forms_option,
    option,
    profile_option,
    reject_options,
    several,
    switch,
    tokenizer_option,
    workloads_option,
)
from gac.core.display import fields
from gac.core.distributed.launch import processes

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gac.core.workloads import Workload
    from gac.evaluation.results import Evaluated, Evaluation
    from gac.evaluation.versions import Planner, Version
    from gac.plan.evidence import RoundedHead
    from gac.runtime.parallel.ranks import Ranks

    VersionLists = dict[Workload, list[Version]]
    Timed = Callable[[Ranks | None], Answer]

_TEXT = "wiki-sample"
_KEPT = 0.85


def _names(_ctx: click.Context, _option: click.Parameter, text: str | None) -> tuple[str, ...]:
    names = [name.strip() for name in text.split(",")] if text is not None else []
    if not all(names):
        raise click.BadParameter(f"{text!r} is not like hellaswag,piqa or task.yaml.")
    return tuple(names)


@click.command("eval", cls=Command)
@click.argument("models", metavar="MODEL_OR_DIR...", nargs=-1, required=True)
@several("--text texts", f"wiki-sample, wikitext2, c4 or a file. Default: {_TEXT}, without --tasks.", metavar="TEXT")
@option("--windows", "Number of windows to read, in even steps. Default: all.", AT_LEAST_1)
@option("--length", "Tokens in a window. Default: 2048 for wikitext2 and c4, else 1024.", click.IntRange(min=2))
@switch(
    "--bos/--no-bos",
    "Begin every window with BOS, or none. Default: if the tokenizer adds it; in wikitext2 and c4 at the head alone.",
)
@option("--against", "Compare with this model, usually the dense one, on the same tokens.", metavar="MODEL")
@switch("--kl/--no-kl", "With --against: KL divergence and top-1 agreement; needs both in memory.", default=True)
@option("--tasks", "Tasks of lm-evaluation-harness, or YAML files.", None, "NAME|FILE,...", callback=_names)
@option("--num-fewshot", "Examples before every item. Default: the task's own.", click.IntRange(min=0))
@option("--limit", "Score only the first N items of each task. Default: all.", AT_LEAST_1)
@option("--batch", "Windows, and requests of a task, in one batch.", AT_LEAST_1, default=1)
@tokenizer_option
@document_option
def evaluate(models: tuple[str, ...], texts: tuple[str, ...], **options: Any) -> Answer:
    """Measure models on text that no calibration uses, and on tasks, side by side.

    MODEL_OR_DIR is a directory (dense or compressed), a hub id, or a packaged model; several are measured alike, one
    after the other. With --against, the prediction of a compressed model's plan is shown with the measurement.
    """
    if not options["tasks"]:
        reject_options({"num_fewshot", "limit"}, "with --tasks.")
    if options["against"] is None:
        reject_options({"kl"}, "with --against.")
    texts = texts or (() if options["tasks"] else (_TEXT,))
    if not texts:
        reject_options({"windows", "length", "bos"}, "with --text.")
    from gac.measurement.text import check_text, window_length
    from gac.models.loading import load_tokenizer

    for text in texts:
        check_text(text)
    count = f"{options['windows']:,}" if options["windows"] else "all"
    work = [f"{count} windows of {options['length'] or window_length(text):,} tokens of {text}" for text in texts]
    work += [f"the tasks {', '.join(options['tasks'])}"] if options["tasks"] else []
    note(f"on each model {' and '.join(work)}")
    if options["tokenizer"]:
        options["tokenizer"] = load_tokenizer(options["tokenizer"])
    result = gac.evaluate(models, text=texts[0] if texts else None, also=texts[1:], **options)
    document: dict[str, Any] = {"models": [_figures(result, model) for model in result.models]}
    if result.against is not None:
        document["against"] = _figures(result, result.against)
    return Answer(document, lambda: _evaluation_tables(result))


def _evaluation_tables(result: "Evaluation") -> list["RenderableType"]:
    from gac.reporting.evaluation import perplexity_table, task_table
    from gac.reporting.tables import memory_table, plan_line

    tables: list[RenderableType] = [perplexity_table(result)]
    if result.models[0].scores:
        tables.append(task_table(result))
    planned = [(model.name, model.plan) for model in result.models if model.plan is not None]
    if len(result.models) == 1:
        tables += [plan_line(plan) for _, plan in planned]
    if planned and all(plan.measured.digest == planned[0][1].measured.digest for _, plan in planned):
        tables.append(memory_table(planned))
    return tables


def _figures(result: "Evaluation", model: "Evaluated") -> dict[str, Any]:
    """The measurements of a model, without those that were not made, and the ratios that follow."""
    from math import exp

    document = asdict(replace(model, plan=None))
    for number, on_text in enumerate((document, *document["also"])):
        log_ratio = result.log_ratio(model, number)
        if log_ratio is not None and model is not result.against:
            on_text |= {"ratio": exp(log_ratio), "log_ratio": log_ratio}
        if model.predicted is not None:
            on_text["predicted_perplexity"] = result.predicted_perplexity(model, number)
    document["also"] = list(map(_without_empty, document["also"]))
    document = _without_empty(document)
    return document if model.plan is None else document | {"plan": plan_document(model.plan)}


def _without_empty(figures: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in figures.items() if value is not None and value != () and value != []}


@click.command(cls=Command)
@click.argument("models", nargs=-1, metavar="[MODEL_OR_DIR]...")
@option("--against", "The model that speeds are relative to. Default: the first one.", metavar="MODEL")
@option("--shapes", "Time plans for a known model's shapes (llama-3-8b), with random weights.", metavar="NAME")
@option("--budget", "With --shapes: kept fraction of parameters.", float, show_default="0.85, or 1 with --kv-cache")
@option(
    "--kv-cache",
    "With --shapes and --form: time plans with at most this fraction of the dense model's KV cache.",
    float,
    "F",
)
@forms_option("With --kv-cache: a form that makes the cache smaller, such as latent:1.", (), False)
@profile_option("With --shapes: latency table to plan with. Default: this GPU's.")
@several("--scheme schemes", "With --shapes: time this scheme, and plans that choose among all.", None, "NAME[:N]")
@option("--head", "With --scheme: time all also with embedding and LM head in this one (w8a16).", None, "SCHEME")
@option("--layers", "With --shapes: number of decoder layers. Default: the model's.", AT_LEAST_1)
@workloads_option("Workload to time")
@flag("--compiled", "Also time layers through torch.compile with shape_padding; takes minutes.")
@document_option
def bench(
    models: Sequence[str],
    against: str | None,
    shapes: str | None,
    workloads: Sequence[str],
    compiled: bool,
    **options: Any,
) -> Answer:
    """Time whole models on this machine's GPU: prefill and decode, under CUDA graphs, in turns.

    MODEL_OR_DIR is a directory (dense or compressed), a hub id, or a packaged model; all have to fit in memory
    together. With --shapes no weights are needed: GAC's plans are timed with the dense model, a compressor's own dims,
    and these padded and rounded down; with --scheme also all weights in one scheme; with --kv-cache plans of a smaller
    cache alone.
    """
    _check_usage(models, against, shapes, options)
    from gac.core.workloads import Workload
    from gac.evaluation.latency import METHOD
    from gac.evaluation.split import end_together, ranks_of_torchrun
    from gac.models.loading import load_config
    from gac.profiling.timing.device import require_gpu

    parsed = tuple(map(Workload.parse, workloads))
    timed: Timed
    if shapes is not None:
        timed = _shapes_bench(shapes, parsed, compiled, options)
    else:
        names = (*([against] if against else ()), *models)
        for name in names:
            load_config(name)  # refuses an unknown name before a GPU is needed
        timed = partial(_time_models, names, parsed, compiled)
    gpu = require_gpu(
        "Run it where there is one. On a CPU gac eval measures what models lose, and plans predict latencies."
    )
    ranks = ranks_of_torchrun()
    if ranks is not None:
        note(f"split over {ranks.size} GPUs; every number is the slowest one's")
    answer = timed(ranks)
    if ranks is not None:
        end_together(ranks)
    document = {"gpu": gpu, "gpus": ranks.size if ranks else 1, "method": METHOD, **answer.document}
    return Answer(document, answer.tables)


def _check_usage(models: Sequence[str], against: str | None, shapes: str | None, options: Mapping[str, Any]) -> None:
    if (shapes is None) == (not models):
        raise click.UsageError("give models, or --shapes.")
    if shapes is not None and against is not None:
        raise click.UsageError("--against goes with models; with --shapes the dense model is there.")
    if shapes is None:
        reject_options({"budget", "kv_cache", "forms", "profile", "layers", "schemes", "head"}, "with --shapes.")
    elif options["head"] and not options["schemes"]:
        raise click.UsageError("--head goes with --scheme.")
    elif (options["kv_cache"] is None) != (not options["forms"]):
        raise click.UsageError("--kv-cache and --form go together.")
    elif options["forms"] and options["schemes"]:
        raise click.UsageError("--kv-cache goes without --scheme.")
    elif processes() > 1 and (options["head"] or options["forms"]):
        raise click.UsageError(f"{'--head' if options['head'] else '--kv-cache'} is timed on one GPU.")


def _shapes_bench(name: str, workloads: "tuple[Workload, ...]", compiled: bool, options: Mapping[str, Any]) -> "Timed":
    """Refuse what cannot be planned, and return the part that needs a GPU."""
    from gac.evaluation.shapes import planner_of_shapes
    from gac.evaluation.versions import cache_versions, check_cached, compiled_versions
    from gac.measurement.curve_library import CurveLibrary
    from gac.models.shapes import shapes_of

    library = CurveLibrary.load()
    schemes, forms, kv_cache, layers = (options[key] for key in ("schemes", "forms", "kv_cache", "layers"))
    planner = planner_of_shapes(name, workloads, options["profile"], layers, library, schemes, processes())
    rounded = library.head_of(shapes_of(name), options["head"]) if options["head"] else None
    kept = options["budget"] if options["budget"] is not None else _KEPT if kv_cache is None else 1.0
    if kv_cache is None:
        planner.problem_of(kept)
    else:
        check_cached(planner, kept, kv_cache, forms)

    def timed(ranks: "Ranks | None") -> Answer:
        note(f"{name} with random weights; planned with {library}")
        if kv_cache is not None:
            lists = dict.fromkeys(workloads, cache_versions(planner, kept, kv_cache, forms))
        elif schemes:
            lists = _in_schemes(planner, kept, workloads, schemes, rounded)
        else:
            lists = _in_dims(planner, kept, workloads)
        if compiled:
            lists = {run: [*versions, *compiled_versions(planner, versions)] for run, versions in lists.items()}
        note("planned")
        return _time_shapes(name, planner, lists, layers, ranks, str(library))

    return timed


def _time_shapes(
    name: str, planner: "Planner", lists: "VersionLists", layers: int | None, ranks: "Ranks | None", library: str
) -> Answer:
    from gac.evaluation.bench import Bench
    from gac.evaluation.latency import GraphTimer
    from gac.evaluation.shapes import model_of_shapes
    from gac.evaluation.split import SlowestTimer, SplitShapes
    from gac.reporting.evaluation import latency_table

    split = SplitShapes(name, ranks, layers=layers) if ranks else None
    model = split.dense if split else model_of_shapes(name, layers=layers)
    graphs, problem = GraphTimer(), planner.problem
    timer = SlowestTimer(graphs, ranks) if ranks else graphs
    bench = Bench(model, problem.sites, problem.timing, planner.dense_versions(), timer, graphs.memory_bytes, split)
    results = [result for workload, versions in lists.items() for result in bench.run(versions, workload)]
    rows = [asdict(result) | fields(result, "speedup", "error", "memory_error") for result in results]
    document = {"shapes": name, "curves": library, "params": problem.params, "results": rows}
    return Answer(document, lambda: [latency_table(results, problem.params), f"planned with {library}"])


def _in_dims(planner: "Planner", budget: float, workloads: "Sequence[Workload]") -> "VersionLists":
    from gac.evaluation.versions import UNALIGNED, fastest_versions, versions_at

    shared = versions_at(planner, budget)
    loss = next(version.loss for version in shared if version.name == UNALIGNED)
    return {run: [*shared, *fastest_versions(planner, budget, run, loss)] for run in workloads}


def _in_schemes(
    planner: "Planner",
    budget: float,
    workloads: "Sequence[Workload]",
    schemes: Sequence[str],
    head: "RoundedHead | None",
) -> "VersionLists":
    from gac.evaluation.versions import fastest_in_schemes, scheme_versions, with_head

    lists, shared = {}, scheme_versions(planner, budget, schemes)
    for workload in workloads:
        versions, missing = fastest_in_schemes(planner, workload, schemes, shared)
        if head:
            rounded, impossible = with_head(planner, workload, schemes, shared, head)
            versions, missing = [*versions, *rounded], [*missing, *impossible]
        lists[workload] = [*shared, *versions]
        for line in missing:
            note(f"{workload}: not timed: {line}")
    return lists


def _time_models(
    names: Sequence[str], workloads: "tuple[Workload, ...]", compiled: bool, ranks: "Ranks | None"
) -> Answer:
    from gac.evaluation.latency import Entry, GraphTimer, time_in_turns
    from gac.evaluation.split import SlowestTimer
    from gac.reporting.evaluation import timed_table

    models = {name: _open(name, ranks) for name in dict.fromkeys(names)}
    timer = SlowestTimer(GraphTimer(), ranks) if ranks else GraphTimer()
    entries = [Entry(name, partial(models.__getitem__, name), compiled) for name in models]
    results = [timed for workload in workloads for timed in time_in_turns(entries, workload, timer)]
    return Answer({"results": [asdict(result) for result in results]}, lambda: [timed_table(results)])


def _open(name: str, ranks: "Ranks | None") -> Any:
    """A dense or a compressed model, in bfloat16 unless it was saved in float16."""
    import torch

    from gac.checkpoint.load import open_model
    from gac.evaluation.split import open_split
    from gac.runtime.storage.modules import without_kernels

    note(f"loading {name}")
    model = open_split(name, ranks) if ranks else open_model(name).model
    model = model if model.dtype == torch.float16 else model.bfloat16()
    for reason, count in without_kernels(model).items():
        note(f"{name}: {count} matrices are unpacked in plain PyTorch, which is slow: {reason}")
    return model
