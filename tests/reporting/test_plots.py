"""Figures of cliffs: what is drawn, how it is told apart without colour, and how it is saved."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from rendering import legend

from gac import plots
from gac.core.errors import GacError
from gac.profiling.cliffs import find_cliffs
from gac.profiling.records import Launch, Measurement
from gac.profiling.table import Profile, Sweep
from gac.reporting.figures.sweeps import figure_of_sweeps
from tests.headers import make_profile

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


def test_every_axis_has_its_unit() -> None:
    ax = drawn(sweep())
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("n, output features", "latency (µs)")
    assert ax.get_title(loc="left") + ax.get_title() == "linear bf16, m=1024 k=4096"
    assert drawn(sweep(scale=1e4)).get_ylabel() == "latency (ms)"


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


def test_a_stretch_of_dims_and_a_logarithmic_scale_for_steep_cliffs() -> None:
    low, high = drawn(sweep(), (100, 140)).get_xlim()
    assert (low > 90, high < 150) == (True, True)
    steps = sweep()
    steps.ns[:8] /= 50
    assert (drawn(steps).get_yscale(), drawn(sweep()).get_yscale()) == ("log", "linear")


def profile(*sweeps: tuple[str, str, str]) -> Profile:
    """16 dims of each operator, dtype and axis."""
    axes = {"linear": ("m", "k", "n"), "low_rank": ("m", "k", "r", "n"), "copy": ("n",)}
    rows = [
        Measurement(operator, dict.fromkeys(axes[operator], 4096) | {axis: dim}, dtype, "cold", 1e4, 10, 10, 1980, True)
        for operator, dtype, axis in sweeps
        for dim in range(64, 1088, 64)
    ]
    return make_profile(rows)


def test_the_atlas_has_one_panel_of_each_kind_that_was_measured() -> None:
    kinds = [("low_rank", "bf16", "r"), ("linear", "bf16", "n"), ("linear", "fp8", "k"), ("copy", "bf16", "n")]
    figure = plots.atlas(profile(*kinds))
    titles = [ax.get_title(loc="left") for ax in figure.axes if ax.axison]
    assert titles == ["linear bf16, m=4096 k=4096", "low_rank bf16, m=4096 k=4096 n=4096", "linear fp8, m=4096 n=4096"]
    assert figure.get_suptitle() == "NVIDIA Test GPU, PyTorch 2.11.0, CUDA 13.0"


def test_too_few_or_too_many_sweeps_for_one_page() -> None:
    with pytest.raises(GacError, match="profile test has no sweep to draw; expected at least 8 dims"):
        plots.atlas(profile())
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
