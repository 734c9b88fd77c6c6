"""Plans that skip blocks and drop heads, in every report."""

from pathlib import Path
from textwrap import fill
from typing import Any

import pytest

import gac
import gac.plots
from gac.core.workloads import Workload
from gac.evaluation.shapes import planner_of_shapes
from gac.plan.layers import legend_of
from gac.plan.plan import Plan

PREFILL, DECODE = "prefill:1x1024", "decode:1@1024"


@pytest.fixture(scope="module")
def plan() -> Plan:
    workloads = [Workload.parse(PREFILL), Workload.parse(DECODE)]
    planner = planner_of_shapes("smollm2", workloads, "nvidia-h100-80gb-hbm3", layers=20)
    forms = ("narrow", "heads", "skip")
    return planner.plan(1.0, forms=forms, latency={PREFILL: 0.55, DECODE: 0.75}, fuse="auto", slack=None)


def test_the_page_says_nothing_of_the_next_dim_of_what_is_not_run(plan: Plan, tmp_path: Path) -> None:
    assert {"heads", "skip", "narrow"} <= {weight.form for weight in plan.weights}
    gac.report(plan, tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert "s: 0: an attention or MLP that is skipped" in page
    assert ">s 0<" in page.replace("\n", "")


def test_heads_and_blocks_are_aligned_and_the_legend_fits_below_the_figure(plan: Plan) -> None:
    ax = gac.plots.plan(plan)
    assert plan.aligned_fraction == 1.0
    assert "*" not in {text.get_text()[-1:] for text in ax.texts}
    label = ax.xaxis.label
    assert label.get_text() == fill(f"projection ({legend_of(plan)})", 16 * 7)
    figure: Any = label.get_figure()
    figure.canvas.draw()
    box = label.get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.x1
