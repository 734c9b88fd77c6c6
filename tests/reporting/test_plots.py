"""Figures of cliffs: what is drawn, how it is told apart without colour, and how it is saved."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from rendering import legend

from gac.errors import GacError
from gac.profiling.cliffs import find_cliffs
from gac.profiling.records import Header, Launch, Measurement
from gac.profiling.table import Profile, Sweep
from gac.reporting.page import check_figure, save_figure
from gac.reporting.panel import plot_sweep
from gac.reporting.plots import atlas, figure_of_sweeps
from tests.headers import make_header, make_profile

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


def drawn(one: Sweep, dims: tuple[int, int] | None = None) -> Axes:
    return plot_sweep(Figure().subplots(), one, find_cliffs(one), dims)


def test_every_axis_has_its_unit() -> None:
    ax = drawn(sweep())
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("n, output features", "latency (µs)")
    assert ax.get_title(loc="left") + ax.get_title() == "linear bf16, m=1024 k=4096"
    assert drawn(sweep(scale=1e4)).get_ylabel() == "latency (ms)"


def test_the_legend_names_each_class_and_what_ran_there() -> None:
    assert legend(drawn(sweep())) == [
        "multiples of 8: nvjet sm90",
        "odd: cutlass sm75 align1",
        "2 x odd: cutlass sm75 align1",
        "4 x odd: cutlass sm75 align1",
        "sweet spots (all 3)",
    ]


def test_kernels_that_were_not_recorded_are_not_named() -> None:
    assert legend(drawn(sweep(recorded=False)))[:2] == ["multiples of 8", "odd"]


def test_classes_differ_by_shape_and_are_hollow() -> None:
    classes = [line for line in drawn(sweep()).lines if "odd" in str(line.get_label())]
    assert len({line.get_marker() for line in classes}) == 3
    assert {line.get_markerfacecolor() for line in classes} == {"none"}


def test_sweet_spots_stand_on_the_line_before_each_edge() -> None:
    spots = next(line for line in drawn(sweep()).lines if "sweet" in str(line.get_label()))
    assert list(spots.get_xdata()) == [128, 256, 384]
    assert list(spots.get_ydata()) == [10.0, 20.0, 30.0]


def test_a_kernel_switch_is_named_beside_its_edge() -> None:
    assert [text.get_text() for text in drawn(sweep()).texts] == ["to 256x128"]


@pytest.mark.parametrize(("slowest", "height"), [(1, 0.02), (3, 0.99)])
def test_the_name_of_a_switch_stands_where_fewer_points_are(slowest: int, height: float) -> None:
    one = sweep()
    one.ns[-2] *= slowest  # all others, and so those at the switch, are low in the panel
    (words,) = (text for text in drawn(one).texts if text.get_text() == "to 256x128")
    assert isinstance(words, Annotation)
    assert words.xy[1] == height


def test_a_stretch_of_dims_shows_no_others() -> None:
    low, high = drawn(sweep(), (100, 140)).get_xlim()
    assert low > 90
    assert high < 150


def test_steep_cliffs_are_drawn_on_a_logarithmic_scale() -> None:
    one = sweep()
    one.ns[:8] /= 50
    assert (drawn(one).get_yscale(), drawn(sweep()).get_yscale()) == ("log", "linear")


def profile(header: Header, sweeps: list[tuple[str, str, str]]) -> Profile:
    """16 dims of each operator, dtype and axis."""
    axes = {"linear": ("m", "k", "n"), "low_rank": ("m", "k", "r", "n"), "copy": ("n",)}
    rows = [
        Measurement(operator, dict.fromkeys(axes[operator], 4096) | {axis: dim}, dtype, "cold", 1e4, 10, 10, 1980, True)
        for operator, dtype, axis in sweeps
        for dim in range(64, 1088, 64)
    ]
    return make_profile(rows, header)


@pytest.fixture
def header() -> Header:
    return make_header()


def test_the_atlas_has_one_panel_of_each_kind_that_was_measured(header: Header) -> None:
    kinds = [("low_rank", "bf16", "r"), ("linear", "bf16", "n"), ("linear", "fp8", "k"), ("copy", "bf16", "n")]
    figure = atlas(profile(header, kinds))
    titles = [ax.get_title(loc="left") for ax in figure.axes if ax.axison]
    assert titles == ["linear bf16, m=4096 k=4096", "low_rank bf16, m=4096 k=4096 n=4096", "linear fp8, m=4096 n=4096"]
    assert figure.get_suptitle() == "NVIDIA Test GPU, PyTorch 2.11.0, CUDA 13.0"


def test_a_profile_without_sweeps_has_no_atlas(header: Header) -> None:
    with pytest.raises(GacError, match="profile test has no sweep to draw; expected at least 8 dims"):
        atlas(profile(header, []))


def test_the_longest_legends_of_two_panels_fit_side_by_side() -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    cudnn = Launch(
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128", (1, 1, 1), (1, 1, 1), 0
    )
    one = sweep()
    long = replace(one, launches=tuple((cudnn,) for _ in one.dims))
    figure = figure_of_sweeps([(long, find_cliffs(long))] * 2, "two")
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    boxes = [box.get_window_extent(renderer) for ax in figure.axes if (box := ax.get_legend())]
    assert 0 <= boxes[0].x0 < boxes[0].x1 <= boxes[1].x0 < boxes[1].x1 <= figure.bbox.width


def test_too_many_sweeps_for_one_page() -> None:
    found = [(sweep(), find_cliffs(sweep()))] * 13
    with pytest.raises(GacError, match="13 sweeps to plot; expected at most 12"):
        figure_of_sweeps(found, "many")


@pytest.mark.parametrize(("ending", "magic"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("SVG", b"<?xm")])
def test_a_figure_is_saved_as_its_ending_says(ending: str, magic: bytes, tmp_path: Path) -> None:
    target = tmp_path / "new" / f"figure.{ending}"
    save_figure(figure_of_sweeps([(sweep(), find_cliffs(sweep()))], "one"), target)
    assert target.read_bytes().startswith(magic)
    assert list(target.parent.iterdir()) == [target]


def test_a_figure_where_nothing_can_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(GacError) as caught:
        save_figure(figure_of_sweeps([(sweep(), find_cliffs(sweep()))], "one"), tmp_path / "file" / "one.png")
    assert str(caught.value) == (
        f"figure cannot be written to {tmp_path / 'file' / 'one.png'}: File exists; expected a writable path. "
        "Choose another path."
    )


@pytest.mark.parametrize(("name", "shown"), [("figure.gif", "'.gif'"), ("figure", "nothing")])
def test_an_unknown_ending_is_refused(name: str, shown: str) -> None:
    with pytest.raises(GacError) as failure:
        check_figure(Path(name))
    assert str(failure.value) == f"figure {name} ends in {shown}; expected one of .png, .pdf, .svg. Change the ending."


def test_without_matplotlib_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(GacError) as failure:
        check_figure(Path("figure.png"))
    assert str(failure.value) == ("matplotlib is not installed; expected it, for a figure. Run pip install matplotlib.")
