"""Plans for shapes that no shipped table has: every latency is known, and the plan says how many are modelled."""

from dataclasses import replace
from pathlib import Path

import pytest

from gac.core.workloads import Workload
from gac.evaluation.shapes import planner_of_shapes
from gac.models.shapes import Shapes
from gac.plan.plan import Plan
from gac.profiling.sweeps.coverage import WORKLOADS

CONFIGS = {
    "gemma-3-270m": Shapes("gemma3_text", 640, 2048, 18, 4, 1, 256, 262_144),
    "llama-3.2-1b": Shapes("llama", 2048, 8192, 16, 32, 8, 64, 128_256),
}


@pytest.fixture(scope="module", params=[*CONFIGS])
def shapes(request: pytest.FixtureRequest) -> Shapes:
    return CONFIGS[request.param]


def planned(shapes: Shapes | str, table: str, **asked) -> Plan:
    return planner_of_shapes(shapes, WORKLOADS, table, layers=2).plan(0.8, **asked)


@pytest.mark.parametrize(("table", "fuse"), [("nvidia-h100-80gb-hbm3", False), ("nvidia-h200", "auto")])
def test_every_latency_of_a_small_model_is_known(shapes: Shapes, table: str, fuse: bool | str) -> None:
    plan = planned(shapes, table, fuse=fuse)
    for each in plan.workloads:
        assert each.unknown == 0
        assert each.modelled > 0
        assert min(each.measured, each.interpolated) >= 0
        assert each.measured + each.interpolated + each.modelled == len(plan.weights)
        assert each.plan_ns is not None
        assert each.dense_ns is not None
    assert plan.measured.profile.error is not None
    assert plan.measured.profile.error < 0.06


def test_a_latency_that_is_modelled_can_be_limited() -> None:
    plan = planned(CONFIGS["gemma-3-270m"], "nvidia-h200", latency={"decode:1@1024": 0.95})
    (decode,) = (each for each in plan.workloads if each.workload == "decode:1@1024")
    assert decode.plan_ns <= 0.95 * decode.dense_ns


def test_a_plan_says_how_many_are_modelled_and_how_far_they_are_off(tmp_path: Path) -> None:
    plan = planned(CONFIGS["gemma-3-270m"], "nvidia-h200")
    said = plan.summary()
    assert f"{plan.workloads[0].modelled} modelled)" in said
    error = f"{100 * plan.measured.profile.error:.1f} %"
    assert f"modelled latencies lie within {error} in the median on shapes left out of the model" in said
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    unknown = replace(plan, workloads=tuple(replace(each, plan_ns=None, unknown=1) for each in plan.workloads))
    assert "modelled latencies" not in unknown.summary()


def test_rows_that_the_table_lacks_stay_unknown() -> None:
    workloads = [Workload.parse("decode:7@1024")]
    plan = planner_of_shapes(CONFIGS["gemma-3-270m"], workloads, "nvidia-h200", layers=2).plan(0.8)
    (only,) = plan.workloads
    assert (only.plan_ns, only.unknown) == (None, len(plan.weights))
    assert "unknown, the profile lacks the shapes of 14 weights" in plan.summary()
