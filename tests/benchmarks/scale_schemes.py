"""CPU seconds to make the candidates of Llama-3-8B's shapes in four schemes, and to choose among them.

    python tests/benchmarks/scale_schemes.py [--fuse no|auto] [--repeats 3] [--output schemes.json]

Dims are multiples of 64 that the shipped H100 table shows to be sound. What is timed is what ``gac.allocate`` runs:
``Problem.candidates`` and ``Instance.solve``, with a table that is looked up for the first time. The least of the
repeats counts.

Nothing here is measured of Llama-3-8B, and no loss means anything by itself. Curves and prices of rounding are
SmolLM2's by relative depth (``CurveLibrary``). Latencies of schemes are made up, for the table lacks them: a GEMM of 16
rows or fewer takes the share of the 16-bit time that its bits are of 16, and a tenth more; a larger one takes a tenth
longer than the 16-bit GEMM.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from gac.allocation.problem import Instance, Problem, as_knapsack
from gac.core.arrays import Ints
from gac.core.operations import Operation
from gac.core.workloads import Workload
from gac.forms import DEFAULT_FORMS
from gac.profiling.table import Profile
from gac.schemes import scheme_timed_as
from gac_extensions.lab.shapes.models import planner_of_shapes
from gac_extensions.lab.shapes.versions import Planner
from tests.benchmarks.harness import OPTIONS, machine, options, write

T = TypeVar("T")
WORKLOADS = ("prefill:1x1024", "decode:1@1024")
OF_A_WEIGHT = ("bf16", "fp8", "w8a16", "w4a16")
"""16 bits, and three that round."""

CASES: Mapping[str, dict[str, Any]] = {
    "memory 0.5": {"memory": 0.5, "latency": "any"},
    "memory 0.25": {"memory": 0.25, "latency": "any"},
    "memory 0.4, both latencies 0.8": {"memory": 0.4, "latency": 0.8},
    "memory 0.24, both latencies 0.6": {"memory": 0.24, "latency": 0.6},
}
FEW_ROWS = 16


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--fuse", choices=("no", "auto"), default="auto")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    print(machine())
    print(f"{'limits':34}{'items':>9}{'candidates s':>14}{'choice s':>10}")
    write(asked.output, schemes=list(OF_A_WEIGHT), fuse=asked.fuse, rows=list(_rows(asked)))


def _rows(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for name, limits in CASES.items():
        makings, solvings = [], []
        for _ in range(asked.repeats):
            problem = llama(fuse=asked.fuse == "auto" and "auto", **limits)
            made, instance = timed(partial(instance_of, problem))
            solved, solution = timed(instance.solve)
            makings.append(made)
            solvings.append(solved)
        items, proof = sum(map(len, instance.sets)), solution.certificate
        print(
            f"{name:34}{items:9,}{min(makings):14.2f}{min(solvings):10.3f}   {proof.status}, {proof.method}", flush=True
        )
        seconds = {"candidates_s": min(makings), "choice_s": min(solvings)}
        yield {"limits": name, "items": items, "status": proof.status, "gap": proof.gap} | seconds


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """CPU seconds of this process, so that others on the machine do not count, and what came of it."""
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def llama(**limits: Any) -> Problem:
    """Llama-3-8B under these limits.

    Args:
        limits: as for ``Recipe.of``.
    """
    workloads = list(map(Workload.parse, WORKLOADS))
    planner = planner_of_shapes("llama-3-8b", workloads, OPTIONS["--profile"]["default"], schemes=OF_A_WEIGHT)
    if limits["latency"] != "any":
        planner = Planner(replace(planner.problem, profile=WithSchemes.of(planner.problem.profile)))
    return planner.problem_of(1.0, forms=DEFAULT_FORMS, schemes=OF_A_WEIGHT, align=64, **limits)


def instance_of(problem: Problem) -> Instance:
    """The candidates, as ``gac.allocation.decide`` makes them."""
    limits = problem.dense.allowed(problem.recipe)
    return as_knapsack(problem.candidates(limits), limits)


class WithSchemes(Profile):
    """A table of 16-bit numbers that answers for schemes too, as the page above says."""

    @classmethod
    def of(cls, table: Profile) -> "WithSchemes":
        return cls(**{field.name: getattr(table, field.name) for field in fields(table)})

    def latency(
        self, operator: str, fixed: Mapping[str, int], axis: str, dims: Ints, dtype: str = "bf16"
    ) -> tuple[Ints, NDArray[np.bool_]]:
        ns, measured = super().latency(operator, fixed, axis, dims)
        return np.where(ns < 0, ns, np.ceil(ns * _slower(fixed["m"], dtype))).astype(np.int64), measured

    def point(self, operation: Operation, dtype: str = "bf16") -> int | None:
        ns = super().point(operation)
        return None if ns is None else int(np.ceil(ns * _slower(dict(operation.shape)["m"], dtype)))


def _slower(rows: int, dtype: str) -> float:
    """What the 16-bit time of a GEMM of so many rows is multiplied by."""
    if dtype == "bf16":
        return 1.0
    scheme = scheme_timed_as(dtype)
    assert scheme is not None, dtype
    return scheme.bits / 16 + 0.1 if rows <= FEW_ROWS else 1.1


if __name__ == "__main__":
    main()
