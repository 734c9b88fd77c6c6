"""A frontier over the KV cache: latents at every rank, whose pairs may have more parameters than the dense weight."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gac.allocation.decide import decide
from gac.allocation.frontier import Frontier, check_limited, frontier
from gac.allocation.problem import Problem
from gac.core.errors import BudgetError, PlanError
from gac.core.operations import batched_gemm
from gac.forms import form_named
from gac.forms.loss_curves import LossCurve, WholeModelLoss
from gac.models.sites import Site, Weight
from gac.plan.costs import KV_NUMBERS
from gac.plan.recipe import Recipe
from tests.allocation.small_problems import MEASURED, PREFILL, asking, curves_by, measured, profile, rows
from tests.allocation.test_frontier import bare
from tests.changed import edited
from tests.reporting.rendering import shown

LAYERS, OUT, HIDDEN = 3, 24, 40


def problem() -> Problem:
    """Keys and values of some layers, each of two heads in one group, and what all of them lose together."""
    weights = [Weight(f"{index}.{kind}", OUT, HIDDEN, heads=2, cached=True) for index in range(LAYERS) for kind in "kv"]
    sites = tuple(Site(weight.name, index // 2, weight.name[-1], (weight,)) for index, weight in enumerate(weights))
    ranks = np.arange(OUT + 1)
    latent = {
        each.name: LossCurve(3.0 ** (index - 5) * 0.9**ranks * (ranks < OUT)) for index, each in enumerate(weights)
    }
    curves = replace(curves_by(latent=latent), wholes={"latent": WholeModelLoss("latent", (0.1, 1.0), (0.1, 1.5))})
    recipe = Recipe.of(forms=["latent"], workloads=[], align=False, refit="none")
    return Problem(sites, curves, profile(rows(8, [10] * 6)), recipe, MEASURED)


@pytest.fixture
def result(tmp_path: Path) -> Frontier:
    frontier(problem(), points=9, limit=KV_NUMBERS).save(tmp_path / "frontier.json")
    return Frontier.load(tmp_path / "frontier.json")


def test_every_point_is_the_plan_of_its_limit(result: Frontier) -> None:
    assert len(result.points) == 9
    assert {point.certificate.status for point in result.points} == {"optimal"}
    assert any(point.together > 0.05 for point in result.points)
    for index, point in enumerate(result.points):
        plan = result.plan(index)
        decided = bare(decide(asking(problem(), 1.0, kv_cache=point.asked, latency={})).plan)
        assert plan == replace(decided, certificate=plan.certificate)
        assert plan.prediction.loss == pytest.approx(point.loss, rel=1e-14)
        assert plan.prediction.together == point.together
        assert plan.kv_numbers == (result.amount(point, KV_NUMBERS), LAYERS * 2 * OUT)
        assert plan.kv_numbers[0] <= point.limit
        assert len(plan.certificate.multipliers) == len(plan.limits) == 2


def test_no_point_has_more_parameters_than_the_dense_model(result: Frontier) -> None:
    of = problem()
    assert of.may_outgrow
    assert form_named("latent").can_exceed_dense(of.sites[0].weights[0])
    assert not form_named("low_rank").can_exceed_dense(of.sites[0].weights[0])
    assert any(option.params > site.site.params for site in result.sites for option in site.options)
    assert max(point.params for point in result.points) <= result.dense_params


def lines_of(result: Frontier) -> list[str]:
    (table,) = result.tables()
    return shown(table)[1:]


def test_the_table_says_what_is_left_of_the_cache_and_what_has_no_latency() -> None:
    lines = lines_of(frontier(asking(problem(), 1.0, workloads=["prefill:3x5"]), points=9, limit=KV_NUMBERS))
    assert lines[0] == "kept params KV cache loss perplexity prefill:3x5"
    assert lines[2].split()[:3] == ["1.0000", "5,760", "1.0000"]
    assert "KV cache: of the 144 numbers a token of the dense model" in lines
    timed = [measured("linear", 100, m=8, k=HIDDEN, n=OUT)]
    asked = replace(asking(problem(), 1.0, workloads=[PREFILL]), profile=profile(timed))
    lines = lines_of(frontier(asked, points=9, limit=KV_NUMBERS))
    assert lines[-1] == "-: the profile has no latent"


def test_what_was_edited_is_refused(result: Frontier, tmp_path: Path) -> None:
    result.save(tmp_path / "edited.json")
    index = next(index for index, point in enumerate(result.points) if point.together)
    with edited(tmp_path / "edited.json") as document:
        document["points"][index]["together"] += 1
    with pytest.raises(PlanError, match=f"point {index} states"):
        Frontier.load(tmp_path / "edited.json")


def test_a_limit_of_latency_beside_the_parameters_can_be_met_at_every_point() -> None:
    """The fastest latents have more parameters than the dense weights, so that not all weights can have them."""
    timed = [measured("linear", 100, m=8, k=HIDDEN, n=OUT)]
    for rank in range(1, OUT):
        ns, second = (10 if rank > 19 else 40 if rank < 4 else 200), batched_gemm(1, 8, rank, OUT)
        timed += [measured("linear", ns, m=8, k=HIDDEN, n=rank), measured(second.operator, ns, **second.axes)]
    asked = replace(asking(problem(), 1.0, workloads=[PREFILL]), profile=profile(timed))
    result = frontier(asked, points=20, limit=PREFILL)
    assert result.points[-1].loss < result.points[0].loss
    for index, point in enumerate(result.points):
        assert point.params <= result.dense_params
        assert result.plan(index).certificate.status == "optimal"


def test_a_cache_that_no_form_makes_smaller() -> None:
    expected = "a frontier over kv_numbers with forms low_rank; expected a form that makes the KV cache smaller"
    of = asking(problem(), 1.0, forms=["low_rank"])
    with pytest.raises(BudgetError, match=expected):
        check_limited(of.sites, of.profile, of.recipe, KV_NUMBERS)
