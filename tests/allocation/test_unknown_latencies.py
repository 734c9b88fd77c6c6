"""Sites of which no latency, or no finite loss, is known: a plan where one is possible, else what is lacking."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gac.allocation.decide import attach_single_gpu_comparison, decide
from gac.allocation.problem import Problem, as_knapsack
from gac.allocation.resolve import resolve, speed_defaults
from gac.core.errors import ModelError, ProfileError
from gac.core.workloads import Workload
from gac.forms.loss_curves import LossCurve, LossCurves
from gac.forms.planned_sites import as_planned
from gac.models.shapes import SHAPES, Shapes
from gac.plan.costs import PARAMS, ns_of
from gac.plan.plan import Plan, ProfileUsed
from gac.plan.recipe import Recipe
from gac.plan.summary import profile_command
from gac.profiling.folders import find_profile
from gac.profiling.sweeps.coverage import WORKLOADS
from gac.profiling.table import Profile
from gac_extensions.lab.shapes.models import planner_of_shapes
from tests.allocation.small_problems import PREFILL, problem, profile, rows

TABLE = "nvidia-h100-80gb-hbm3"
"""Of 16-bit numbers, on one GPU."""
FALLING = problem([[5, 4, 3, 2, 1]] * 2, [10, 20, 30, 40, 50, 60])


def shipped(gpus: int, schemes: tuple[str, ...], **options: Any) -> Problem:
    """One layer of Llama-3-8B on that table, with what is left open decided as ``gac.allocate`` does."""
    workloads = [Workload.parse("decode:1@1024")]
    result = planner_of_shapes("llama-3-8b", workloads, TABLE, layers=1, schemes=schemes, gpus=gpus).problem
    asked = {"budget": 0.8, "fuse": "auto", "refit": "none", "latency": "any", "align": 512} | options
    recipe = Recipe.of(schemes=schemes, workloads=map(str, workloads), tensor_parallel=gpus, **asked)
    sites = as_planned(result.sites, recipe.space.forms, recipe.deployment.fuse)
    return replace(result, sites=sites, recipe=speed_defaults(recipe, sites, result.profile))


@pytest.mark.parametrize(
    ("gpus", "schemes", "options"),
    [
        (2, ("w4a16",), {}),
        (2, ("fp8",), {"budget": None, "memory": 0.4}),
        (2, ("w4a16",), {"budget": 1, "forms": ()}),
        (8, ("w4a16",), {"fuse": False, "forms": "narrow", "budget": 0.9}),
        (1, ("w4a16",), {"slack": 0.01}),
        (1, ("bf16", "w4a16"), {"budget": None, "memory": 0.3, "slack": 0.01}),  # bf16 alone would be too large
    ],
)
def test_a_table_without_the_schemes_gives_a_plan(gpus: int, schemes: tuple[str, ...], options: Any) -> None:
    of = shipped(gpus, schemes, **options)
    assert of.recipe.slack
    decision = decide(of)
    plan = (attach_single_gpu_comparison(of, decision) if gpus > 1 else decision).plan
    assert plan.speed is None
    assert "speed        not looked at" in plan.summary()
    assert plan.certificate.status == "optimal"
    assert {each.scheme for each in plan.weights} <= set(schemes)
    assert (plan.one_gpu is None) == (gpus == 1)


def test_what_lacks_a_latency_is_named_with_the_command_that_measures_it() -> None:
    of = replace(FALLING, profile=profile(rows(1, [10] * 6)))
    limits = {PARAMS: 288, ns_of(PREFILL): 100}
    with pytest.raises(ProfileError, match="lacks the latency of site0 for prefill:1x8 in every form"):
        as_knapsack(of.candidates(limits), limits)
    recipe = Recipe.of(0.8, workloads=[PREFILL, "decode:3@8"], engine="vllm", latency=1.0)
    command = f"gac profile --model NAME --workload {PREFILL} --workload decode:3@8 --engine vllm -o PROFILE.jsonl"
    with pytest.raises(ProfileError, match=f"lacks the latency of site0 for .*; .* with {command}, or plan without"):
        replace(FALLING, recipe=recipe).dense.allowed(recipe)
    command = profile_command("NAME", Recipe.of(0.8, tensor_parallel=2), PREFILL)
    parts = f"gac profile --model NAME --workload {PREFILL} --tensor-parallel 2 -o PROFILE.jsonl"
    gathered = f"torchrun --nproc-per-node 2 -m gac profile --collectives --workload {PREFILL} -o PROFILE.jsonl"
    assert command == f"{parts} and {gathered}"


@pytest.mark.parametrize("lost", [np.nan, np.inf])
def test_a_loss_that_is_not_finite_is_named(lost: float) -> None:
    key = "low_rank", "bf16", "site1"
    loss = FALLING.curves.by_key[key].loss.copy()
    loss[3] = lost
    curves = LossCurves({**FALLING.curves.by_key, key: LossCurve(loss)})
    with pytest.raises(ModelError, match=f"site1 in form low_rank and scheme bf16 loses {lost} at dim 3; expected"):
        replace(FALLING, curves=curves).candidates([PARAMS])


CONFIGS = {
    "gemma-3-270m": Shapes("gemma3_text", 640, 2048, 18, 4, 1, 256, 262_144),
    "llama-3.2-1b": Shapes("llama", 2048, 8192, 16, 32, 8, 64, 128_256),
}


def planned(shapes: Shapes | str, table: str, **asked) -> Plan:
    return planner_of_shapes(shapes, WORKLOADS, table, layers=2).plan(0.8, **asked)


@pytest.mark.parametrize(
    ("name", "table", "fuse"),
    [("gemma-3-270m", "nvidia-h100-80gb-hbm3", False), ("llama-3.2-1b", "nvidia-h200", "auto")],
)
def test_every_latency_of_a_small_model_is_known(name: str, table: str, fuse: bool | str) -> None:
    plan = planned(CONFIGS[name], table, fuse=fuse)
    for each in plan.workloads:
        assert each.unknown == 0
        assert each.modelled > 0
        assert min(each.measured, each.interpolated) >= 0
        assert each.measured + each.interpolated + each.modelled == len(plan.weights)
        assert each.plan_ns is not None
        assert each.dense_ns is not None
    assert plan.measured.profile.error is not None
    assert plan.measured.profile.error < 0.06


def test_a_modelled_latency_can_be_limited_and_a_plan_says_how_far_it_is_off(tmp_path: Path) -> None:
    plan = planned(CONFIGS["gemma-3-270m"], "nvidia-h200", latency={"decode:1@1024": 0.95})
    (decode,) = (each for each in plan.workloads if each.workload == "decode:1@1024")
    assert decode.plan_ns <= 0.95 * decode.dense_ns
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


def resolved_note(model: str, **options: Any) -> str:
    used = ProfileUsed("NVIDIA H100 80GB HBM3", "0" * 64, "asked for")
    return resolve(Recipe.of(0.8, **options), SHAPES[model], Profile.load(TABLE), used).profile.note


def test_the_shipped_table_that_has_an_unknown_latency_is_named() -> None:
    sixteen = {"workloads": "decode:16@1024", "schemes": "w4a16"}
    h100, h200 = (f" The shipped table {name}" for name in (f"{TABLE}-schemes, of NVIDIA H100", "nvidia-h200-vllm, of"))
    note = resolved_note("llama-3-8b", **sixteen)
    assert note.startswith(f"asked for; it lacks decode:16@1024.{h100}")
    assert note.endswith(f"has it: --profile {TABLE}-schemes")
    with pytest.raises(ProfileError, match=f"with scheme w4a16, which .*{h100}"):
        resolved_note("llama-3-8b", **sixteen, latency=0.9)
    with pytest.raises(ProfileError, match=f"lacks the latency of .*{h200} NVIDIA H200, has it: --profile "):
        resolved_note("llama-3-8b", workloads="decode:16@1024", engine="vllm", latency=1.0)
    assert resolved_note("llama-3-8b") == "asked for"
    assert resolved_note("smollm2", workloads="decode:3@777") == "asked for"  # no shipped table has 3 rows


def test_the_engine_of_the_shipped_table_is_named() -> None:
    table = replace(FALLING, profile=profile([])).profile
    recipe = Recipe.of(0.8, workloads="decode:64@1024", latency=0.9)
    options = "--profile nvidia-h200-vllm --engine vllm"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gac.profiling.table.shipped_profiles", lambda: [find_profile("nvidia-h200-vllm")])
        with pytest.raises(ProfileError, match=f"lacks the latency of .*has it: {options}"):
            resolve(recipe, SHAPES["llama-3-8b"], table, ProfileUsed("NVIDIA Test GPU", "2" * 64, "asked for"))
