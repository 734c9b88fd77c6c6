"""Tables for people: what is in them, and that they fit."""

from collections.abc import Callable

import pytest
from rendering import shown
from transformers import LlamaConfig

from gac.plan import Plan
from gac.reporting.tables import plan_line, plan_summary, plan_table
from tests.models.small import small_config


@pytest.fixture
def plan(make_plan: Callable[..., Plan], tiny_config: LlamaConfig) -> Plan:
    mlp = {f"model.layers.1.mlp.{name}_proj": ("narrow", 128) for name in ("gate", "up", "down")}
    return make_plan(tiny_config, {"model.layers.0.self_attn.q_proj": ("low_rank", 16)} | mlp)


def test_a_plan_by_layer(plan: Plan) -> None:
    assert shown(plan_table(plan)) == [
        "layer q k v o gate up down kept loss",
        "────────────────────────────────────────────────────────",
        "0 r 16 - - - - - - 0.956 0.0000",
        "1 - - - - w 128 w 128 w 128 0.800 0.0000",
        "r: rank of a pair; w: neurons that an MLP keeps; -: dense, as it was",
    ]


def test_weights_that_are_called_alike_have_columns_of_their_own(make_plan: Callable[..., Plan]) -> None:
    changes = {"transformer.h.0.attn.c_proj": ("low_rank", 8), "transformer.h.1.mlp.c_proj": ("low_rank", 16)}
    lines = shown(plan_table(make_plan(small_config("gpt2"), changes)))
    assert [line.rsplit(maxsplit=2)[0] for line in (lines[0], *lines[2:4])] == [
        "layer c_attn attn.c c_fc mlp.c",
        "0 - r 8 - -",
        "1 - - - r 16",
    ]


def test_a_summary_is_the_plans_own(plan: Plan) -> None:
    assert plan_summary(plan).plain == plan.summary()


def test_budget_and_alignment(plan: Plan) -> None:
    budget = plan.budget
    assert shown(plan_line(plan)) == [
        f"budget {budget.used:,} of {budget.total:,} targeted parameters; {budget.limit:,} allowed",
        "alignment 100.0% of 4 chosen dims are multiples of 8",
    ]
