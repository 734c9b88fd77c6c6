"""A frontier for people: which points are told, and what is drawn against what."""

from dataclasses import replace

import pytest
from matplotlib.figure import Figure
from rendering import legend, shown

from gac.allocation.frontier import Frontier, frontier
from gac.core.errors import GacError, PlanError
from gac.reporting.frontier import curve, figure_of_frontier, plot_frontier
from tests.allocation.small_problems import DECODE, PREFILL, problem
from tests.reporting.report_plans import LOSSES, SLOPE, rounded, rounding, whole_range


@pytest.fixture
def saved() -> Frontier:
    return whole_range((PREFILL, DECODE))


def lines_of(frontier: Frontier) -> list[str]:
    """The lines below the title."""
    (table,) = frontier.tables()
    return shown(table)[1:]  # type: ignore[arg-type]


def test_points_from_dense_down_a_dozen_at_most(saved: Frontier) -> None:
    assert lines_of(saved) == [
        "kept params loss perplexity prefill:1x8 decode:1@8",
        "───────────────────────────────────────────────────────────",
        "1.0000 288 0.0000 7.39 1.000x 1.000x",
        "0.8333 240 0.7500 15.64 0.833x 2.000x",
        "7 points, 7 of them proved to lose least for their parameters",
        "loss (nats a token) and perplexity predicted on calibration text, 7.39 dense; latency over dense",
        "not shown: 5 smaller points, beyond 3 times the dense perplexity",
    ]
    losses = [[row * (layer + 1) / 50 for row in (8, 4, 2, 1, 0.5)] for layer in range(8)]
    many = frontier(problem(losses, SLOPE))
    assert len(many.points) > 30
    assert len(lines_of(many)) == 2 + 12 + 3


def test_unknown_latencies_and_what_was_limited_are_said() -> None:
    lines = lines_of(frontier(problem([[1.0] * 5], [1] * 6, ["decode:4@8"])))
    assert lines[2:4] == ["1.0000 144 0.0000 7.39 -", "0.1667 24 1.0000 20.09 -"]
    assert "-: the profile lacks shapes for decode:4@8; measure them with gac profile --model " in " ".join(lines)
    lines = lines_of(frontier(problem(LOSSES, SLOPE), limit=DECODE))
    assert "proved to lose least for their latency on decode:1@8" in "\n".join(lines)


def test_bytes_and_bits_where_numbers_are_rounded() -> None:
    by_bytes = frontier(rounding(budget=1.0), points=5, limit="bytes")
    lines = lines_of(by_bytes)
    assert lines[0] == "kept params bytes bits loss perplexity prefill:1x8"
    assert lines[2] == "1.0000 288 576 16.00 0.0000 7.39 1.000x"
    assert lines[3].startswith("1.0000 288 416 11.56 0.2500 9.49 -")
    assert "proved to lose least for their bytes" in "\n".join(lines)
    assert lines[-1] == "-: the profile lacks shapes in w4a16"
    figure = figure_of_frontier(by_bytes, {"half": rounded()})
    assert [title.split(" (")[0] for title in titles(figure)] == ["parameters", "bytes", "prefill:1x8"]
    assert [ax.get_xlabel() for ax in figure.axes if ax.axison][1] == "bytes of the targeted weights (MB)"


def titles(figure: Figure) -> list[str]:
    return [ax.get_title(loc="left") or ax.get_title() for ax in figure.axes if ax.axison]


def test_a_panel_for_parameters_and_one_a_workload(saved: Frontier) -> None:
    figure = figure_of_frontier(saved)
    cut = "(cut at 3x dense: 5 points above)"
    assert titles(figure) == [f"{name} {cut}" for name in ("parameters", "prefill:1x8", "decode:1@8")]
    assert [ax.get_xlabel() for ax in figure.axes if ax.axison] == [
        "parameters of the targeted weights (millions)",
        *["latency of the targeted weights (µs)"] * 2,
    ]
    assert figure.get_suptitle() == "tiny, kfac, NVIDIA Test GPU"
    lacking = frontier(problem([[1.0] * 5], [1] * 6, [PREFILL, "decode:4@8"]))
    assert titles(figure_of_frontier(lacking)) == ["parameters", "prefill:1x8"]


def test_points_stand_where_they_are_and_are_hollow_if_not_proved(saved: Frontier) -> None:
    params, prefill, _ = figure_of_frontier(saved).axes[:3]
    assert [ax.lines[0].get_linestyle() for ax in (params, prefill)] == ["-", "None"]
    assert legend(params) == ["least loss for each limit", "dense, 7.39"]
    assert legend(prefill) == ["the same choices, limited in parameters", "dense, 7.39"]
    line, dense = prefill.lines
    assert [list(axis) for axis in line.get_data()] == [[0.1, 0.12], [point.perplexity for point in saved.points[-2:]]]
    assert (list(dense.get_xdata()), list(dense.get_ydata())) == ([0.12], [saved.dense_perplexity])
    last = saved.points[-1]
    open_end = replace(last, certificate=replace(last.certificate, status="feasible"))
    ax = plot_frontier(replace(saved, points=(*saved.points[:-1], open_end)))
    assert legend(ax) == ["least loss for each limit", "not proved in time", "dense, 7.39"]
    assert ax.lines[1].get_markerfacecolor() == "white"


def test_another_frontier_of_the_same_model_is_drawn_where_its_costs_are_known(saved: Frontier) -> None:
    by_bytes = frontier(rounding(budget=1.0), points=5, limit="bytes")
    plain = frontier(rounding(budget=1.0, schemes=("bf16",)), points=7)
    params, size, prefill = figure_of_frontier(by_bytes, others={"without schemes": plain}).axes[:3]
    for ax, against in ((params, "params"), (size, "bytes"), (prefill, PREFILL)):
        assert legend(ax)[-1] == "without schemes"
        assert len(ax.lines[-1].get_xdata()) == len(curve(plain, against)) > 1
    assert [ax.lines[-1].get_linestyle() for ax in (params, size)] == ["-", "None"]
    other = replace(saved, measured=replace(saved.measured, model="another", digest="1" * 64))
    with pytest.raises(PlanError, match=r"frontier theirs for another .* beside a frontier of tiny"):
        figure_of_frontier(saved, others={"theirs": other})
    with pytest.raises(GacError, match="7 frontiers in one figure; expected 1 to 6"):
        figure_of_frontier(saved, others=dict.fromkeys("abcdefg", saved))
