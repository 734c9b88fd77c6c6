"""Results that show themselves: as text, as HTML that nothing can break out of, as DataFrames."""

import re
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console
from transformers import LlamaConfig

from gac import Perplexity
from gac.allocation.frontier import Frontier, frontier
from gac.errors import GacError
from gac.plan import Plan
from gac.profiling.cliffs import Cliffs, find_cliffs
from gac.profiling.table import Profile
from tests.allocation.small_problems import measured, problem, profile
from tests.changed import with_measured

UP = "model.layers.0.mlp.up_proj"
HOSTILE = "<script>alert(1)</script>[bold]"


@pytest.fixture
def plan(make_plan: Callable[[LlamaConfig, dict[str, tuple[str, int]]], Plan], tiny_config: LlamaConfig) -> Plan:
    return make_plan(tiny_config, {UP: ("low_rank", 24)})


@pytest.fixture
def table() -> Profile:
    return profile([measured("linear", 1000 if n % 8 == 0 else 2000, m=8, k=64, n=n) for n in range(64, 129)])


@pytest.fixture
def cliffs(table: Profile) -> Cliffs:
    return find_cliffs(table.sweeps()[0])


@pytest.fixture
def found() -> Frontier:
    return frontier(problem([[2, 1, 0.5, 0.25, 0.125]], [10, 20, 30, 40, 50, 60]), points=3)


PERPLEXITY = Perplexity(17.9047, 40_920, "wiki-sample, 40 windows x 1024", "float32")


def tags(html: str) -> set[str]:
    return set(re.findall(r"<(\w+)", html))


# --- text -----------------------------------------------------------------------------------------------------------


def lines_of(result: object) -> list[str]:
    return [" ".join(line.split()) for line in repr(result).splitlines()]


def test_each_result_is_a_table_and_what_it_is_of(plan: Plan, table: Profile, cliffs: Cliffs, found: Frontier) -> None:
    lines = lines_of(plan)
    assert lines[0] == "layer q k v o gate up down kept loss"
    assert lines[2].startswith("0 - - - - - r 24 ")
    assert lines[-1] == "certificate optimal: loss 0.1, bound 0.1, gap 0"
    lines = lines_of(table)
    assert (lines[0], lines[3]) == ("profile test: NVIDIA Test GPU", "linear bf16 65 0 1.0 µs 2.0 µs")
    lines = lines_of(cliffs)
    assert lines[2] == "odd 32 2.00x multiples of 8 no"
    assert lines[-2].startswith("56 collapsed dims, the worst 65 (2.00x the latency of 72); ")
    assert lines[-1] == "period 8; differences under 6.0% are noise"
    assert lines_of(found)[0] == "frontier of tiny, kfac, NVIDIA Test GPU"
    assert "3 points, 3 of them proved to lose least for their parameters" in lines_of(found)
    assert lines_of(PERPLEXITY)[2:] == ["17.905 40,920 float32", "wiki-sample, 40 windows x 1024"]
    assert str(PERPLEXITY) == "17.905 (wiki-sample, 40 windows x 1024; 40,920 tokens predicted, float32)"


def test_rich_prints_the_same_table(plan: Plan) -> None:
    console = Console(width=100, force_terminal=False)
    with console.capture() as captured:
        console.print(with_measured(plan, model=HOSTILE))
    assert HOSTILE in captured.get()


# --- HTML -----------------------------------------------------------------------------------------------------------


def test_each_result_is_a_table_in_a_notebook(plan: Plan, table: Profile, cliffs: Cliffs, found: Frontier) -> None:
    for result in (plan, table, cliffs, found, PERPLEXITY):
        assert tags(result._repr_html_()) >= {"table", "thead", "tbody", "th", "td"}


def test_markup_in_names_is_escaped(plan: Plan, found: Frontier) -> None:
    hostile = with_measured(found, model=HOSTILE)
    for result in (with_measured(plan, model=HOSTILE), hostile, replace(PERPLEXITY, protocol=HOSTILE)):
        html = result._repr_html_()
        assert "script" not in tags(html)
        assert "&lt;script&gt;alert(1)&lt;/script&gt;[bold]" in html


# --- DataFrames -----------------------------------------------------------------------------------------------------


def test_a_plan_has_a_row_a_weight(plan: Plan) -> None:
    frame = plan.to_dataframe()
    assert len(frame) == len(plan.weights) == 14
    assert int(frame["params"].sum()) == plan.budget.used
    row = frame[frame["weight"] == UP].iloc[0]
    assert (row["layer"], row["kind"], row["form"], row["dim"], row["aligned"]) == (0, "up_proj", "low_rank", 24, True)


def test_the_others_have_a_row_a_measurement_a_dim_a_point(table: Profile, cliffs: Cliffs, found: Frontier) -> None:
    frame = table.to_dataframe()
    assert (len(frame), frame["n"].max(), frame["median_ns"].max()) == (65, 128, 2000.0)
    frame = cliffs.to_dataframe()
    assert (frame["is"] == "collapsed").sum() == len(cliffs.collapsed)
    assert frame.iloc[0].to_dict() == {"dim": 65, "is": "collapsed", "beside": 72, "times": 2.0}
    frame = found.to_dataframe()
    assert list(frame["params"]) == [point.params for point in found.points]
    assert list(frame["latency_ns prefill:1x8"]) == [point.latency_ns[0] for point in found.points]
    assert PERPLEXITY.to_dataframe()["value"].tolist() == [17.9047]


def test_without_pandas_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(GacError) as failure:
        PERPLEXITY.to_dataframe()
    assert str(failure.value) == "pandas is not installed; expected it, for a DataFrame. Run pip install pandas."
