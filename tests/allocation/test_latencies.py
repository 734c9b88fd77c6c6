"""Latencies as weights run: what a sweep measures for a model answers whatever its allocation asks."""

from pathlib import Path

import numpy as np
import pytest

from gac.allocation.latencies import Timing
from gac.forms import form_named
from gac.models.families import family_of
from gac.models.shapes import SHAPES
from gac.profiling.records import Measurement, Point
from gac.profiling.rows import Rows
from gac.profiling.sweeps.coverage import WORKLOADS, fused_points, model_points
from gac.profiling.table import Profile
from gac.sites import Site, run_together
from tests.headers import make_header

LOW_RANK = form_named("low_rank")


def flat(points: tuple[Point, ...]) -> Timing:
    """Every point takes 1 ns."""
    rows = [
        Measurement(one.operation.operator, one.operation.axes, "bf16", "cold", 1.0, 0.0, 10, 1980, True)
        for one in dict.fromkeys(points)
    ]
    return Timing(Profile(Path("flat.jsonl"), make_header(), Rows.of(rows), "digest", {}), WORKLOADS)


@pytest.fixture(scope="module", params=["smollm2", "qwen3-8b"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def first_layer(name: str) -> tuple[Site, ...]:
    sites = family_of(SHAPES[name]).sites(SHAPES[name])
    return run_together([site for site in sites if site.layer == 0])


def test_every_fused_width_has_a_latency(name: str) -> None:
    timing = flat((*model_points(name), *fused_points(name)))
    for site in (site for site in first_layer(name) if site.fused):
        weights = [site.weights[at] for at in site.fused]
        widths = np.arange(8, sum(weight.out_features for weight in weights) + 1, 8)
        assert (timing.of_fused(weights[0].in_features, widths)[0] == 1).all()


def test_every_rank_has_a_latency_fused_or_not(name: str) -> None:
    timing = flat((*model_points(name), *fused_points(name)))
    for site in first_layer(name):
        for at, weight in enumerate(site.weights):
            ranks = np.arange(8, LOW_RANK.largest_useful(weight) + 1, 8)
            for fused in {False, at in site.fused}:
                assert (timing.of_weight(LOW_RANK, weight, ranks, fused)[0] == 1).all()


def test_what_is_left_of_a_dense_weight_takes_no_time() -> None:
    weight = first_layer("smollm2")[0].weights[0]
    latency, measured = flat(()).of_weight(form_named("dense"), weight, np.array([576]), fused=True)
    assert (latency.tolist(), measured.tolist()) == ([[0, 0]], [[True, True]])
