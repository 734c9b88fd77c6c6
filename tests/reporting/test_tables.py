"""Tables in a terminal of plans, evaluations, GPUs and results: what is in them, and that they fit."""

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rendering import shown
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig

from gac.allocation.frontier import frontier
from gac.core.rich_tables import new_table
from gac.evaluation.latency import Spread, Timed
from gac.evaluation.results import Divergence, Evaluated, Evaluation, OnText, Perplexity, TaskScore
from gac.plan.layers import plan_table
from gac.plan.plan import Plan, WorkloadLatency
from gac.profiling.records import Launch
from gac.profiling.table import Sweep
from gac.reporting.evaluation import perplexity_table, task_table, timed_table
from gac.reporting.gpu_tables import profiles_table
from gac.reporting.tables import comparison_table, differences_table, plan_line, plan_summary
from gac_extensions.lab.cliffs import find_cliffs
from gac_extensions.lab.mechanisms.causes import Cause
from gac_extensions.lab.shapes.bench import Result
from gac_extensions.lab.shapes.tables import latency_table
from gac_extensions.lab.sweep_tables import ExplainedSweep, alignment_table, cliffs_table, points_table
from tests.allocation.small_problems import measured, problem, profile
from tests.changed import with_measured, with_recipe
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


def test_the_table_and_the_summary_of_a_plan(other: Plan, plan: Plan) -> None:
    assert shown(plan_table(other)) == [
        "layer q k v o gate up down kept loss",
        "───────────────────────────────────────────────────────",
        "0 r 9 - - - - - - 0.936 0.0000",
        "1 - - - - w 128 w 128 w 128 0.800 0.0000",
        "r: rank of a pair; w: neurons that an MLP keeps; -: dense, as it was",
    ]
    assert plan_summary(plan).plain == plan.summary()
    short = plan_line(plan).plain.splitlines()
    assert set(short) < set(plan.summary().splitlines())
    assert [line.split()[0] for line in short] == ["parameters", f"{plan.budget.limit:,}", "alignment"]


def test_weights_that_are_called_alike_have_columns_of_their_own(make_plan: MakePlan) -> None:
    changes = {"transformer.h.0.attn.c_proj": ("low_rank", 8), "transformer.h.1.mlp.c_proj": ("low_rank", 16)}
    lines = shown(plan_table(make_plan(small_config("gpt2"), changes)))
    assert [line.rsplit(maxsplit=2)[0] for line in (lines[0], *lines[2:4])] == [
        "layer c_attn attn.c c_fc mlp.c",
        "0 - r 8 - -",
        "1 - - - r 16",
    ]


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


def test_weights_that_differ_most_come_first_and_rounding_differs(plan: Plan, other: Plan, make_plan: MakePlan) -> None:
    assert shown(differences_table(plan.compare(other), most=2)) == [
        "weight first second parameters bytes",
        "───────────────────────────────────────────────────────────────────",
        "model.layers.1.mlp.gate_proj dense narrow 128 -3,072 -6,144",
        "model.layers.1.mlp.up_proj dense narrow 128 -3,072 -6,144",
        "4 of 14 weights differ, the 2 that differ most",
    ]
    assert shown(differences_table(plan.compare(plan))) == ["all 14 weights become the same"]
    first, *rest = plan.sites
    weight = replace(first.weights[0], scheme="w4a16")
    rounded = replace(plan, sites=(replace(first, weights=(weight,)), *rest))
    assert shown(differences_table(plan.compare(rounded)))[2:] == [
        f"{Q} low_rank 16 low_rank 16 w4a16 +0 {weight.bytes - 2 * weight.params:+,}",
        "1 of 14 weights differ",
    ]
    assert shown(plan_table(rounded))[-1].endswith("w4a16: rounded")


PROTOCOL = "wiki-sample, 32 windows x 1024 from token 204800, non-overlapping, no BOS"


def evaluated(name: str, perplexity: float, parameters: int = 134_515_008, **more: Any) -> Evaluated:
    measured = Perplexity(perplexity, 32736, PROTOCOL, "float32", "wiki-sample")
    return Evaluated(name, parameters, "float32", measured, **more)


def score(metric: str, value: float, stderr: float | None = 0.05, items: int = 40, shots: int | None = 0) -> TaskScore:
    return TaskScore("piqa", metric, value, stderr, items, 40, shots, "1.0", "lm-eval 0.4.13", "float32")


def test_predictions_and_divergences_stand_beside_the_measured_change(plan: Plan) -> None:
    divergence = Divergence(0.2345, 0.8125, 32736, PROTOCOL, "float32", "float32")
    small = evaluated("[bold]er", 25.0, 113_281_344, divergence=divergence, plan=plan, predicted=0.25)
    heading, _, *lines = shown(perplexity_table(Evaluation((small,), against=evaluated("smollm2", 20.0))))
    assert [heading, *lines[:4]] == [
        "parameters dtype perplexity ratio ln ratio KL top-1",
        "smollm2 134,515,008 float32 20.000 1 0",
        "[bold]er 113,281,344 float32 25.000 1.2500 0.2231 0.2345 81.2%",
        "predicted by its plan 25.681 1.2840 0.2500",
        PROTOCOL,
    ]


def test_every_text_has_a_row_and_the_ratios_a_geometric_mean(plan: Plan) -> None:
    texts = (20, plan.measured.calibration.text), (30, "b")
    first, second = (Perplexity(value, 100, f"{name}, no BOS", "float32", name) for value, name in texts)
    dense = Evaluated("dense", 10, "float32", first, also=(OnText(second),))
    divergence = Divergence(0.5, 0.5, 100, "b, no BOS", "float32", "float32")
    more = OnText(replace(second, value=60.0), divergence)
    small = Evaluated("small", 8, "float32", replace(first, value=25.0), divergence, (), plan, 0.25, (more,))
    both = Evaluation((small,), dense)
    assert both.mean_ratios == (pytest.approx(math.sqrt(1.25 * 2)),)
    assert Evaluation((small,)).mean_ratios == (None,)
    assert shown(perplexity_table(both))[2:] == [
        "dense 10 float32",
        "on wiki-sample 20.000 1 0",
        "on b 30.000 1 0",
        "small 8 float32",
        "on wiki-sample 25.000 1.2500 0.2231 0.5000 50.0%",
        "predicted by its plan 25.681 1.2840 0.2500",
        "on b 60.000 2.0000 0.6931 0.5000 50.0%",
        "geometric mean 1.5811 0.4581",
        "wiki-sample, no BOS",
        "100 tokens predicted",
        "b, no BOS",
        "100 tokens predicted",
        "KL: of the model from dense, mean nats a token; top-1: tokens where both agree on the likeliest",
    ]
    elsewhere = Evaluated("small", 8, "float32", replace(second, value=60.0), plan=plan, predicted=0.25)
    alone = shown(perplexity_table(Evaluation((elsewhere,), Evaluated("dense", 10, "float32", second))))
    assert alone[2:4] == ["dense 10 float32 30.000 1 0", "small 8 float32 60.000 2.0000 0.6931"]
    assert alone[-1].startswith("small: its plan predicts a ln ratio of 0.2500 on 64 x 1024 tokens of wiki-sample")


def test_scores_of_two_models_in_one_table() -> None:
    dense, small = (
        Evaluated(name, 10, "float32", scores=(score("acc", first), score("acc_norm", second, None)))
        for name, first, second in (("smollm2", 0.75, 0.5), ("small", 0.5, 0.25))
    )
    heading, _, *lines = shown(task_table(Evaluation((small,), dense)))
    assert [heading, *lines] == [
        "task metric shots smollm2 small",
        "piqa acc 0 0.7500 ± 0.0500 0.5000 ± 0.0500",
        "piqa acc_norm 0 0.5000 0.2500",
        "40 items of piqa 1.0; by lm-eval 0.4.13; ±: standard error",
    ]
    partial = Evaluated("smollm2", 10, "float32", scores=(score("acc", 0.75, items=8, shots=None),))
    assert shown(task_table(Evaluation((partial,))))[2:] == [
        "piqa acc 0.7500 ± 0.0500",
        "the first 8 of 40 items of piqa 1.0; by lm-eval 0.4.13; ±: standard error",
    ]


def timed(name: str, ms: float) -> Timed:
    return Timed(name, "prefill:1x1024", Spread(1e6 * ms, 1e4 * ms, 7), 1024e3 / ms, 16_060_000_000)


def test_every_version_beside_the_dense_model() -> None:
    dense, rest = Spread(25_000_000.0, 50_000.0, 7), Spread(5_000_000.0, 10_000.0, 7)
    results = [
        Result(1000, 0.0, timed("dense, fused", 25.0), dense, dense, rest, 8, 25e6, 25e6),
        Result(850, 0.1575, timed("unaligned", 100.0), dense, dense, rest, 8),
        Result(791, 0.1575, timed("GAC", 20.0), dense, dense, rest, 8, 20.4e6, 20.8e6),
    ]
    heading, _, *rows = shown(latency_table(results, 1000))
    assert [heading, *rows[:3]] == [
        "prefill:1x1024 kept loss ms IQR over dense predicted tokens/s GB",
        "dense, fused 1.0000 0.0000 25.000 1.0% 1.000x +0.0% 40,960 16.06",
        "unaligned 0.8500 0.1575 100.000 1.0% 0.250x 10,240 16.06",
        "GAC 0.7910 0.1575 20.000 1.0% 1.250x +2.0% 51,200 16.06",
    ]
    lines = shown(timed_table([timed("dense", 25.0), timed("small", 20.0)]))
    assert lines[2:4] == ["dense 25.000 1.0% 1.000x 40,960 16.06", "small 20.000 1.0% 1.250x 51,200 16.06"]


ALIGN1 = "cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_tn_align1>"


@pytest.fixture
def explained() -> ExplainedSweep:
    """Ranks 960 to 1088, odd ones five times and even ones 2.5 times as slow; the cause of the first is not known."""
    dims = np.arange(960, 1089)
    ns = 3e4 * np.where(dims % 8 == 0, 1.0, np.where(dims % 2, 5.0, 2.5))
    launches = tuple((Launch(ALIGN1, (64, 1, 1), (128, 1, 1), 0),) for _ in dims)
    fixed = (("m", 1024), ("k", 4096), ("n", 4096))
    sweep = Sweep("low_rank", "bf16", "cold", "r", fixed, dims, ns, 0.002 * ns, launches)
    cliffs = find_cliffs(sweep)
    cause = Cause("alignment tier", "evidence", "slow", "fast")
    return ExplainedSweep(sweep, cliffs, (None, *[cause] * (len(cliffs.collapsed) - 1)), ())


def test_cliffs_whose_cause_is_unknown_or_whose_label_is_long(explained: ExplainedSweep) -> None:
    sizes = (("b", 4), ("h", 32), ("kv", 32), ("s", 2048), ("t", 2048))
    old = explained.sweep
    long = Sweep("sdpa_efficient_causal", "bf16", "hot", "d", sizes, old.dims, old.ns, old.iqr, old.launches)
    sweeps = [ExplainedSweep(long, explained.cliffs, (), ())]
    for table in (cliffs_table("a GPU", sweeps), alignment_table(sweeps)):
        assert not any("…" in line for line in shown(table))
    lines = shown(cliffs_table("a GPU", [explained]))
    assert "low_rank bf16 m=1024 k=4096 n=4096, r 129 112 961 -> 968, 5.00x 8 0" in lines
    assert lines[-1] == "causes of the 112 collapsed dims: alignment tier 99.1%, the record does not tell 0.9%"
    row = "961 150.0 0.1 5.00x 968 ? cutlass_75_tensorop_bf1...x128_tn_align1"
    assert row in shown(points_table(explained, 961, 968))
    explained.sweep.ns[:] = 3e4
    lines = shown(cliffs_table("a GPU", [ExplainedSweep(explained.sweep, find_cliffs(explained.sweep), (), ())]))
    assert "low_rank bf16 m=1024 k=4096 n=4096, r 129 0 none 1 0" in lines
    assert lines[-1] == "no dim is collapsed"


def test_profiles_show_what_is_wrong_with_one() -> None:
    good = {"name": "a", "where": "shipped", "gpu": "A GPU", "shapes": 1234, "operators": ["linear", "sdpa"]}
    entries = [good | {"date": "d", "digest": "0123456789abcdef"}, {"name": "b", "where": "saved", "problem": "torn"}]
    assert shown(profiles_table(entries))[2:] == ["a shipped A GPU 1,234 2 d 0123456789ab", "b saved torn"]


HEADINGS = ("layer", "kept", "perplexity", "parameters", "prefill:1x1024", "collapsed dims")
NUMBERS = ("0", "0.8000", "1,234.5678", "134,515,008", "30.4 µs", "1017")


def _lines(columns: int, width: int, name: str = "a") -> list[str]:
    headings = [("plan", "<"), *((heading, ">") for heading in HEADINGS[:columns])]
    return _printed(new_table(headings, [(name, *NUMBERS[:columns])] * 2), width)


def _printed(table: Table, width: int) -> list[str]:
    console = Console(width=width, markup=False, highlight=False)
    with console.capture() as capture:
        console.print(table)
    return [line.rstrip() for line in capture.get().splitlines()]


@pytest.mark.parametrize(("columns", "width"), [(0, 20), (2, 20), (6, 20), (3, 40), (6, 40), (6, 60), (6, 100)])
def test_headings_and_numbers_are_whole_and_within_the_width(columns: int, width: int) -> None:
    lines = _lines(columns, width, name="model.layers.0.self_attn.q_proj")
    words = {word.rstrip(":") for line in lines for word in line.split()}
    wanted = {word for text in (*HEADINGS[:columns], *NUMBERS[:columns]) for word in text.split()}
    assert wanted <= words
    assert max(map(len, lines)) <= width


def test_columns_give_way_and_come_back() -> None:
    assert _lines(3, 20) == ["plan: a", "layer: 0", "kept: 0.8000", "perplexity:", "1,234.5678", ""] * 2
    head, _, first, *_ = _lines(3, 50, name="model.layers.0.self_attn.q_proj")
    assert head.split() == ["plan", "layer", "kept", "perplexity"]
    assert first.split()[1:] == ["0", "0.8000", "1,234.5678"]
    table = new_table([("plan", "<"), ("perplexity", ">")], [("a" * 30, "271.36")])
    heights = [len(_printed(table, width)) for width in (20, 30, 60)]
    assert heights[0] > heights[1] > heights[2] == 3


HOSTILE = "<script>alert(1)</script>[bold]"
TABLE = profile([measured("linear", 1000 if n % 8 == 0 else 2000, m=8, k=64, n=n) for n in range(64, 129)])
CLIFFS = find_cliffs(TABLE.sweeps()[0])
FRONTIER = frontier(problem([[2, 1, 0.5, 0.25, 0.125]], [10, 20, 30, 40, 50, 60]), points=3)
PERPLEXITY = Perplexity(17.9047, 40_920, "wiki-sample, 40 windows x 1024", "float32")


def repr_of(result: object) -> list[str]:
    return [" ".join(line.split()) for line in repr(result).splitlines()]


def test_each_result_is_a_table_with_its_title_and_notes(plan: Plan) -> None:
    assert repr_of(plan)[-1] == "certificate optimal: loss 0.1, bound 0.1, gap 0"
    lines = repr_of(TABLE)
    assert (lines[0], lines[3]) == ("profile test: NVIDIA Test GPU", "linear bf16 65 0 1.0 µs 2.0 µs")
    lines = repr_of(CLIFFS)
    assert lines[2] == "odd 32 2.00x multiples of 8 no"
    assert lines[-2].startswith("56 collapsed dims, the worst 65 (2.00x the latency of 72); ")
    lines = repr_of(FRONTIER)
    assert lines[0] == "frontier of tiny, kfac, NVIDIA Test GPU"
    assert "3 points, 3 of them proved to lose least for their parameters" in lines
    assert repr_of(PERPLEXITY)[2:] == ["17.905 40,920 float32", "wiki-sample, 40 windows x 1024"]


def test_markup_in_names_is_text_in_a_terminal_and_a_notebook(plan: Plan) -> None:
    console = Console(width=100, force_terminal=False)
    with console.capture() as captured:
        console.print(with_measured(plan, model=HOSTILE))
    assert HOSTILE in captured.get()
    named = with_measured(plan, model=HOSTILE), with_measured(FRONTIER, model=HOSTILE)
    hostile = [result._repr_html_() for result in (*named, replace(PERPLEXITY, protocol=HOSTILE))]
    for html in (*hostile, TABLE._repr_html_(), CLIFFS._repr_html_()):
        tags = set(re.findall(r"<(\w+)", html))
        assert "script" not in tags >= {"table", "thead", "tbody", "th", "td"}
    assert all("&lt;script&gt;alert(1)&lt;/script&gt;[bold]" in html for html in hostile)


def test_data_frames_have_a_row_a_weight_a_measurement_a_dim_a_point(plan: Plan) -> None:
    frame = plan.to_dataframe()
    assert len(frame) == len(plan.weights) == 14
    assert int(frame["params"].sum()) == plan.budget.used
    row = frame[frame["weight"] == Q].iloc[0]
    assert (row["layer"], row["kind"], row["form"], row["dim"], row["aligned"]) == (0, "q_proj", "low_rank", 16, True)
    frame = TABLE.to_dataframe()
    assert (len(frame), frame["n"].max(), frame["median_ns"].max()) == (65, 128, 2000.0)
    frame = CLIFFS.to_dataframe()
    assert (frame["is"] == "collapsed").sum() == len(CLIFFS.collapsed)
    assert frame.iloc[0].to_dict() == {"dim": 65, "is": "collapsed", "beside": 72, "times": 2.0}
    frame = FRONTIER.to_dataframe()
    assert list(frame["params"]) == [point.params for point in FRONTIER.points]
    assert list(frame["latency_ns prefill:1x8"]) == [point.latency_ns[0] for point in FRONTIER.points]
    assert PERPLEXITY.to_dataframe()["value"].tolist() == [17.9047]
