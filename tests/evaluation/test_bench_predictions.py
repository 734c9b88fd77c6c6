"""Predictions of a bench, from a made-up table: attention over latents, and plans for several GPUs."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gac.allocation.latencies import Timing, summed_attention
from gac.core.workloads import Workload
from gac.evaluation.bench import Bench, Result
from gac.evaluation.latency import Spread, Timed
from gac.evaluation.shapes import planner_of_shapes
from gac.evaluation.versions import (
    DEFAULT,
    FASTEST,
    FOR_ONE,
    UNALIGNED,
    Planner,
    Version,
    fastest_versions,
    versions_at,
)
from gac.forms import DENSE
from gac.models.families import family_of
from gac.models.shapes import SHAPES
from gac.plan.plan import WeightChoice
from gac.profiling.sweeps.collectives import collective_points
from gac.profiling.sweeps.coverage import fused_points, model_points
from tests.allocation.test_latencies import table

NAME = "decode:1@32768"
GPUS, DECODE = 4, Workload.parse("decode:1@1024")
TIMED, REST = Timed("dense", NAME, Spread(5e7, 0, 9), 1.0, 10**9), Spread(3e7, 0, 9)


def test_latents_are_predicted_by_the_attention_that_they_change() -> None:
    """GEMMs are scaled as the dense model's; dense attention is part of what is timed without GEMMs."""
    workloads = (Workload.parse(NAME),)
    sites = family_of(SHAPES["llama-3-8b"]).sites(SHAPES["llama-3-8b"])
    timing = Timing(table(model_points("llama-3-8b", workloads, forms=("latent:1",))), workloads)
    plain = [WeightChoice(weight, "dense", DENSE.full(weight)) for site in sites for weight in site.weights]
    latents = [WeightChoice(each.weight, "latent:1", 64) if each.weight.cached else each for each in plain]
    before, after = (summed_attention(timing, choices, NAME) for choices in (plain, latents))
    assert 0 < after < before
    gemms, fewer = 10**7, 9 * 10**6
    dense = Version("dense", tuple(plain), True, 0.0, {NAME: gemms + before})
    ours = Version("ours", tuple(latents), True, 0.0, {NAME: fewer + after})
    model: Any = SimpleNamespace(dtype=torch.bfloat16)
    timer: Any = None
    bench = Bench(model, sites, timing, (dense,) * 3, timer)

    def result(version: Version) -> Result:
        return bench._result(version, TIMED, {True: TIMED, False: TIMED}, {None: REST}, {})

    assert result(dense).predicted_ns == result(dense).sum_ns == 5e7
    assert result(ours).predicted_ns == pytest.approx(3e7 + 2e7 * fewer / gemms + after - before)
    assert result(ours).sum_ns == 5e7 - (gemms - fewer) + after - before
    saved = dense.bytes - ours.bytes + 2 * 32768 * (dense.kv_numbers - ours.kv_numbers)
    assert (result(dense).planned_bytes, result(ours).planned_bytes) == (10**9, 10**9 - saved)
    for other in ({"gpus": 2}, {"compiled": True}, {"table_ns": {NAME: None}}):
        assert result(replace(ours, **other)).predicted_ns is None


@pytest.fixture(scope="module")
def planner() -> Planner:
    name, runs = "llama-3-8b", [DECODE]
    points = [point for gpus in (1, GPUS) for point in model_points(name, runs, gpus=gpus)]
    points += [*fused_points(name, runs, gpus=GPUS), *collective_points(GPUS, runs)]
    return planner_of_shapes(name, runs, table(dict.fromkeys(points)), layers=1, gpus=GPUS)


@pytest.mark.slow
def test_versions_for_several_gpus(planner: Planner) -> None:
    versions = {version.name: version for version in versions_at(planner, 0.7)}
    assert {versions[name].gpus for name in (UNALIGNED, "uniform", DEFAULT + FOR_ONE)} == {1}
    assert versions[DEFAULT].gpus == versions["pad 64"].gpus == planner.dense(fused=True).gpus == GPUS
    split, alone = fastest_versions(planner, 0.7, DECODE, 0.7)
    assert (split.name, split.gpus, alone.name, alone.gpus) == (FASTEST, GPUS, FASTEST + FOR_ONE, 1)
    assert max(split.loss, alone.loss) <= 0.7
