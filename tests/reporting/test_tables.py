"""Tables for people: what is in them, and that they fit."""

from collections.abc import Callable

import pytest
from rich.console import Console, RenderableType
from transformers import LlamaConfig

from gac.evaluation.perplexity import Perplexity
from gac.plan import Plan
from gac.profiling.cliffs import find_cliffs
from gac.profiling.table import Profile, Sweep
from gac.reporting.comparison import Comparison, Measured
from gac.reporting.tables import (
    cliffs_table,
    perplexity_table,
    plan_line,
    plan_summary,
    plan_table,
    points_table,
    profiles_table,
)

PROTOCOL = "wiki-sample, 32 windows x 1024 from token 204800, non-overlapping, no BOS"


def shown(table: RenderableType) -> list[str]:
    """The lines of a table in a file, without the space around them."""
    console = Console(width=100, markup=False, highlight=False, file=None)
    with console.capture() as capture:
        console.print(table)
    return [" ".join(line.split()) for line in capture.get().splitlines()]


@pytest.fixture
def plan(make_plan: Callable[..., Plan], tiny_config: LlamaConfig) -> Plan:
    mlp = {f"model.layers.1.mlp.{name}_proj": ("narrow", 128) for name in ("gate", "up", "down")}
    return make_plan(tiny_config, {"model.layers.0.self_attn.q_proj": ("low_rank", 16)} | mlp)


@pytest.fixture(scope="module")
def h100() -> Profile:
    return Profile.load("nvidia-h100-80gb-hbm3")


@pytest.fixture(scope="module")
def pair(h100: Profile) -> Sweep:
    return h100.rows_of("low_rank", {"m": 1024, "k": 4096, "n": 4096}, "r")


def test_a_plan_by_layer(plan: Plan) -> None:
    assert shown(plan_table(plan)) == [
        "layer q k v o gate up down kept loss",
        "────────────────────────────────────────────────────────",
        "0 r 16 - - - - - - 0.956 0.0000",
        "1 - - - - w 128 w 128 w 128 0.800 0.0000",
        "r: rank of a low-rank pair; w: neurons of a narrower MLP; -: dense",
    ]


def test_a_summary_is_the_plans_own(plan: Plan) -> None:
    assert plan_summary(plan).plain == plan.summary()


def test_budget_and_alignment(plan: Plan) -> None:
    budget = plan.budget
    assert shown(plan_line(plan)) == [
        f"budget {budget.used:,} of {budget.total:,} targeted parameters; {budget.limit:,} allowed",
        "alignment 100.0% of 4 chosen dims are multiples of 8",
    ]


def test_cliffs_name_the_worst_dim_and_its_rescue(pair: Sweep) -> None:
    found = find_cliffs(pair)
    worst = int(found.slowdown.argmax())
    (row,) = [line for line in shown(cliffs_table("a GPU", [(pair, found)])) if line.startswith("low_rank")]
    assert row.startswith(f"{pair.label} {len(pair)} {len(found.collapsed)} {found.collapsed[worst]} -> ")
    assert "a GPU" in shown(cliffs_table("a GPU", [(pair, found)]))


def test_points_show_what_rescues_a_collapsed_dim(pair: Sweep) -> None:
    lines = shown(points_table(pair, find_cliffs(pair), 1022, 1024))
    rows = [line for line in lines if line[:2] == "10"]
    assert [row.split()[0] for row in rows] == ["1022", "1023", "1024"]
    assert rows[1].split()[4] == "1024"
    assert any("align1" in line for line in lines)


def test_profiles_show_what_is_wrong_with_one() -> None:
    good = {"name": "a", "where": "shipped", "gpu": "A GPU", "shapes": 1234, "rows": [1, 8], "date": "d"}
    entries = [good | {"digest": "0123456789abcdef"}, {"name": "b", "where": "saved", "problem": "torn"}]
    assert shown(profiles_table(entries))[2:] == ["a shipped A GPU 1,234 1, 8 d 0123456789ab", "b saved torn"]


def test_the_longest_names_fit(h100: Profile) -> None:
    found = [(sweep, find_cliffs(sweep)) for sweep in h100.sweeps()]
    lines = shown(cliffs_table(h100.header.gpu, found))
    assert sum(line.startswith(("linear bf16", "low_rank bf16")) for line in lines) == len(found)
    assert not any("…" in line for line in lines)


def test_perplexity_of_one_model() -> None:
    result = Comparison(Measured("smollm2", Perplexity(17.5384, 32736, PROTOCOL, "float32")))
    assert shown(perplexity_table(result))[2:] == ["smollm2 17.538", PROTOCOL, "32,736 tokens predicted, float32"]


def test_a_prediction_stands_beside_the_measured_change() -> None:
    dense = Measured("smollm2", Perplexity(20.0, 32736, PROTOCOL, "float32"))
    small = Measured("small", Perplexity(25.0, 32736, PROTOCOL, "float32"))
    comparison = Comparison(small, dense, predicted=0.25)
    assert shown(perplexity_table(comparison))[2:5] == [
        "smollm2 20.000 1 0",
        "small 25.000 1.2500 0.2231",
        "predicted by its plan 25.681 1.2840 0.2500",
    ]


def test_names_are_no_markup() -> None:
    result = Comparison(Measured("models/[bold]", Perplexity(2.0, 63, PROTOCOL, "float32")))
    assert shown(perplexity_table(result))[2] == "models/[bold] 2.000"
