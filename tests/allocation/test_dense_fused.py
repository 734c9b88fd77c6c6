"""Beside the dense model GEMM by GEMM stands the one whose weights share GEMMs: what nothing is lost for."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gac.allocation.decide import decide
from gac.allocation.frontier import frontier
from gac.allocation.problem import Problem
from gac.allocation.rules import RULES
from gac.core.errors import PlanError
from gac.core.io import to_json
from gac.forms.loss_curves import LossCurve
from gac.forms.planned_sites import as_planned
from gac.models.sites import Site, Weight
from gac.plan.plan import Plan
from gac.plan.recipe import Recipe
from gac.plan.summary import latencies
from gac.reporting.frontier import plot_frontier
from gac.reporting.report.charts import charts
from gac.reporting.report.render import tiles
from gac.reporting.report.sources import Sources
from tests.allocation.small_problems import MEASURED, PREFILL, SIDE, curves_by, measured, profile, rows

SITES = tuple(
    Site(f"site{index}", 0, kind, (Weight(f"site{index}", SIDE, SIDE, input_group="x"),))
    for index, kind in enumerate("qk")
)
CURVE = LossCurve(np.array([8.0, 8.0, 4.0, 2.0, 1.0, 0.5, *[0.0] * (SIDE - 5)]))
APART, TOGETHER = [1000, 2000, 3000, 4000, 5000, 6000], 7000


def _problem(**asked: Any) -> Problem:
    """Two weights of one input: each takes 6 µs by itself, both together 7 µs."""
    table = profile([*rows(8, APART), measured("linear", TOGETHER, m=8, k=SIDE, n=2 * SIDE)])
    plain = {"forms": ["low_rank"], "workloads": [PREFILL], "align": False, "refit": "none", "slack": 0, "budget": 0.8}
    recipe = Recipe.of(**plain | {"latency": "any", "fuse": False} | asked)
    sites = as_planned(SITES, ["low_rank"], recipe.deployment.fuse)
    return Problem(sites, curves_by(low_rank={site.name: CURVE for site in SITES}), table, recipe, MEASURED)


def _stored(plan: Plan, **changes: Any) -> Plan:
    return replace(plan, workloads=(replace(plan.workloads[0], **changes),))


@pytest.mark.parametrize(("fuse", "dense"), [(False, 12000), ("auto", 12000), (True, 7000)])
def test_a_plan_says_what_the_dense_model_takes_with_shared_gemms(fuse: Any, dense: int) -> None:
    result = decide(_problem(fuse=fuse)).plan.workloads[0]
    assert (result.dense_ns, result.fused_ns) == (dense, TOGETHER)
    assert RULES.get("uniform").decide(_problem(fuse=False, rule="uniform")).plan.workloads[0].fused_ns == TOGETHER


def test_the_summary_and_the_page_set_a_plan_beside_both() -> None:
    plan = decide(_problem()).plan
    assert plan.workloads[0].plan_ns == 9000
    assert latencies(plan) == [
        "prefill:1x8: 0.009 ms of 0.012 ms dense (0.750x; 2 measured, 0 interpolated)",
        "prefill:1x8: 0.009 ms of 0.007 ms dense, fused (1.286x)",
    ]
    assert "latency      prefill:1x8: 0.009 ms of 0.007 ms dense, fused (1.286x)" in plan.summary().splitlines()
    tile = next(near for name, _, near in tiles(plan) if name == PREFILL)
    assert tile == "12.0 µs dense; 1.286x of 7.0 µs dense, fused"
    marks = charts(Sources(plan, "plan", {}, None, None, None))[-1]["marks"]
    assert [mark.letter for mark in marks] == ["D", "F", "P"]
    assert marks[1].words.startswith("F, dense, fused: 7, perplexity")


def test_a_frontier_says_it_and_so_do_its_plans() -> None:
    result = frontier(_problem(budget=1.0), points=5)
    assert result.fused_ns == (TOGETHER,)
    assert result.plan(-1).workloads[0].fused_ns == TOGETHER
    assert "dense, fused, which loses nothing: 0.583x at prefill:1x8" in repr(result)
    lines = {line.get_label(): line.get_xdata() for line in plot_frontier(result, against=PREFILL).lines}
    assert [*lines["dense, fused"]] == [7.0]
    older = replace(result, fused_ns=())
    assert older.plan(-1).workloads[0].fused_ns is None
    assert not any("fused" in line for line in repr(older).splitlines())


def test_files_that_do_not_say_it_are_read(tmp_path: Any) -> None:
    plan, result = decide(_problem()).plan, frontier(_problem(budget=1.0), points=5)
    for record, said, without in (
        (plan, b',\n   "fused_ns": 7000', _stored(plan, fused_ns=None)),
        (result, b',"fused_ns":[7000]', replace(result, fused_ns=())),
    ):
        text = to_json(record, record._indent)
        assert text.count(said) == 1
        (tmp_path / "older.json").write_bytes(text.replace(said, b""))
        assert type(record).load(tmp_path / "older.json") == without


def test_latencies_that_cannot_be_are_refused() -> None:
    plan, result = decide(_problem()).plan, frontier(_problem(budget=1.0), points=5)
    with pytest.raises(PlanError, match=f"plan has {PREFILL}.fused_ns=0"):
        _stored(plan, fused_ns=0)
    for wrong in ((0,), (7000, 7000)):
        with pytest.raises(PlanError, match="frontier states fused_ns"):
            replace(result, fused_ns=wrong)
