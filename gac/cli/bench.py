"""The command that times whole models on this machine's GPU."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from gac.cli.options import profile_option, workloads_option
from gac.cli.verb import Answer, Verb, document_option, note

if TYPE_CHECKING:
    from gac.workloads import Workload


@click.command(cls=Verb)
@click.argument("models", nargs=-1, metavar="[MODEL_OR_DIR]...")
@click.option("--against", metavar="MODEL", help="The model that speeds are relative to. Default: the first one.")
@click.option(
    "--shapes", metavar="NAME", help="Time plans for a known model's shapes (llama-3-8b), with random weights."
)
@click.option("--budget", type=float, default=0.85, show_default=True, help="With --shapes: kept fraction.")
@profile_option("With --shapes: latency table to plan with; by default this GPU's.")
@click.option("--layers", type=click.IntRange(min=1), help="With --shapes: fewer layers.")
@workloads_option("What is timed")
@click.option(
    "--compiled", is_flag=True, help="Also time layers through torch.compile with shape_padding; takes minutes."
)
@document_option
def bench(
    models: Sequence[str],
    against: str | None,
    shapes: str | None,
    budget: float,
    profile: str | None,
    layers: int | None,
    workloads: Sequence[str],
    compiled: bool,
) -> Answer:
    """Time whole models on this machine's GPU: prefill and decode, under CUDA graphs, in turns.

    MODEL_OR_DIR is a directory (dense or compressed), a hub id, or smollm2; all have to fit in memory together. With
    --shapes no weights are needed: GAC's plans are timed beside the dense model, a compressor's own dims, and these
    padded and rounded.
    """
    if (shapes is None) == (not models):
        raise click.UsageError("give models, or --shapes.")
    if shapes is not None and against is not None:
        raise click.UsageError("--against goes with models; with --shapes the dense model is there.")
    from gac.evaluation.latency import METHOD
    from gac.profiling.timing.device import require_gpu
    from gac.workloads import Workload

    parsed = tuple(map(Workload.parse, workloads))
    gpu = require_gpu()
    if shapes is not None:
        answer = _of_shapes(shapes, budget, parsed, profile, layers, compiled)
    else:
        answer = _of_models((*([against] if against else ()), *models), parsed, compiled)
    return Answer({"gpu": gpu, "method": METHOD} | dict(answer.document), answer.tables)


def _of_shapes(
    name: str, budget: float, workloads: "tuple[Workload, ...]", profile: str | None, layers: int | None, compiled: bool
) -> Answer:
    from gac.evaluation.bench import Bench
    from gac.evaluation.latency import GraphTimer
    from gac.evaluation.shapes import model_of_shapes, planner_of_shapes
    from gac.evaluation.versions import UNALIGNED, compiled_versions, fastest_versions, versions_at
    from gac.reporting.evaluation import latency_table
    from gac.sensitivity.curve_library import CurveLibrary

    library = CurveLibrary.load()
    note(f"{name} with random weights; planned with {library}")
    planner = planner_of_shapes(name, workloads, profile, layers, library)
    shared = versions_at(planner, budget)
    own = next(one for one in shared if one.name == UNALIGNED)
    lists = {one: [*shared, *fastest_versions(planner, budget, one, own.loss)] for one in workloads}
    if compiled:
        lists = {one: [*found, *compiled_versions(planner, found)] for one, found in lists.items()}
    note("planned")
    model = model_of_shapes(name, layers=layers)
    timer = GraphTimer()
    bench = Bench(
        model, planner.problem.sites, planner.dense(fused=False), planner.dense(fused=True), timer, timer.memory_bytes
    )
    results = [result for workload, found in lists.items() for result in bench.run(found, workload)]
    rows = [asdict(one) | {"speedup": one.speedup, "error": one.error} for one in results]
    document = {"shapes": name, "curves": str(library), "params": planner.problem.params, "results": rows}
    return Answer(document, lambda: [latency_table(results, planner.problem.params), f"planned with {library}"])


def _of_models(names: Sequence[str], workloads: "tuple[Workload, ...]", compiled: bool) -> Answer:
    from gac.evaluation.latency import Entry, GraphTimer, time_in_turns
    from gac.reporting.evaluation import timed_table

    opened = {name: _open(name) for name in dict.fromkeys(names)}
    timer = GraphTimer()
    entries = [Entry(name, lambda model=model: model, compiled) for name, model in opened.items()]  # type: ignore[misc]
    results = [timed for workload in workloads for timed in time_in_turns(entries, workload, timer)]
    return Answer({"results": [asdict(one) for one in results]}, lambda: [timed_table(results)])


def _open(name: str) -> Any:
    """A dense model, or a directory that GAC wrote, in bfloat16 unless it was saved in another 16-bit dtype."""
    import torch

    from gac.evaluation.loading import open_model

    note(f"loading {name}")
    model = open_model(name).model
    return model if model.dtype == torch.float16 else model.bfloat16()
