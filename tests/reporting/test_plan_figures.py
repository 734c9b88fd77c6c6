"""Figures of plans: what stands where, what tells things apart without colour, and what is refused."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from matplotlib import pyplot
from matplotlib.axes import Axes
from rendering import legend
from transformers import LlamaConfig

from gac import plots
from gac.core.errors import GacError, PlanError, ProfileError
from gac.plan.plan import Plan
from gac_extensions.lab.figures import published_heads
from tests.allocation.small_problems import MEASURED, PREFILL, measured, profile
from tests.changed import with_measured, with_recipe
from tests.compression.compressed import MakePlan
from tests.reporting.report_plans import LARGE, whole_range

Q, V, DOWN = (f"model.layers.1.{name}" for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"))


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    pyplot.close("all")


@pytest.fixture
def aligned(make_plan: MakePlan, tiny_config: LlamaConfig) -> Plan:
    return make_plan(tiny_config, {Q: ("low_rank", 16), DOWN: ("low_rank", 24)})


@pytest.fixture
def other(make_plan: MakePlan, tiny_config: LlamaConfig) -> Plan:
    return make_plan(tiny_config, {Q: ("low_rank", 15)})


def words(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.texts]


def test_a_row_a_layer_and_a_column_a_projection(aligned: Plan, other: Plan) -> None:
    ax = plots.plan(aligned)
    assert [label.get_text() for label in ax.get_xticklabels()] == ["q", "k", "v", "o", "gate", "up", "down"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["0", "1"]
    assert words(ax) == ["-"] * 7 + ["r 16", "-", "-", "-", "-", "-", "r 24"]
    ax_of_caller = pyplot.figure().subplots()
    assert plots.plan(other, ax=ax_of_caller) is ax_of_caller
    assert words(ax_of_caller)[7] == "r 15*"  # no multiple of 8


def test_560_weights_fit_a_page(make_plan: MakePlan) -> None:
    ax = plots.plan(make_plan(LARGE, {DOWN: ("low_rank", 4096)}))
    assert len(words(ax)) == 560
    assert ax.figure.get_size_inches()[1] < 10


def test_markup_in_a_name_is_shown_as_it_is(aligned: Plan) -> None:
    name = "$\\frac{<b>[bold]"
    named = with_measured(aligned, model=name)
    for ax in (plots.plan(named), plots.heads(named), plots.dims({name: named}, "q_proj")):
        ax.figure.canvas.draw()
    plots.figure_of_dims({name: named}).draw_without_rendering()
    assert name in plots.plan(named).get_title(loc="left") + plots.plan(named).get_title()


def test_dims_are_hollow_where_misaligned_and_on_the_top_line_where_dense(aligned: Plan, other: Plan) -> None:
    ax = plots.dims({"ours": aligned, "_theirs": other}, "q_proj")
    marks = [line for line in ax.lines if line.get_marker() in ("o", "s")]
    top = 1.1 * 16
    assert [line.get_ydata()[0] for line in marks] == [top, 16, top, 15]
    assert [line.get_markerfacecolor() == "none" for line in marks] == [False, False, False, True]
    assert legend(ax)[:2] == ["ours", " _theirs"]
    with pytest.raises(GacError, match="7 plans in one figure; expected 1 to 6"):
        plots.dims({str(i): aligned for i in range(7)}, "q_proj")
    with pytest.raises(PlanError, match="weight 'up' of tiny; expected one of q_proj, k_proj, v_proj, o_proj, gate_"):
        plots.dims({"a": aligned}, "up")


def test_every_key_value_head_has_a_point(make_plan: MakePlan, tiny_config: LlamaConfig) -> None:
    ax = plots.heads(make_plan(tiny_config, {V: ("latent:1", 5)}))
    points = [(list(line.get_xdata()), list(line.get_ydata())) for line in ax.lines if line.get_marker() in ("o", "s")]
    assert points == [([0, 1, 2, 3], [16] * 4), ([], []), ([0, 1], [16, 16]), ([2, 3], [5, 5])]


def test_published_dims_and_how_many_heads_have_them() -> None:
    ax = published_heads()
    assert legend(ax) == ["16 heads: a multiple of 8", "496 heads: these, no multiples of 8"]
    assert words(ax)[0] == "114"


def shapes() -> list[Any]:
    """What the tiny model and its plan run at 8 rows, 1 µs for each weight and 3 µs for the pairs."""
    return [
        *(measured("linear", 1000, m=8, k=k, n=n) for k, n in ((64, 64), (64, 32), (64, 176), (176, 64))),
        measured("low_rank", 3000, m=8, k=64, r=16, n=64),
        measured("low_rank", 3000, m=8, k=176, r=24, n=64),
    ]


def test_a_bar_of_the_dense_layer_and_one_a_plan(aligned: Plan) -> None:
    ax = plots.layer_time({"ours": aligned}, profile(shapes()), PREFILL, layer=1)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["dense", "ours"]
    assert words(ax) == [" 7.0", " 11.0 (1.57x)"]
    assert ax.get_xlabel() == "predicted latency of the targeted weights (µs)"
    assert len({patch.get_hatch() for patch in ax.patches}) == 7
    assert words(plots.layer_time({"ours": aligned}, profile(shapes()), PREFILL)) == [" 14.0", " 18.0 (1.29x)"]
    for plan, layer, message in (
        (aligned, 2, "layer 2 of tiny; expected one from 0 to 1"),
        (with_recipe(aligned, fuse=True), 1, "plan ours, whose weights share their first GEMMs"),
    ):
        with pytest.raises(PlanError, match=message):
            plots.layer_time({"ours": plan}, profile(shapes()), PREFILL, layer=layer)


def test_chosen_plans_stand_on_the_frontier() -> None:
    points = whole_range()
    chosen = points.plan(len(points.points) - 2)
    star = plots.frontier(points, {"chosen": chosen}).lines[-1]
    assert (star.get_marker(), star.get_xdata()[0]) == ("*", chosen.budget.used / 1e6)
    ax = plots.frontier(points, {"chosen": chosen}, against=PREFILL)
    assert ax.get_xlabel() == "latency of the targeted weights (µs)"


def test_what_does_not_belong_on_a_frontier(aligned: Plan) -> None:
    with pytest.raises(PlanError, match=r"plan a for another .* beside a frontier of tiny"):
        plots.frontier(whole_range(), {"a": with_measured(aligned, model="another", digest="1" * 64)})
    text = replace(MEASURED.calibration, windows=8)
    with pytest.raises(
        PlanError, match=r"plan a, calibrated on 8 x 1024 tokens of wiki-sample, no BOS .*; expected 64 x 1024"
    ):
        plots.frontier(whole_range(), {"a": with_measured(aligned, calibration=text)})
    with pytest.raises(GacError, match=r"a frontier against 'chat'; expected one of params, prefill:1x8\."):
        plots.frontier(whole_range(), against="chat")


def test_outcomes_are_drawn_or_refused() -> None:
    ax = plots.prediction([plots.Outcome("kept 0.8", 0.2, 0.25), plots.Outcome("kept 0.6", 0.8, 0.7)])
    assert [list(axis) for axis in ax.lines[-1].get_data()] == [[0.2, 0.8], [0.25, 0.7]]
    assert words(ax) == ["kept 0.8", "kept 0.6"]
    with pytest.raises(GacError, match=r"x: predicted nan, measured 0\.1; expected finite losses"):
        plots.prediction([plots.Outcome("x", float("nan"), 0.1)])


def test_alignment_classes_that_do_not_keep_up_have_an_asterisk() -> None:
    rows = [measured("linear", 1000 if n % 8 == 0 else 2000, m=8, k=64, n=n) for n in range(64, 257)]
    ax = plots.alignment(profile(rows))
    assert [label.get_text() for label in ax.get_yticklabels()] == ["linear bf16, n"]
    assert words(ax) == ["2.00x*", "2.00x*", "2.00x*", "1.00x", "1.00x", "1.00x"]
    with pytest.raises(ProfileError, match="0 sweeps of test to draw; expected 1 to 40"):
        plots.alignment(profile([]))
