"""Seconds for a whole frontier of Llama-3-8B: the candidates once, then every point exactly.

    python tests/benchmarks/bench_frontier.py [--points 100]

Losses are synthetic: squared singular values that decay as those of a trained model do. Latencies and sound dims are
those of the shipped H100 profile.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import numpy as np

from gac.allocation.candidate_set import CandidateSet
from gac.allocation.frontier import Frontier, frontier
from gac.allocation.problem import Problem
from gac.core.workloads import Workload
from gac.forms.loss_curves import LossCurve, LossCurves
from gac.plan.costs import PARAMS, ns_of
from gac_extensions.lab.shapes.models import planner_of_shapes
from tests.benchmarks.bench_knapsack import tails, timed
from tests.benchmarks.harness import OPTIONS, machine, options

WORKLOADS = ("prefill:1x1024", "decode:1@1024")


def synthetic(*forms: str) -> Problem:
    """Llama-3-8B with synthetic loss curves; every weight is a site of its own where only ranks are chosen."""
    workloads = [Workload.parse(name) for name in WORKLOADS]
    planner = planner_of_shapes("llama-3-8b", workloads, OPTIONS["--profile"]["default"])
    problem = planner.problem_of(1.0, forms=forms)
    rng = np.random.default_rng(0)
    curves = {}
    for weight in (weight for site in problem.sites for weight in site.weights):
        curves["low_rank", "bf16", weight.name] = curve(rng, min(weight.out_features, weight.in_features))
        if "narrow" in forms and weight.neurons == "in":
            curves["narrow", "bf16", weight.name] = curve(rng, weight.in_features)
    return replace(problem, curves=LossCurves(curves))


def curve(rng: np.random.Generator, full: int) -> LossCurve:
    return LossCurve(tails(rng, full) * rng.uniform(1e-4, 1e-3))


def coarse(rows: CandidateSet) -> CandidateSet:
    """Only multiples of 64, and dense."""
    return rows.pick(((rows.dims % 64 == 0) | (rows.forms == "dense")).all(axis=1))


def instances() -> Iterator[tuple[str, Problem, str]]:
    yield "224 weights, multiples of 64", synthetic("low_rank"), PARAMS
    whole = synthetic("low_rank", "narrow")
    for limit in (PARAMS, *WORKLOADS):
        yield "160 sites, every sound dim and width", whole, limit


def candidates_of(problem: Problem, limit: str) -> list[CandidateSet]:
    """What is made once, however many points: the candidates and the dense sites."""
    assert problem.dense
    sets = problem.candidates([limit if limit == PARAMS else ns_of(limit)])
    return sets if "narrow" in problem.recipe.space.forms else [coarse(rows) for rows in sets]


def told(found: Frontier) -> str:
    proved = sum(point.certificate.status == "optimal" for point in found.points)
    losses = [point.loss for point in found.points]
    return f"{len(found.points)} points, {proved} proved, loss {losses[0]:.4g} to {losses[-1]:.4g}"


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--points", type=int, default=100)
    given = parser.parse_args()
    print(machine())
    print(f"{'instance':38}{'limit':16}{'items':>8}{'candidates s':>14}{'frontier s':>12}")
    for name, problem, limit in instances():
        made, sets = timed(partial(candidates_of, problem, limit))
        with patch.object(Problem, "candidates", return_value=sets):
            solved, found = timed(partial(frontier, problem, points=given.points, limit=limit))
        items = sum(map(len, sets))
        print(f"{name:38}{limit:16}{items:8,}{made:14.2f}{solved:12.2f}   {told(found)}", flush=True)


if __name__ == "__main__":
    main()
