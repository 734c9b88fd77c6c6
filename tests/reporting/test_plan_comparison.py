"""Plans side by side: what is in the tables, and that they fit."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from rendering import shown
from transformers import LlamaConfig

from gac.plan import Plan, WorkloadLatency
from gac.reporting.plan_comparison import comparison_table, differences_table
from tests.changed import with_recipe

NOTES = [
    "kept, over: parameters of the targeted weights, and how many are beyond the limit",
    "loss, perplexity: predicted on calibration text; aligned: chosen dims that are multiples of 8",
]


@pytest.fixture
def plan(make_plan: Callable[..., Plan], tiny_config: LlamaConfig) -> Plan:
    return make_plan(tiny_config, {"model.layers.0.self_attn.q_proj": ("low_rank", 16)})


@pytest.fixture
def other(make_plan: Callable[..., Plan], tiny_config: LlamaConfig) -> Plan:
    mlp = {f"model.layers.1.mlp.{name}_proj": ("narrow", 128) for name in ("gate", "up", "down")}
    made = make_plan(tiny_config, {"model.layers.0.self_attn.q_proj": ("low_rank", 9)} | mlp)
    return replace(
        made,
        limits=(replace(made.budget, limit=made.budget.used - 1234, over=1234),),
        workloads=(WorkloadLatency("decode:1@1024", 2_000_000, 1_500_000, 14, 0, 0),),
    )


def test_one_row_a_plan(plan: Plan, other: Plan) -> None:
    assert shown(comparison_table([("ours", plan), ("theirs", other)])) == [
        "plan kept over loss perplexity decode:1@1024 aligned",
        "─────────────────────────────────────────────────────────────────",
        "ours 0.9778 0 0.1000 271.00 unknown 100.0%",
        "theirs 0.8681 1,234 0.1000 271.00 1.500 ms 75.0%",
        *NOTES,
    ]


def test_predictions_of_different_scales_are_marked(plan: Plan, other: Plan) -> None:
    table = comparison_table([("a", plan), ("b", with_recipe(other, method="svd"))])
    assert shown(table)[-1] == "predicted by different methods, shots or text: these losses are not of one scale"


def test_the_weights_that_differ_most_come_first(plan: Plan, other: Plan) -> None:
    assert shown(differences_table(plan.compare(other), most=2)) == [
        "weight first second parameters",
        "───────────────────────────────────────────────────────────",
        "model.layers.1.mlp.gate_proj dense narrow 128 -3,072",
        "model.layers.1.mlp.up_proj dense narrow 128 -3,072",
        "4 of 14 weights differ, the 2 that differ most",
    ]


def test_plans_that_do_not_differ(plan: Plan) -> None:
    assert shown(differences_table(plan.compare(plan))) == ["all 14 weights become the same"]


def test_names_are_no_markup(plan: Plan) -> None:
    assert shown(comparison_table([("[bold]a", plan), ("b", plan)]))[2].startswith("[bold]a ")
