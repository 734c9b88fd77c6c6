"""Seconds for a whole frontier of Llama-3-8B: the candidates once, then every point exactly.

    python tests/benchmarks/bench_frontier.py [--points 100]

Losses are synthetic: squared singular values that decay as those of a trained model do. Latencies and sound dims are
those of the shipped H100 profile.
"""

import argparse
import os
import platform
import time
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import TypeVar

import numpy as np

from gac.allocation.candidates import CandidateSet
from gac.allocation.frontier import Frontier, frontier
from gac.allocation.problem import Problem
from gac.costs import PARAMS, ns_of
from gac.curves import LossCurve, LossCurves
from gac.models.families import family_of
from gac.models.shapes import SHAPES
from gac.models.sites import Site
from gac.models.weights import Weight
from gac.plan import Calibration, Measured, ProfileUsed
from gac.profiling.table import Profile
from gac.recipe import Recipe

T = TypeVar("T")
PROFILE = "nvidia-h100-80gb-hbm3"
WORKLOADS = ("prefill:1x1024", "decode:1@1024")


class Coarse(Problem):
    """Only multiples of 64, and dense."""

    def candidates(self, columns: Collection[str]) -> list[CandidateSet]:
        return [coarse(rows) for rows in super().candidates(columns)]


def coarse(rows: CandidateSet) -> CandidateSet:
    kept = ((rows.dims % 64 == 0) | (rows.forms == "dense")).all(axis=1)
    return rows.at(kept)


def synthetic(sites: tuple[Site, ...], forms: tuple[str, ...], kind: type[Problem]) -> Problem:
    rng = np.random.default_rng(0)
    curves = {}
    for site in sites:
        for weight in site.weights:
            curves["low_rank", "bf16", weight.name] = curve(rng, min(weight.out_features, weight.in_features))
        for weight in (weight for weight in site.weights if weight.neurons == "in"):
            curves["narrow", "bf16", weight.name] = curve(rng, weight.in_features)
    recipe = Recipe.of(forms=forms, workloads=WORKLOADS, refit="none")
    measured = Measured(
        model="llama-3-8b",
        digest="0" * 64,
        params=8_030_261_248,
        family="llama",
        calibration=Calibration("wiki-sample", 64, 1024, "0" * 64, 2.0),
        profile=ProfileUsed(PROFILE, "0" * 64, "asked for"),
        factor=1.0,
    )
    return kind(sites, LossCurves(curves), Profile.load(PROFILE), recipe, measured)


def curve(rng: np.random.Generator, full: int) -> LossCurve:
    spectrum = np.exp(-np.arange(full) / full * rng.uniform(2, 6) + rng.normal(0, 0.3, full))
    return LossCurve(np.append(np.cumsum(np.sort(spectrum**2))[::-1], 0.0) * rng.uniform(1e-4, 1e-3))


def one_by_one(sites: tuple[Site, ...]) -> tuple[Site, ...]:
    """Every weight a site of its own."""
    weights = [(site, weight) for site in sites for weight in site.weights]
    return tuple(
        Site(weight.name, site.layer, site.kind, (Weight(weight.name, weight.out_features, weight.in_features),))
        for site, weight in weights
    )


def timed(work: Callable[[], T]) -> tuple[float, T]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def instances() -> Iterator[tuple[str, Problem, str]]:
    shapes = SHAPES["llama-3-8b"]
    sites = family_of(shapes).sites(shapes)
    yield "224 weights, multiples of 64", synthetic(one_by_one(sites), ("low_rank",), Coarse), "params"
    whole = synthetic(sites, ("low_rank", "narrow"), Problem)
    for limit in ("params", *WORKLOADS):
        yield "160 sites, every sound dim and width", whole, limit


def candidates_of(problem: Problem, limit: str) -> list[CandidateSet]:
    """What is made once, however many points: the candidates and the dense sites."""
    assert problem.dense
    return problem.candidates([limit if limit == PARAMS else ns_of(limit)])


def told(found: Frontier) -> str:
    proved = sum(point.certificate.status == "optimal" for point in found.points)
    losses = [point.loss for point in found.points]
    return f"{len(found.points)} points, {proved} proved, loss {losses[0]:.4g} to {losses[-1]:.4g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=100)
    given = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, NumPy {np.__version__}")
    print(f"{'instance':38}{'limit':16}{'items':>8}{'candidates s':>14}{'frontier s':>12}")
    for name, problem, limit in instances():
        made, sets = timed(partial(candidates_of, problem, limit))
        solved, found = timed(partial(frontier, problem, points=given.points, limit=limit))
        items = sum(map(len, sets))
        print(f"{name:38}{limit:16}{items:8,}{made:14.2f}{solved:12.2f}   {told(found)}", flush=True)


if __name__ == "__main__":
    main()
