"""Llama-3-8B's shapes end to end on one GPU: GAC's plans, the dense model, and a compressor's own dims.

    gac profile --model llama-3-8b --fuse -o profile.jsonl ...    # the shapes, see tests/benchmarks/README.md
    python tests/benchmarks/end_to_end.py --profile profile.jsonl --output end_to_end.json
    python tests/benchmarks/end_to_end.py ... --compiled --workload prefill:1x1024 --kept 0.85   # torch.compile too

A case is a workload and a kept fraction; the JSON is written after each, and cases that are in it are not run again.
Beside it a Markdown file is written. ``--structures`` times, beside the plan made by default, the fastest that lose no
more, with skipped blocks and fewer heads and without. ``--plans FILE`` reads who runs from a file, or writes it where
there is none and stops: that takes minutes of a CPU, and no GPU. ``--stop SECONDS`` begins no case after that.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from gac.core.errors import GacError
from gac.core.io import from_json, to_json
from gac.core.workloads import Workload
from gac.evaluation.latency import METHOD, GraphTimer
from gac_extensions.lab.shapes.bench import Bench, Result
from gac_extensions.lab.shapes.models import model_of_shapes, planner_of_shapes
from gac_extensions.lab.shapes.tables import benched
from gac_extensions.lab.shapes.versions import (
    UNALIGNED,
    Planner,
    Version,
    compiled_versions,
    fastest_version,
    fastest_versions,
    versions_at,
)
from tests.benchmarks.harness import markdown, options, write

WORKLOADS = (
    "prefill:1x1024",
    "decode:1@1024",
    "decode:16@1024",
    "prefill:4x1024",
    "decode:64@1024",
    "prefill:8x1024",
)


Case = tuple[Workload, float]


def main() -> None:
    asked = _asked()
    begun = time.monotonic()
    workloads = tuple(map(Workload.parse, asked.workload or WORKLOADS))
    planner = planner_of_shapes(asked.shapes, workloads, asked.profile, asked.layers)
    total = planner.problem.params
    output = asked.output
    measured = from_json(_Measured, output.read_bytes(), str(output), GacError).cases if output.is_file() else {}
    todo = [(workload, kept) for workload in workloads for kept in asked.kept]
    todo = [case for case in todo if _key(*case, asked.compiled) not in measured]
    if asked.plans and not asked.plans.exists():
        lists = _planned(planner, todo, asked)
        asked.plans.write_bytes(to_json({_key(*case): versions for case, versions in lists.items()}))
        for case, versions in lists.items():
            show_plans(*case, versions, total)
        return
    lists = _read_plans(asked.plans, todo) if asked.plans else _planned(planner, todo, asked)
    say(begun, "planned")
    timer = GraphTimer()
    model = model_of_shapes(asked.shapes, device=asked.device, layers=asked.layers)
    bench = Bench(
        model, planner.problem.sites, planner.problem.timing, planner.dense_versions(), timer, timer.memory_bytes
    )
    figures = {"method": METHOD, "params": total, "calibration": str(planner.problem.measured.calibration.text)}
    say(begun, "model made")
    for (workload, kept), versions in lists.items():
        if asked.stop and time.monotonic() - begun > asked.stop:
            say(begun, "stopped; the same command goes on")
            break
        racing = compiled_versions(planner, versions) if asked.compiled else versions
        try:
            results = list(bench.run(racing, workload))
        except GacError as failure:
            say(begun, f"{workload} at {kept}: {failure}")
            continue
        measured[_key(workload, kept, asked.compiled)] = results
        write(output, **figures, cases={key: list(map(_row, found)) for key, found in measured.items()})
        output.with_suffix(".md").write_text("".join(_markdown(measured, total)))
        say(begun, f"{workload} at {kept}")
        print(_table(results, total), flush=True)


def _asked() -> Any:
    parser = options(__doc__, "--output")
    parser.add_argument("--shapes", default="llama-3-8b")
    parser.add_argument("--layers", type=int, help="the model's own where not given")
    parser.add_argument("--profile", help="latency table; this GPU's own where not given")
    parser.add_argument("--workload", action="append")
    parser.add_argument("--kept", type=float, nargs="+", default=[0.85, 0.7, 0.5])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compiled", action="store_true", help="only the dense and the compiled versions")
    parser.add_argument("--by-default", action="store_true", help="only the dense model and the plans made by default")
    parser.add_argument("--structures", action="store_true", help="that, and the fastest with heads and skip, without")
    parser.add_argument("--processes", type=int, default=1, help="that plan")
    parser.add_argument("--plans", type=Path)
    parser.add_argument("--stop", type=float)
    return parser.parse_args()


def _planned(planner: Planner, cases: list[Case], asked: Any) -> dict[Case, list[Version]]:
    """The versions of every case; plans are made by several processes at once, which takes no GPU."""
    kept = sorted({kept for _, kept in cases})
    with ProcessPoolExecutor(max(asked.processes, 1), mp_context=get_context("fork")) as pool:
        if asked.by_default or asked.structures:
            default = dict(zip(kept, pool.map(planner.by_default, kept), strict=True))
            losses = [default[kept].loss for _, kept in cases]
            faster = (
                pool.map(partial(_with_structures, planner), cases, losses) if asked.structures else [[]] * len(cases)
            )
            return {case: [default[case[1]], *found] for case, found in zip(cases, faster, strict=True)}
        shared = dict(zip(kept, pool.map(partial(versions_at, planner), kept), strict=True))
        own = {kept: next(one.loss for one in found if one.name == UNALIGNED) for kept, found in shared.items()}
        fastest = pool.map(partial(_fastest, planner), cases, [own[kept] for _, kept in cases])
        return {case: [*shared[case[1]], *found] for case, found in zip(cases, fastest, strict=True)}


def _read_plans(path: Path, cases: list[Case]) -> dict[Case, list[Version]]:
    kept = from_json(dict[str, list[Version]], path.read_bytes(), str(path), GacError)
    return {case: kept[_key(*case)] for case in cases}


def _fastest(planner: Planner, case: Case, loss: float) -> list[Version]:
    """GAC's plan for this workload that loses no more than the unaligned one; none where the table lacks it."""
    return _or_told(case, fastest_versions, planner, case[1], case[0], loss)


def _with_structures(planner: Planner, case: Case, loss: float) -> list[Version]:
    """The plans of least latency that lose no more, without heads and skipped blocks and with them."""
    workload, kept = case

    def plan(*more: str) -> list[Version]:
        return [fastest_version(planner, kept, workload, loss, more_forms=more)]

    return [*_or_told(case, plan), *_or_told(case, plan, "heads", "skip")]


def _or_told(case: Case, plan: Callable[..., list[Version]], *given: Any) -> list[Version]:
    """What is planned; none, and why, where it cannot be."""
    try:
        return plan(*given)
    except GacError as failure:
        print(f"{case[0]} at {case[1]}: {failure}", file=sys.stderr, flush=True)
        return []


def _key(workload: Workload, kept: float, compiled: bool = False) -> str:
    return f"{workload} {kept}{' compiled' if compiled else ''}"


@dataclass(frozen=True)
class _Measured:
    """What a result file holds, beside what else it says."""

    cases: dict[str, list[Result]]


def _row(one: Result) -> dict[str, Any]:
    return asdict(one) | {"speedup": one.speedup, "error": one.error}


def _table(results: Sequence[Result], total: int) -> str:
    rows = [{"version": one.timed.name, **benched(one, total)} for one in results]
    return markdown(list(rows[0]), [list(row.values()) for row in rows])


def _markdown(measured: Mapping[str, Sequence[Result]], total: int) -> Iterator[str]:
    for key, results in measured.items():
        yield f"### {key}\n\n{_table(results, total)}\n"
    plans = [one for results in measured.values() for one in results[3:] if one.error is not None]
    for name, predicted in (("scaled", "predicted_ns"), ("plain sum and rest", "sum_ns")):
        errors = [abs(getattr(one, predicted) / one.timed.latency.median_ns - 1) for one in plans]
        within = [sum(error <= bound for error in errors) for bound in (0.03, 0.05)]
        yield f"Predicted ({name}): {within[0]} of {len(errors)} within 3 %, {within[1]} within 5 %.  \n"


def show_plans(workload: Workload, kept: float, versions: list[Version], total: int) -> None:
    print(f"{workload} at {kept}")
    for one in versions:
        table = one.table_ns.get(str(workload))
        summed = "unknown" if table is None else f"{table / 1e6:.3f} ms"
        print(f"  {one.name:<32} kept {one.params / total:.4f}  loss {one.loss:.4f}  GEMMs {summed}", flush=True)


def say(begun: float, what: str) -> None:
    print(f"{time.monotonic() - begun:7.1f} s  {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
