"""Plan for known shapes, and time the plans: what ``gac bench --shapes`` does."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from gac.cli.command import Answer, note
from gac.core.display import fields
from gac.core.distributed.launch import processes
from gac.core.workloads import Workload
from gac.evaluation.latency import GraphTimer
from gac.evaluation.split import SlowestTimer
from gac.models.shapes import shapes_of
from gac.plan.evidence import RoundedHead
from gac.runtime.parallel.ranks import Ranks
from gac_extensions.lab.shapes.bench import Bench
from gac_extensions.lab.shapes.curve_library import CurveLibrary
from gac_extensions.lab.shapes.models import model_of_shapes, planner_of_shapes
from gac_extensions.lab.shapes.split import SplitShapes
from gac_extensions.lab.shapes.tables import latency_table
from gac_extensions.lab.shapes.versions import (
    UNALIGNED,
    Planner,
    Version,
    cache_versions,
    check_cached,
    compiled_versions,
    fastest_in_schemes,
    fastest_versions,
    scheme_versions,
    versions_at,
    with_head,
)

_KEPT = 0.85

VersionLists = dict[Workload, list[Version]]
Timed = Callable[[Ranks | None], Answer]


def bench_shapes(name: str, workloads: tuple[Workload, ...], compiled: bool, options: Mapping[str, Any]) -> Timed:
    """Refuse what cannot be planned, and return the part that needs a GPU."""
    library = CurveLibrary.load()
    schemes, forms, kv_cache, layers = (options[key] for key in ("schemes", "forms", "kv_cache", "layers"))
    planner = planner_of_shapes(name, workloads, options["profile"], layers, library, schemes, processes())
    rounded = library.head_of(shapes_of(name), options["head"]) if options["head"] else None
    kept = options["budget"] if options["budget"] is not None else _KEPT if kv_cache is None else 1.0
    if kv_cache is None:
        planner.problem_of(kept)
    else:
        check_cached(planner, kept, kv_cache, forms)

    def timed(ranks: Ranks | None) -> Answer:
        note(f"{name} with random weights; planned with {library}")
        if kv_cache is not None:
            lists = dict.fromkeys(workloads, cache_versions(planner, kept, kv_cache, forms))
        elif schemes:
            lists = _in_schemes(planner, kept, workloads, schemes, rounded)
        else:
            shared = versions_at(planner, kept)
            loss = next(version.loss for version in shared if version.name == UNALIGNED)
            lists = {run: [*shared, *fastest_versions(planner, kept, run, loss)] for run in workloads}
        if compiled:
            lists = {run: [*versions, *compiled_versions(planner, versions)] for run, versions in lists.items()}
        note("planned")
        return _time_shapes(name, planner, lists, layers, ranks, str(library))

    return timed


def _time_shapes(
    name: str, planner: Planner, lists: VersionLists, layers: int | None, ranks: Ranks | None, library: str
) -> Answer:
    split = SplitShapes(name, ranks, layers=layers) if ranks else None
    model = split.dense if split else model_of_shapes(name, layers=layers)
    graphs, problem = GraphTimer(), planner.problem
    timer = SlowestTimer(graphs, ranks) if ranks else graphs
    bench = Bench(model, problem.sites, problem.timing, planner.dense_versions(), timer, graphs.memory_bytes, split)
    results = [result for workload, versions in lists.items() for result in bench.run(versions, workload)]
    rows = [asdict(result) | fields(result, "speedup", "error", "memory_error") for result in results]
    document = {"shapes": name, "curves": library, "params": problem.params, "results": rows}
    return Answer(document, lambda: [latency_table(results, problem.params), f"planned with {library}"])


def _in_schemes(
    planner: Planner,
    budget: float,
    workloads: Sequence[Workload],
    schemes: Sequence[str],
    head: RoundedHead | None,
) -> VersionLists:
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
