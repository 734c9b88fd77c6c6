"""The dense model is as engines run it: weights of one input share a GEMM, whatever a plan does."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gac.allocation.decide import decide
from gac.allocation.frontier import frontier
from gac.allocation.problem import Problem
from gac.allocation.rules import RULES
from gac.core.errors import PlanError
from gac.forms.loss_curves import LossCurve
from gac.forms.planned_sites import as_planned
from gac.models.sites import Site, Weight
from gac.plan.plan import Plan
from gac.plan.recipe import Recipe
from gac.plan.summary import latencies
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


@pytest.mark.parametrize("fuse", [False, "auto", True])
def test_the_dense_model_has_shared_gemms(fuse: Any) -> None:
    plan = decide(_problem(fuse=fuse)).plan
    assert plan.workloads[0].dense_ns == TOGETHER
    assert RULES.get("uniform").decide(_problem(fuse=False, rule="uniform")).plan.workloads[0].dense_ns == TOGETHER


def test_a_plan_is_no_slower_than_shared_gemms() -> None:
    """Two weights at 4 of 6 ranks take 8 µs one by one; the limit is 7 µs, not 12."""
    plan = decide(_problem(budget=1.0, latency={PREFILL: 1.0})).plan
    assert plan.limits[-1].total == TOGETHER
    assert (plan.workloads[0].plan_ns or 0) <= TOGETHER


def test_without_the_shared_shape_it_runs_gemm_by_gemm() -> None:
    problem = _problem()
    problem = replace(problem, profile=profile(rows(8, APART)))
    assert problem.dense.latency_ns == (2 * APART[-1],)


def test_the_summary_and_the_page_say_it() -> None:
    plan = decide(_problem()).plan
    assert plan.workloads[0].plan_ns == 9000
    assert latencies(plan) == ["prefill:1x8: 0.009 ms of 0.007 ms dense (1.286x; 2 measured, 0 interpolated)"]
    tile = next(near for name, _, near in tiles(plan) if name == PREFILL)
    assert tile == "7.0 µs dense"
    marks = charts(Sources(plan, "plan", {}, None, None, None))[-1]["marks"]
    assert [mark.letter for mark in marks] == ["D", "P"]


def test_a_frontier_says_it_and_so_do_its_plans() -> None:
    result = frontier(_problem(budget=1.0), points=5)
    assert result.dense_ns == (TOGETHER,)
    assert result.plan(-1).workloads[0].dense_ns == TOGETHER
    for wrong in ((0,), (7000, 7000), ()):
        with pytest.raises(PlanError, match="frontier states dense_ns"):
            replace(result, dense_ns=wrong)


def test_plans_of_earlier_versions_are_read(tmp_path: Any) -> None:
    plan = decide(_problem()).plan
    older = replace(plan, workloads=(replace(plan.workloads[0], fused_ns=7000),))
    older.save(tmp_path / "older.json")
    assert Plan.load(tmp_path / "older.json") == older
