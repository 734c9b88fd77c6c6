"""Results that show themselves: as text, as HTML that nothing can break out of, as DataFrames."""

import re
from dataclasses import replace

import pytest
from rich.console import Console
from transformers import LlamaConfig

from gac import Perplexity
from gac.allocation.frontier import frontier
from gac.plan.plan import Plan
from gac.profiling.cliffs import find_cliffs
from tests.allocation.small_problems import measured, problem, profile
from tests.changed import with_measured
from tests.compression.compressed import MakePlan

UP = "model.layers.0.mlp.up_proj"
HOSTILE = "<script>alert(1)</script>[bold]"
TABLE = profile([measured("linear", 1000 if n % 8 == 0 else 2000, m=8, k=64, n=n) for n in range(64, 129)])
CLIFFS = find_cliffs(TABLE.sweeps()[0])
FRONTIER = frontier(problem([[2, 1, 0.5, 0.25, 0.125]], [10, 20, 30, 40, 50, 60]), points=3)
PERPLEXITY = Perplexity(17.9047, 40_920, "wiki-sample, 40 windows x 1024", "float32")


@pytest.fixture
def plan(make_plan: MakePlan, tiny_config: LlamaConfig) -> Plan:
    return make_plan(tiny_config, {UP: ("low_rank", 24)})


def lines_of(result: object) -> list[str]:
    return [" ".join(line.split()) for line in repr(result).splitlines()]


def test_each_result_is_a_table_with_its_title_and_notes(plan: Plan) -> None:
    lines = lines_of(plan)
    assert (lines[0], lines[-1]) == (
        "layer q k v o gate up down kept loss",
        "certificate optimal: loss 0.1, bound 0.1, gap 0",
    )
    assert lines[2].startswith("0 - - - - - r 24 ")
    lines = lines_of(TABLE)
    assert (lines[0], lines[3]) == ("profile test: NVIDIA Test GPU", "linear bf16 65 0 1.0 µs 2.0 µs")
    lines = lines_of(CLIFFS)
    assert lines[2] == "odd 32 2.00x multiples of 8 no"
    assert lines[-2].startswith("56 collapsed dims, the worst 65 (2.00x the latency of 72); ")
    lines = lines_of(FRONTIER)
    assert lines[0] == "frontier of tiny, kfac, NVIDIA Test GPU"
    assert "3 points, 3 of them proved to lose least for their parameters" in lines
    assert lines_of(PERPLEXITY)[2:] == ["17.905 40,920 float32", "wiki-sample, 40 windows x 1024"]


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
    row = frame[frame["weight"] == UP].iloc[0]
    assert (row["layer"], row["kind"], row["form"], row["dim"], row["aligned"]) == (0, "up_proj", "low_rank", 24, True)
    frame = TABLE.to_dataframe()
    assert (len(frame), frame["n"].max(), frame["median_ns"].max()) == (65, 128, 2000.0)
    frame = CLIFFS.to_dataframe()
    assert (frame["is"] == "collapsed").sum() == len(CLIFFS.collapsed)
    assert frame.iloc[0].to_dict() == {"dim": 65, "is": "collapsed", "beside": 72, "times": 2.0}
    frame = FRONTIER.to_dataframe()
    assert list(frame["params"]) == [point.params for point in FRONTIER.points]
    assert list(frame["latency_ns prefill:1x8"]) == [point.latency_ns[0] for point in FRONTIER.points]
    assert PERPLEXITY.to_dataframe()["value"].tolist() == [17.9047]
