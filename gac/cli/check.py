"""The commands that check models: perplexity, divergence and tasks; and the time they take on this machine's GPU."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

import gac
from gac.cli.measuring import tokenizer_named, tokenizer_option
from gac.cli.options import bos_option, forms_option, plan_document, profile_option, refuse_given, workloads_option
from gac.cli.verb import Answer, Verb, document_option, note
from gac.core.distributed.launch import processes

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gac.core.workloads import Workload
    from gac.evaluation.results import Evaluated, Evaluation
    from gac.evaluation.versions import Planner, Version
    from gac.measurement.curve_library import CurveLibrary
    from gac.plan.evidence import RoundedHead
    from gac.runtime.parallel.ranks import Ranks

    Lists = dict[Workload, list[Version]]
    Timed = Callable[[Ranks | None], Answer]

_TEXT = "wiki-sample"
_KEPT = 0.85


def _names(_ctx: click.Context, _option: click.Parameter, text: str | None) -> tuple[str, ...]:
    names = [name.strip() for name in text.split(",")] if text is not None else []
    if not all(names):
        raise click.BadParameter(f"{text!r} is not like hellaswag,piqa or task.yaml.")
    return tuple(names)


@click.command("eval", cls=Verb)
@click.argument("models", metavar="MODEL_OR_DIR...", nargs=-1, required=True)
@click.option(
    "--text",
    "texts",
    multiple=True,
    metavar="TEXT",
    help=f"wiki-sample, wikitext2, c4 or a file. Repeatable. Default: {_TEXT}; no text if --tasks is given.",
)
@click.option("--windows", type=click.IntRange(min=1), help="How many windows to read, in even steps. Default: all.")
@click.option(
    "--length",
    type=click.IntRange(min=2),
    help="Tokens in a window. Default: 2048 for wikitext2 and c4, as in published figures, else 1024.",
)
@bos_option(
    "Begin every window with BOS, or none. Default: every one where the tokenizer puts it first; wikitext2 and c4 have "
    "it at the head of the text alone, as in published figures."
)
@click.option("--against", metavar="MODEL", help="Compare with this model, usually the dense one, on the same tokens.")
@click.option(
    "--kl/--no-kl",
    default=True,
    show_default=True,
    help="With --against: measure KL divergence and top-1 agreement too. Needs both models in memory.",
)
@click.option(
    "--tasks",
    callback=_names,
    metavar="NAME|FILE,...",
    help="Tasks of lm-evaluation-harness, such as hellaswag,piqa, or YAML files of local tasks.",
)
@click.option("--num-fewshot", type=click.IntRange(min=0), help="Examples before every item. Default: the task's own.")
@click.option("--limit", type=click.IntRange(min=1), help="Score only the first N items of each task. Default: all.")
@click.option(
    "--batch",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Windows, and requests of a task, that run together.",
)
@tokenizer_option
@document_option
def evaluate(models: tuple[str, ...], texts: tuple[str, ...], tokenizer: str | None, **how: Any) -> Answer:
    """Measure models on text that no calibration uses, and on tasks, side by side.

    MODEL_OR_DIR is a directory (dense or compressed), a hub id, or a packaged model; several are measured alike, one
    after the other. With --against, what a compressed model's plan predicted is set beside what is measured.
    """
    if not how["tasks"]:
        refuse_given({"num_fewshot", "limit"}, "with --tasks.")
    if how["against"] is None:
        refuse_given({"kl"}, "with --against.")
    texts = texts or (() if how["tasks"] else (_TEXT,))
    if not texts:
        refuse_given({"windows", "length", "bos"}, "with --text.")
    from gac.measurement.text import check_text

    for text in texts:
        check_text(text)
    note(_plan_of_work(texts, how))
    named: dict[str, Any] = {"text": texts[0] if texts else None, "also": texts[1:]}
    result = gac.evaluate(models, tokenizer=tokenizer_named(tokenizer), **named, **how)
    document: dict[str, Any] = {"models": [_figures(result, model) for model in result.models]}
    if result.against is not None:
        document["against"] = _figures(result, result.against)
    from gac.reporting.evaluation import perplexity_table, task_table
    from gac.reporting.tables import memory_table, plan_line

    tables: list[RenderableType] = [perplexity_table(result)]
    if result.models[0].scores:
        tables.append(task_table(result))
    planned = [(model.name, model.plan) for model in result.models if model.plan is not None]
    for _, plan in planned if len(result.models) == 1 else ():
        tables.append(plan_line(plan))
    if planned and all(plan.measured.digest == planned[0][1].measured.digest for _, plan in planned):
        tables.append(memory_table(planned))
    return Answer(document, lambda: tables)


def _plan_of_work(texts: Sequence[str], how: dict[str, Any]) -> str:
    from gac.measurement.text import window_length

    many = f"{how['windows']:,}" if how["windows"] else "all"
    parts = [f"{many} windows of {how['length'] or window_length(text):,} tokens of {text}" for text in texts]
    parts += [f"the tasks {', '.join(how['tasks'])}"] if how["tasks"] else []
    return f"on each model {' and '.join(parts)}"


def _figures(result: "Evaluation", model: "Evaluated") -> dict[str, Any]:
    """What was measured of a model, without what was not, and the ratios that follow."""
    from math import exp

    document = asdict(replace(model, plan=None))
    for at, on_text in enumerate((document, *document["also"])):
        log_ratio = result.log_ratio(model, at)
        if log_ratio is not None and model is not result.against:
            on_text |= {"ratio": exp(log_ratio), "log_ratio": log_ratio}
        if model.predicted is not None:
            on_text["predicted_perplexity"] = result.predicted_perplexity(model, at)
    document["also"] = [_known(one) for one in document["also"]]
    document = _known(document)
    return document if model.plan is None else document | {"plan": plan_document(model.plan)}


def _known(figures: dict[str, Any]) -> dict[str, Any]:
    """Without what was not measured."""
    return {key: value for key, value in figures.items() if value is not None and value != () and value != []}


@click.command(cls=Verb)
@click.argument("models", nargs=-1, metavar="[MODEL_OR_DIR]...")
@click.option("--against", metavar="MODEL", help="The model that speeds are relative to. Default: the first one.")
@click.option(
    "--shapes", metavar="NAME", help="Time plans for a known model's shapes (llama-3-8b), with random weights."
)
@click.option(
    "--budget",
    type=float,
    show_default="0.85, or 1 with --kv-cache",
    help="With --shapes: kept fraction of parameters.",
)
@click.option(
    "--kv-cache",
    type=float,
    metavar="F",
    help="With --shapes and --form: time plans with at most this fraction of the dense model's KV cache.",
)
@forms_option("With --kv-cache: a form that makes the cache smaller, such as latent:1. Repeatable.", (), False)
@profile_option("With --shapes: latency table to plan with; by default this GPU's.")
@click.option(
    "--scheme",
    "schemes",
    multiple=True,
    metavar="NAME[:N]",
    help="With --shapes: time plans in this scheme, and plans that choose among all that are given. Repeatable.",
)
@click.option(
    "--head",
    metavar="SCHEME",
    help="With --scheme: time each scheme, and plans that choose, also with embedding and head in this one (w8a16).",
)
@click.option("--layers", type=click.IntRange(min=1), help="With --shapes: fewer layers.")
@workloads_option("What is timed")
@click.option(
    "--compiled", is_flag=True, help="Also time layers through torch.compile with shape_padding; takes minutes."
)
@document_option
def bench(
    models: Sequence[str], against: str | None, shapes: str | None, workloads: Sequence[str], compiled: bool, **how: Any
) -> Answer:
    """Time whole models on this machine's GPU: prefill and decode, under CUDA graphs, in turns.

    MODEL_OR_DIR is a directory (dense or compressed), a hub id, or a packaged model; all have to fit in memory
    together. With --shapes no weights are needed: GAC's plans are timed beside the dense model, a compressor's own
    dims, and these padded and rounded; with --scheme beside all weights in one scheme; with --kv-cache plans of a
    smaller cache alone.
    """
    if (shapes is None) == (not models):
        raise click.UsageError("give models, or --shapes.")
    if shapes is not None and against is not None:
        raise click.UsageError("--against goes with models; with --shapes the dense model is there.")
    if shapes is None:
        refuse_given({"budget", "kv_cache", "forms", "profile", "layers", "schemes", "head"}, "with --shapes.")
    elif how["head"] and not how["schemes"]:
        raise click.UsageError("--head goes with --scheme.")
    elif (how["kv_cache"] is None) != (not how["forms"]):
        raise click.UsageError("--kv-cache and --form go together.")
    elif how["forms"] and how["schemes"]:
        raise click.UsageError("--kv-cache goes without --scheme.")
    from gac.core.workloads import Workload
    from gac.evaluation.latency import METHOD
    from gac.evaluation.split import end_together, ranks_of_torchrun
    from gac.profiling.timing.device import require_gpu

    parsed = tuple(map(Workload.parse, workloads))
    if shapes is not None:
        timed = _of_shapes(shapes, parsed, compiled, **how)
    else:
        timed = _of_models((*([against] if against else ()), *models), parsed, compiled)
    gpu = require_gpu(
        "Run it where there is one. On a CPU gac eval measures what models lose, and plans predict latencies."
    )
    ranks = ranks_of_torchrun()
    if ranks is not None:
        note(f"split over {ranks.size} GPUs; every number is the slowest one's")
    answer = timed(ranks)
    if ranks is not None:
        end_together(ranks)
    measured = {"gpu": gpu, "gpus": ranks.size if ranks else 1, "method": METHOD}
    return Answer(measured | dict(answer.document), answer.tables)


def _of_shapes(
    name: str,
    workloads: "tuple[Workload, ...]",
    compiled: bool,
    budget: float | None,
    kv_cache: float | None,
    forms: Sequence[str],
    profile: str | None,
    schemes: Sequence[str],
    head: str | None,
    layers: int | None,
) -> "Timed":
    """Refuse what cannot be planned; what is left to do needs a GPU."""
    from gac.evaluation.shapes import planner_of_shapes
    from gac.evaluation.versions import check_cached
    from gac.measurement.curve_library import CurveLibrary
    from gac.models.shapes import shapes_of

    library = CurveLibrary.load()
    if processes() > 1 and (head or forms):
        raise click.UsageError(f"{'--head' if head else '--kv-cache'} is timed on one GPU.")
    planner = planner_of_shapes(name, workloads, profile, layers, library, schemes, processes())
    rounded = library.head_of(shapes_of(name), head) if head else None
    kept = budget if budget is not None else _KEPT if kv_cache is None else 1.0
    if kv_cache is not None:
        check_cached(planner, kept, kv_cache, forms)
        lists = partial(_in_cache, planner, kept, workloads, kv_cache, forms)
    else:
        planner.problem_of(kept)
        lists = partial(_in_dims, planner, kept, workloads)
        if schemes:
            lists = partial(_in_schemes, planner, kept, workloads, schemes, rounded)
    return partial(_time_shapes, name, library, planner, lists, compiled, layers)


def _time_shapes(
    name: str,
    library: "CurveLibrary",
    planner: "Planner",
    planned: "Callable[[], Lists]",
    compiled: bool,
    layers: int | None,
    ranks: "Ranks | None",
) -> Answer:
    from gac.evaluation.bench import Bench
    from gac.evaluation.latency import GraphTimer
    from gac.evaluation.shapes import model_of_shapes
    from gac.evaluation.split import SlowestTimer, SplitShapes
    from gac.evaluation.versions import compiled_versions
    from gac.reporting.evaluation import latency_table

    note(f"{name} with random weights; planned with {library}")
    lists = planned()
    if compiled:
        lists = {one: [*found, *compiled_versions(planner, found)] for one, found in lists.items()}
    note("planned")
    split = SplitShapes.of(name, ranks, layers=layers) if ranks else None
    model = split.dense if split else model_of_shapes(name, layers=layers)
    own = GraphTimer()
    timer = SlowestTimer(own, ranks) if ranks else own
    bench = Bench(
        model, planner.problem.sites, planner.problem.timing, planner.dense_versions(), timer, own.memory_bytes, split
    )
    results = [result for workload, found in lists.items() for result in bench.run(found, workload)]
    found = ("speedup", "error", "memory_error")
    rows = [asdict(one) | {name: getattr(one, name) for name in found} for one in results]
    document = {"shapes": name, "curves": str(library), "params": planner.problem.params, "results": rows}
    return Answer(document, lambda: [latency_table(results, planner.problem.params), f"planned with {library}"])


def _in_cache(
    planner: "Planner", budget: float, workloads: "Sequence[Workload]", kv_cache: float, forms: Sequence[str]
) -> "Lists":
    from gac.evaluation.versions import cache_versions

    return dict.fromkeys(workloads, cache_versions(planner, budget, kv_cache, forms))


def _in_dims(planner: "Planner", budget: float, workloads: "Sequence[Workload]") -> "Lists":
    from gac.evaluation.versions import UNALIGNED, fastest_versions, versions_at

    shared = versions_at(planner, budget)
    own = next(one for one in shared if one.name == UNALIGNED)
    return {one: [*shared, *fastest_versions(planner, budget, one, own.loss)] for one in workloads}


def _in_schemes(
    planner: "Planner",
    budget: float,
    workloads: "Sequence[Workload]",
    schemes: Sequence[str],
    head: "RoundedHead | None",
) -> "Lists":
    from gac.evaluation.versions import fastest_in_schemes, scheme_versions, with_head

    lists, shared = {}, scheme_versions(planner, budget, schemes)
    for workload in workloads:
        found, missing = fastest_in_schemes(planner, workload, schemes, shared)
        if head:
            rounded, impossible = with_head(planner, workload, schemes, shared, head)
            found, missing = [*found, *rounded], [*missing, *impossible]
        lists[workload] = [*shared, *found]
        for line in missing:
            note(f"{workload}: not timed: {line}")
    return lists


def _of_models(names: Sequence[str], workloads: "tuple[Workload, ...]", compiled: bool) -> "Timed":
    """Refuse a name of nothing; what is left to do needs a GPU."""
    from gac.models.loading import load_config

    for name in names:
        load_config(name)
    return partial(_time_models, names, workloads, compiled)


def _time_models(
    names: Sequence[str], workloads: "tuple[Workload, ...]", compiled: bool, ranks: "Ranks | None"
) -> Answer:
    from gac.evaluation.latency import Entry, GraphTimer, time_in_turns
    from gac.evaluation.split import SlowestTimer
    from gac.reporting.evaluation import timed_table

    opened = {name: _open(name, ranks) for name in dict.fromkeys(names)}
    timer = SlowestTimer(GraphTimer(), ranks) if ranks else GraphTimer()
    entries = [Entry(name, lambda model=model: model, compiled) for name, model in opened.items()]  # type: ignore[misc]
    results = [timed for workload in workloads for timed in time_in_turns(entries, workload, timer)]
    return Answer({"results": [asdict(one) for one in results]}, lambda: [timed_table(results)])


def _open(name: str, ranks: "Ranks | None") -> Any:
    """A dense model, or a directory that GAC wrote, in bfloat16 unless it was saved in another 16-bit dtype."""
    import torch

    from gac.evaluation.evaluate import open_model
    from gac.evaluation.split import open_split
    from gac.runtime.storage.modules import without_kernels

    note(f"loading {name}")
    model = open_split(name, ranks) if ranks else open_model(name).model
    model = model if model.dtype == torch.float16 else model.bfloat16()
    for reason, count in without_kernels(model).items():
        note(f"{name}: {count} matrices are unpacked in plain PyTorch, which is slow: {reason}")
    return model
