"""Plans for people, one and side by side: what is in the tables, and that they fit."""

from dataclasses import replace

import pytest
from rendering import shown
from transformers import LlamaConfig

from gac.plan.layers import plan_table
from gac.plan.plan import Plan, WorkloadLatency
from gac.reporting.tables import comparison_table, differences_table, plan_line, plan_summary
from tests.changed import with_recipe
from tests.compression.compressed import MakePlan
from tests.models.small import small_config

Q = "model.layers.0.self_attn.q_proj"
MLP = {f"model.layers.1.mlp.{name}_proj": ("narrow", 128) for name in ("gate", "up", "down")}


@pytest.fixture
def plan(make_plan: MakePlan, tiny_config: LlamaConfig) -> Plan:
    return make_plan(tiny_config, {Q: ("low_rank", 16)})


@pytest.fixture
def other(make_plan: MakePlan, tiny_config: LlamaConfig) -> Plan:
    plan = make_plan(tiny_config, {Q: ("low_rank", 9)} | MLP)
    return replace(
        plan,
        limits=(replace(plan.budget, limit=plan.budget.used - 1234, over=1234),),
        workloads=(WorkloadLatency("decode:1@1024", 2_000_000, 1_500_000, 14, 0, 0),),
    )


def test_a_plan_by_layer(other: Plan) -> None:
    assert shown(plan_table(other)) == [
        "layer q k v o gate up down kept loss",
        "───────────────────────────────────────────────────────",
        "0 r 9 - - - - - - 0.936 0.0000",
        "1 - - - - w 128 w 128 w 128 0.800 0.0000",
        "r: rank of a pair; w: neurons that an MLP keeps; -: dense, as it was",
    ]


def test_weights_that_are_called_alike_have_columns_of_their_own(make_plan: MakePlan) -> None:
    changes = {"transformer.h.0.attn.c_proj": ("low_rank", 8), "transformer.h.1.mlp.c_proj": ("low_rank", 16)}
    lines = shown(plan_table(make_plan(small_config("gpt2"), changes)))
    assert [line.rsplit(maxsplit=2)[0] for line in (lines[0], *lines[2:4])] == [
        "layer c_attn attn.c c_fc mlp.c",
        "0 - r 8 - -",
        "1 - - - r 16",
    ]


def test_budget_alignment_and_the_plans_own_summary(plan: Plan) -> None:
    assert plan_summary(plan).plain == plan.summary()
    short = plan_line(plan).plain.splitlines()
    assert set(short) < set(plan.summary().splitlines())
    assert [line.split()[0] for line in short] == ["parameters", f"{plan.budget.limit:,}", "alignment"]


def test_plans_beside_each_other_are_one_row_each(plan: Plan, other: Plan) -> None:
    assert shown(comparison_table([("[bold]ours", plan), ("theirs", other)])) == [
        "plan kept over loss perplexity decode:1@1024 aligned",
        "─────────────────────────────────────────────────────────────────────",
        "[bold]ours 0.9778 0 0.1000 271.00 unknown 100.0%",
        "theirs 0.8681 1,234 0.1000 271.00 1.500 ms 75.0%",
        "dense 1.0000 2.000 ms",
        "kept, over: parameters of the targeted weights, and how many are beyond the limit",
        "loss, perplexity: predicted on calibration text; aligned: chosen dims that are multiples of 8",
        "weights bits model of the model KV cache schemes",
        "──────────────────────────────────────────────────────────────────────",
        "[bold]ours 180.2 kB 15.64 246.3 kB 0.9836 1.0000 14 bf16",
        "theirs 160.0 kB 13.89 226.0 kB 0.9029 1.0000 14 bf16",
        "dense 184.3 kB 16.00 250.4 kB 1.0000 1.0000",
        "weights: the targeted ones, with scales and zero points; bits: of these, for each dense parameter",
        "model: with embeddings, head and all else; what is not rounded counts as 16 bits",
        "KV cache: numbers a token, over the dense model's",
    ]
    table = comparison_table([("a", plan), ("b", with_recipe(other, method="svd"))])
    assert shown(table)[7] == "predicted by different methods, shots or text: these losses are not of one scale"


def test_weights_that_are_rounded_differ(make_plan: MakePlan, plan: Plan) -> None:
    first, *rest = plan.sites
    weight = replace(first.weights[0], scheme="w4a16")
    rounded = replace(plan, sites=(replace(first, weights=(weight,)), *rest))
    assert shown(differences_table(plan.compare(rounded)))[2:] == [
        f"{Q} low_rank 16 low_rank 16 w4a16 +0 {weight.bytes - 2 * weight.params:+,}",
        "1 of 14 weights differ",
    ]
    assert shown(plan_table(rounded))[-1].endswith("w4a16: rounded")


def test_the_weights_that_differ_most_come_first(plan: Plan, other: Plan) -> None:
    assert shown(differences_table(plan.compare(other), most=2)) == [
        "weight first second parameters bytes",
        "───────────────────────────────────────────────────────────────────",
        "model.layers.1.mlp.gate_proj dense narrow 128 -3,072 -6,144",
        "model.layers.1.mlp.up_proj dense narrow 128 -3,072 -6,144",
        "4 of 14 weights differ, the 2 that differ most",
    ]
    assert shown(differences_table(plan.compare(plan))) == ["all 14 weights become the same"]
