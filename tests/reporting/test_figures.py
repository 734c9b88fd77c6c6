"""Figures of plans, frontiers and cliffs: what stands where, is told apart without colour, is refused."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from rendering import legend
from transformers import LlamaConfig

from gac import plots
from gac.core.errors import GacError, PlanError, ProfileError
from gac.plan.plan import Plan
from gac.profiling.records import Launch, Measurement
from gac.profiling.table import Sweep
from gac_extensions.lab.cliffs import find_cliffs
from gac_extensions.lab.figures import published_heads
from gac_extensions.lab.sweep_figures import figure_of_sweeps
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


def test_rank_and_width_have_axes_of_their_own(make_plan: MakePlan, tiny_config: LlamaConfig, aligned: Plan) -> None:
    gate, up, down = (f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down"))
    plan = make_plan(tiny_config, dict.fromkeys((gate, up, down), ("narrow", 88)) | {DOWN: ("low_rank", 24)})
    panels = plots.figure_of_dims({"ours": plan}, "down_proj").axes
    assert [ax.get_title(loc="left") for ax in panels] == ["down_proj, narrow", "down_proj, low_rank"]
    assert [ax.get_ylabel() for ax in panels] == ["neurons that an MLP keeps", "rank of a pair"]
    for ax, dim, other in zip(panels, (88, 24), ("low_rank", "narrow"), strict=True):
        heights = dict(zip([label.get_text() for label in ax.get_yticklabels()], ax.get_yticks(), strict=True))
        assert {line.get_ydata()[0] for line in ax.lines if line.get_marker() == "o"} == {dim, heights[other]}
        assert dim < heights[other] < heights["dense"]
    with pytest.raises(PlanError, match="form 'heads' of down_proj; expected one of narrow, low_rank"):
        plots.dims({"ours": plan}, "down_proj", form="heads")


def test_every_head_has_a_point_and_published_dims_their_heads(make_plan: MakePlan, tiny_config: LlamaConfig) -> None:
    ax = plots.heads(make_plan(tiny_config, {V: ("latent:1", 5)}))
    points = [(list(line.get_xdata()), list(line.get_ydata())) for line in ax.lines if line.get_marker() in ("o", "s")]
    assert points == [([0, 1, 2, 3], [16] * 4), ([], []), ([0, 1], [16, 16]), ([2, 3], [5, 5])]
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
    with pytest.raises(PlanError, match="layer 2 of tiny; expected one from 0 to 1"):
        plots.layer_time({"ours": aligned}, profile(shapes()), PREFILL, layer=2)
    with pytest.raises(PlanError, match="plan ours, whose weights share their first GEMMs"):
        plots.layer_time({"ours": with_recipe(aligned, fuse=True)}, profile(shapes()), PREFILL, layer=1)


def test_chosen_plans_stand_on_their_own_frontier(aligned: Plan) -> None:
    points = whole_range()
    chosen = points.plan(len(points.points) - 2)
    star = plots.frontier(points, {"chosen": chosen}).lines[-1]
    assert (star.get_marker(), star.get_xdata()[0]) == ("*", chosen.budget.used / 1e6)
    ax = plots.frontier(points, {"chosen": chosen}, against=PREFILL)
    assert ax.get_xlabel() == "latency of the targeted weights (µs)"
    with pytest.raises(PlanError, match=r"plan a for another .* beside a frontier of tiny"):
        plots.frontier(whole_range(), {"a": with_measured(aligned, model="another", digest="1" * 64)})
    text = replace(MEASURED.calibration, windows=8)
    with pytest.raises(PlanError, match=r"plan a, calibrated on 8 x 1024 tokens of wiki-sample, .* expected 64 x 1024"):
        plots.frontier(whole_range(), {"a": with_measured(aligned, calibration=text)})
    with pytest.raises(GacError, match=r"a frontier against 'chat'; expected one of params, prefill:1x8\."):
        plots.frontier(whole_range(), against="chat")


def test_outcomes_and_alignment_classes_are_drawn_or_refused() -> None:
    ax = plots.prediction([plots.Outcome("kept 0.8", 0.2, 0.25), plots.Outcome("kept 0.6", 0.8, 0.7)])
    assert [list(axis) for axis in ax.lines[-1].get_data()] == [[0.2, 0.8], [0.25, 0.7]]
    assert words(ax) == ["kept 0.8", "kept 0.6"]
    with pytest.raises(GacError, match=r"x: predicted nan, measured 0\.1; expected finite losses"):
        plots.prediction([plots.Outcome("x", float("nan"), 0.1)])
    rows = [measured("linear", 1000 if n % 8 == 0 else 2000, m=8, k=64, n=n) for n in range(64, 257)]
    ax = plots.alignment(profile(rows))
    assert [label.get_text() for label in ax.get_yticklabels()] == ["linear bf16, n"]
    assert words(ax) == ["2.00x*", "2.00x*", "2.00x*", "1.00x", "1.00x", "1.00x"]
    with pytest.raises(ProfileError, match="0 sweeps of test to draw; expected 1 to 40"):
        plots.alignment(profile([]))


NVJET = Launch("nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_TNN", (132, 1, 1), (384, 1, 1), 0)
WIDER = Launch("nvjet_sm90_tst_256x128_64x4_2x1_v_bz_coopA_TNN", (132, 1, 1), (384, 1, 1), 0)
ALIGN1 = Launch(
    "cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_tn_align1>", (64, 1, 1), (128, 1, 1), 0
)


def sweep(scale: float = 1.0, recorded: bool = True) -> Sweep:
    """Steps at 128, 256, ...; misaligned dims twice as slow; another tile beyond 256."""
    dims = np.arange(64, 513)
    ns = scale * 1e4 * np.ceil(dims / 128) * np.where(dims % 8, 2.0, 1.0)
    kernels = [ALIGN1 if dim % 8 else NVJET if dim <= 256 else WIDER for dim in dims]
    launches = tuple((kernel,) if recorded else () for kernel in kernels)
    return Sweep("linear", "bf16", "cold", "n", (("m", 1024), ("k", 4096)), dims, ns, 0.001 * ns, launches)


def drawn(steps: Sweep, dims: tuple[int, int] | None = None) -> Axes:
    return plots.latency(steps, dims=dims, ax=Figure().subplots())


def test_axes_have_units_and_scales() -> None:
    ax = drawn(sweep())
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_yscale()) == ("n, output features", "latency (µs)", "linear")
    assert ax.get_title(loc="left") + ax.get_title() == "linear bf16, m=1024 k=4096"
    assert drawn(sweep(scale=1e4)).get_ylabel() == "latency (ms)"
    low, high = drawn(sweep(), (100, 140)).get_xlim()
    assert (low > 90, high < 150) == (True, True)
    steep = sweep()
    steep.ns[:8] /= 50
    assert drawn(steep).get_yscale() == "log"


def test_classes_differ_by_shape_and_kernel_and_sweet_spots_stand_before_each_edge() -> None:
    assert legend(drawn(sweep())) == [
        "multiples of 8: nvjet sm90",
        *(f"{name}: cutlass sm75 align1" for name in ("odd", "2 x odd", "4 x odd")),
        "sweet spots (all 3)",
    ]
    assert legend(drawn(sweep(recorded=False)))[:2] == ["multiples of 8", "odd"]
    lines = {str(line.get_label()): line for line in drawn(sweep()).lines}
    classes = [line for label, line in lines.items() if "odd" in label]
    assert len({line.get_marker() for line in classes}) == 3
    assert {line.get_markerfacecolor() for line in classes} == {"none"}
    spots = lines["sweet spots (all 3)"]
    assert (list(spots.get_xdata()), list(spots.get_ydata())) == ([128, 256, 384], [10.0, 20.0, 30.0])


@pytest.mark.parametrize(("slowest", "height"), [(1, 0.02), (3, 0.99)])
def test_the_name_of_a_switch_stands_where_fewer_points_are(slowest: int, height: float) -> None:
    steps = sweep()
    steps.ns[-2] *= slowest  # all others, and so those at the switch, are low in the panel
    (words,) = (text for text in drawn(steps).texts if text.get_text() == "to 256x128")
    assert isinstance(words, Annotation)
    assert words.xy[1] == height


def swept(operator: str, dtype: str, axis: str) -> list[Measurement]:
    """16 dims along an axis."""
    sizes = dict.fromkeys({"linear": "mkn", "low_rank": "mkrn", "copy": "n"}[operator], 4096)
    rows = [measured(operator, 1e4, **sizes | {axis: dim}) for dim in range(64, 1088, 64)]
    return [replace(row, dtype=dtype) for row in rows]


def test_the_atlas_has_one_panel_of_each_kind_that_was_measured() -> None:
    kinds = [("low_rank", "bf16", "r"), ("linear", "bf16", "n"), ("linear", "fp8", "k"), ("copy", "bf16", "n")]
    figure = plots.atlas(profile([row for kind in kinds for row in swept(*kind)]))
    titles = [ax.get_title(loc="left") for ax in figure.axes if ax.axison]
    assert titles == ["linear bf16, m=4096 k=4096", "low_rank bf16, m=4096 k=4096 n=4096", "linear fp8, m=4096 n=4096"]
    assert figure.get_suptitle() == "NVIDIA Test GPU, PyTorch 2.11.0, CUDA 13.0"
    with pytest.raises(GacError, match="profile test has no sweep to draw; expected at least 8 dims"):
        plots.atlas(profile([]))
    with pytest.raises(GacError, match="13 sweeps to plot; expected at most 12"):
        figure_of_sweeps([(sweep(), find_cliffs(sweep()))] * 13, "many")


def test_the_longest_legends_of_two_panels_fit_side_by_side() -> None:
    cudnn = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128"
    launches = ((Launch(cudnn, (1, 1, 1), (1, 1, 1), 0),),) * len(sweep())
    long = replace(sweep(), launches=launches)
    figure = figure_of_sweeps([(long, find_cliffs(long))] * 2, "two")
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    boxes = [box.get_window_extent(renderer) for ax in figure.axes if (box := ax.get_legend())]
    assert 0 <= boxes[0].x0 < boxes[0].x1 <= boxes[1].x0 < boxes[1].x1 <= figure.bbox.width


def test_a_figure_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    target, ax = tmp_path / "file" / "one.png", drawn(sweep())
    for path, problem in (
        (target, "cannot be written to .*File exists"),
        (Path("figure.gif"), "ends in '.gif'; expected one of .png, .pdf, .svg"),
        (Path("figure"), "ends in nothing"),
    ):
        with pytest.raises(GacError, match=problem):
            plots.save(ax, path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(GacError, match="Run pip install matplotlib"):
        plots.save(ax, target)
