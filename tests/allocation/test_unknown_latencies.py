"""Sites of which no latency, or no finite loss, is known: a plan where one is possible, else what is lacking."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gac.allocation.decide import attach_single_gpu_comparison, decide, speed_defaults
from gac.allocation.problem import Problem, as_knapsack
from gac.core.errors import ModelError, ProfileError
from gac.core.workloads import Workload
from gac.evaluation.shapes import planner_of_shapes
from gac.forms.loss_curves import LossCurve, LossCurves
from gac.forms.planned_sites import as_planned
from gac.plan.costs import PARAMS, ns_of
from gac.plan.recipe import Recipe
from gac.plan.summary import profile_command
from tests.allocation.small_problems import PREFILL, problem, profile, rows

TABLE = "nvidia-h100-80gb-hbm3"
"""Of 16-bit numbers, on one GPU."""


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
def test_a_table_without_the_schemes_latencies_gives_a_plan(
    gpus: int, schemes: tuple[str, ...], options: dict[str, Any]
) -> None:
    of = shipped(gpus, schemes, **options)
    assert of.recipe.slack
    plan = attach_single_gpu_comparison(of, decide(of)).plan
    assert plan.speed is None
    assert plan.certificate.status == "optimal"
    assert {each.scheme for each in plan.weights} <= set(schemes)
    assert (plan.one_gpu is None) == (gpus == 1)


def test_a_site_without_a_known_latency_is_named() -> None:
    of = replace(problem([[5, 4, 3, 2, 1]] * 2, [10, 20, 30, 40, 50, 60]), profile=profile(rows(1, [10] * 6)))
    limits = {PARAMS: 288, ns_of(PREFILL): 100}
    with pytest.raises(ProfileError) as caught:
        as_knapsack(of.candidates(limits), limits)
    assert "lacks the latency of site0 for prefill:1x8 in every form" in str(caught.value)


def test_an_unknown_limited_latency_names_the_command_that_measures_the_plans_shapes() -> None:
    recipe = Recipe.of(0.8, workloads=[PREFILL, "decode:3@8"], engine="vllm", latency=1.0)
    of = replace(problem([[5, 4, 3, 2, 1]] * 2, [10, 20, 30, 40, 50, 60]), recipe=recipe)
    command = f"gac profile --model NAME --workload {PREFILL} --workload decode:3@8 --engine vllm -o PROFILE.jsonl"
    with pytest.raises(ProfileError, match=f"lacks the latency of site0 for .*; .* with {command}, or plan without"):
        of.dense.allowed(recipe)


def test_the_command_for_several_gpus_measures_the_collectives_too() -> None:
    command = profile_command("NAME", Recipe.of(0.8, tensor_parallel=2), PREFILL)
    parts = f"gac profile --model NAME --workload {PREFILL} --tensor-parallel 2 -o PROFILE.jsonl"
    gathered = f"torchrun --nproc-per-node 2 -m gac profile --collectives --workload {PREFILL} -o PROFILE.jsonl"
    assert command == f"{parts} and {gathered}"


@pytest.mark.parametrize("lost", [np.nan, np.inf])
def test_a_loss_that_is_not_finite_is_named(lost: float) -> None:
    of = problem([[5, 4, 3, 2, 1]] * 2, [10, 20, 30, 40, 50, 60])
    loss = of.curves.by_key["low_rank", "bf16", "site1"].loss.copy()
    loss[3] = lost
    curves = LossCurves({**of.curves.by_key, ("low_rank", "bf16", "site1"): LossCurve(loss)})
    with pytest.raises(ModelError, match=f"site1 in form low_rank and scheme bf16 loses {lost} at dim 3; expected"):
        replace(of, curves=curves).candidates([PARAMS])
