"""The command that times models on this machine: whole models in transformers, or models in an engine (bench)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import gac
from gac.cli.command import Answer, Command, note
from gac.cli.options import (
    AT_LEAST_1,
    FILE,
    Figure,
    document_option,
    flag,
    forms_option,
    option,
    profile_option,
    reject_options,
    several,
    workloads_option,
)
from gac.cli.plot import write_figure
from gac.core.distributed.launch import processes
from gac.core.errors import GacError

if TYPE_CHECKING:
    from gac.core.workloads import Workload
    from gac.runtime.parallel.ranks import Ranks

    Timed = Callable[[Ranks | None], Answer]

_WORKLOADS = ("prefill:1x1024", "decode:1@1024")
_OF_SHAPES = {"budget", "kv_cache", "forms", "profile", "layers", "schemes", "head"}
_OF_ENGINES = {"turns", "tokens", "plot", "engine_python", "engine_options"}


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
@workloads_option(
    "Workload to time",
    (),
    "prefill:1x1024 and decode:1@1024; with --engine vllm also prefill:8x1024, decode:16@1024, decode:64@1024 and "
    "throughput:256x1024",
    "prefill:BxS or decode:B@C, with --engine vllm also throughput:RxS",
)
@flag("--compiled", "Also time layers through torch.compile with shape_padding; takes minutes.")
@option("--engine", "What runs the models.", click.Choice(["transformers", "vllm"]), default="transformers")
@option("--tokens", "With --engine vllm: tokens of a prompt in the default workloads.", AT_LEAST_1, show_default="1024")
@option("--turns", "With --engine vllm: measured runs of every workload.", AT_LEAST_1, show_default="5")
@option("--engine-python", "With --engine vllm: Python of another environment, with vLLM and GAC.", FILE, "PATH")
@several(
    "--engine-option engine_options",
    "With --engine vllm: a further argument of vllm.LLM for all models, JSON or a word (dtype=float32).",
    metavar="NAME=VALUE",
)
@option("--plot", "With --engine vllm: also draw the speeds in this file (.pdf, .png or .svg).", Figure())
@document_option
def bench(
    models: Sequence[str],
    against: str | None,
    shapes: str | None,
    workloads: Sequence[str],
    compiled: bool,
    engine: str,
    **options: Any,
) -> Answer:
    """Time models on this machine: prefill and decode.

    In transformers: whole models on a GPU, under CUDA graphs, in turns.

    MODEL_OR_DIR is a directory (dense or compressed), a hub id, or a packaged model; all have to fit in memory
    together. With --shapes no weights are needed: GAC's plans are timed with the dense model, a compressor's own dims,
    and these padded and rounded down; with --scheme also all weights in one scheme; with --kv-cache plans of a smaller
    cache alone.

    With --engine vllm: models as vLLM serves them, each in a process of its own, in turns where they fit in memory
    together. Time to the first token, of a decode step, and tokens a second of many requests at once.
    """
    if engine == "vllm":
        reject_options({"shapes", "compiled", *_OF_SHAPES}, "with --engine transformers.")
        return _engine_bench([*([against] if against else []), *models], workloads, **options)
    reject_options(_OF_ENGINES, "with --engine vllm.")
    workloads = workloads or _WORKLOADS
    _check_usage(models, against, shapes, options)
    from gac.core.workloads import Workload
    from gac.evaluation.latency import METHOD
    from gac.evaluation.split import end_together, ranks_of_torchrun
    from gac.models.loading import load_config
    from gac.profiling.timing.device import require_gpu

    parsed = tuple(map(Workload.parse, workloads))
    timed: Timed
    if shapes is not None:
        from gac_extensions.lab.shapes.command import bench_shapes

        timed = bench_shapes(shapes, parsed, compiled, options)
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


def _engine_bench(
    names: Sequence[str],
    workloads: Sequence[str],
    tokens: int | None,
    turns: int | None,
    engine_python: Path | None,
    engine_options: Sequence[str],
    plot: Path | None,
    **_: Any,
) -> Answer:
    if not names:
        raise click.UsageError("give models: gac bench DIR --against DENSE --engine vllm.")
    if workloads:
        reject_options({"tokens"}, "without --workload, which says how long prompts are.")
    if plot is not None and len({*names}) < 2:
        raise click.UsageError("--plot goes with --against: it draws speeds over that model.")
    if processes() > 1:
        problem = "--engine vllm under torchrun"
        raise GacError(problem, "one process", "Use --engine-option tensor_parallel_size=2 for several GPUs.")
    from gac.cli.command import plain_document
    from gac.evaluation.engines.bench import TOKENS, TURNS, bench_engine
    from gac.evaluation.engines.workloads import default_workloads

    result = bench_engine(
        list(dict.fromkeys(names)),
        workloads=workloads or [str(workload) for workload in default_workloads(tokens or TOKENS)],
        turns=turns or TURNS,
        options=engine_options,
        python=engine_python,
    )
    if plot is not None:
        write_figure(lambda: gac.plots.speeds(result), plot)
        note(f"drawn in {plot}")
    return Answer(plain_document(result), lambda: [result])


def _check_usage(models: Sequence[str], against: str | None, shapes: str | None, options: Mapping[str, Any]) -> None:
    if (shapes is None) == (not models):
        raise click.UsageError("give models, or --shapes.")
    if shapes is not None and against is not None:
        raise click.UsageError("--against goes with models; with --shapes the dense model is there.")
    if shapes is None:
        reject_options(_OF_SHAPES, "with --shapes.")
    elif options["head"] and not options["schemes"]:
        raise click.UsageError("--head goes with --scheme.")
    elif (options["kv_cache"] is None) != (not options["forms"]):
        raise click.UsageError("--kv-cache and --form go together.")
    elif options["forms"] and options["schemes"]:
        raise click.UsageError("--kv-cache goes without --scheme.")
    elif processes() > 1 and (options["head"] or options["forms"]):
        raise click.UsageError(f"{'--head' if options['head'] else '--kv-cache'} is timed on one GPU.")


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
