"""Latencies as weights run: what a sweep measures for a model answers whatever its allocation asks."""

import numpy as np
import pytest

from gac.allocation.latencies import Timing
from gac.core.workloads import Workload
from gac.forms import form_named
from gac.forms.planned_sites import fuse_sites
from gac.models.families import family_of
from gac.models.shapes import SHAPES
from gac.models.sites import Site
from gac.profiling.records import Measurement, Point
from gac.profiling.sweeps.coverage import WORKLOADS, fused_points, model_points
from gac.runtime.contract import apart_from
from tests.headers import make_profile

LOW_RANK = form_named("low_rank")
PREFILL, DECODE = (WORKLOADS.index(Workload.parse(name)) for name in ("prefill:1x1024", "decode:1@1024"))


def flat(points: tuple[Point, ...]) -> Timing:
    """Every point takes 1 ns."""
    rows = [
        Measurement(each.operation.operator, each.operation.axes, "bf16", "cold", 1.0, 0.0, 10, 1980, True)
        for each in dict.fromkeys(points)
    ]
    return Timing(make_profile(rows), WORKLOADS)


@pytest.fixture(scope="module", params=["smollm2", "qwen3-8b"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def first_layer(name: str) -> tuple[Site, ...]:
    sites = family_of(SHAPES[name]).sites(SHAPES[name])
    return fuse_sites([site for site in sites if site.layer == 0])


def test_every_fused_width_has_a_latency(name: str) -> None:
    timing = flat((*model_points(name), *fused_points(name)))
    for site in (site for site in first_layer(name) if site.fused):
        weights = [site.weights[position] for position in site.fused]
        widths = np.arange(8, sum(weight.out_features for weight in weights) + 1, 8)
        for_all = np.repeat(widths[:, None], len(WORKLOADS), axis=1)
        assert (timing.of_fused(weights[0], for_all)[0] == 1).all()


def test_every_rank_has_a_latency_fused_or_not(name: str) -> None:
    timing = flat((*model_points(name), *fused_points(name)))
    for site in first_layer(name):
        for position, weight in enumerate(site.weights):
            ranks = np.arange(8, LOW_RANK.max_useful_dim(weight) + 1, 8)
            assert (timing.of_weight(LOW_RANK, weight, ranks)[0] == 1).all()
            if position in site.fused:
                apart = ranks >= apart_from(1024)
                assert timing.after_fused(LOW_RANK, weight, ranks)[0][:, PREFILL].tolist() == (1 + apart).tolist()
                assert (timing.after_fused(LOW_RANK, weight, ranks)[0][:, DECODE] == 1).all()


@pytest.mark.parametrize(("rows", "features"), [(1, 4_194_304), (1024, 4096), (3, 1_398_102), (8_388_608, 1)])
def test_four_mi_outputs_are_enough_to_run_apart(rows: int, features: int) -> None:
    assert apart_from(rows) == features
