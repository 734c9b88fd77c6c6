"""A frontier over the KV cache: latents at every rank, whose pairs may have more parameters than the dense weight."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gac
from gac.allocation.decide import decide
from gac.allocation.frontier import Frontier, check_limited, frontier
from gac.allocation.problem import Problem
from gac.core.errors import BudgetError, PlanError
from gac.core.operations import batched_gemm
from gac.forms import form_named
from gac.forms.loss_curves import LossCurve, WholeModelLoss
from gac.models.sites import Site, Weight
from gac.plan.costs import BYTES, KV_NUMBERS, PARAMS
from gac.plan.recipe import Recipe
from gac.reporting.frontier import curve, plot_frontier
from gac.schemes import scheme_named
from tests.allocation.small_problems import MEASURED, PREFILL, asking, curves_by, measured, profile, rows
from tests.allocation.test_frontier import bare
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
        assert plan.kv_numbers == (result.kv_numbers(point), LAYERS * 2 * OUT)
        assert plan.kv_numbers[0] <= point.limit
        assert len(plan.certificate.multipliers) == len(plan.limits) == 2


def test_no_point_has_more_parameters_than_the_dense_model(result: Frontier) -> None:
    of = problem()
    assert of.may_outgrow
    assert form_named("latent").can_exceed_dense(of.sites[0].weights[0])
    assert not form_named("low_rank").can_exceed_dense(of.sites[0].weights[0])
    assert any(option.params > site.site.params for site in result.sites for option in site.options)
    assert max(point.params for point in result.points) <= result.dense_params


def test_over_parameters_a_point_says_what_is_lost_together_too() -> None:
    result = frontier(problem(), points=9)
    for index, point in enumerate(result.points):
        plan = decide(asking(problem(), point.asked, latency={})).plan
        assert plan.prediction == result.plan(index).prediction
        assert point.loss == pytest.approx(plan.prediction.loss, rel=1e-14)
    assert any(point.together for point in result.points)


def test_candidates_with_more_parameters_are_compared_by_them_where_bytes_are_limited() -> None:
    of, price = problem(), np.array(0.01)
    weights = [site.weights[0] for site in of.sites]
    curves = of.curves.with_scheme(
        scheme_named("w4a16:8"),
        weights,
        [form_named("dense"), form_named("latent")],
        dict.fromkeys([each.name for each in weights], price),
    )
    rounded = replace(asking(of, 1.0, schemes=["bf16", "w4a16:8"]), curves=curves)
    result, less = (asking(rounded, budget).candidates([PARAMS, BYTES]) for budget in (1.0, 0.99))
    assert [rows.params.tolist() for rows in result] == [rows.params.tolist() for rows in less]
    assert any((rows.params > site.params).any() for rows, site in zip(result, of.sites, strict=True))


def lines_of(result: Frontier) -> list[str]:
    (table,) = result.tables()
    return shown(table)[1:]


def test_the_table_says_what_is_left_of_the_cache_and_what_has_no_latency() -> None:
    lines = lines_of(frontier(asking(problem(), 1.0, workloads=["prefill:3x5"]), limit=KV_NUMBERS))
    assert lines[0] == "kept params KV cache loss perplexity prefill:3x5"
    assert lines[2].split()[:3] == ["1.0000", "5,760", "1.0000"]
    assert "KV cache: of the 144 numbers a token of the dense model" in lines
    timed = [measured("linear", 100, m=8, k=HIDDEN, n=OUT)]
    asked = replace(asking(problem(), 1.0, workloads=[PREFILL]), profile=profile(timed))
    lines = lines_of(frontier(asked, limit=KV_NUMBERS))
    assert lines[-1] == "-: the profile has no latent"


def test_it_is_drawn_and_told_by_its_cache(result: Frontier) -> None:
    assert result.axes() == {PARAMS: result.dense_params, KV_NUMBERS: result.dense_kv_numbers}
    ax = plot_frontier(result, against=KV_NUMBERS)
    assert ax.get_xlabel() == "KV cache (numbers a token)"
    drawn = ax.lines[0].get_xdata()
    assert list(drawn) == [cost for cost, _ in curve(result, KV_NUMBERS)]
    assert drawn[-1] == result.dense_kv_numbers
    assert [row["kv_numbers"] for row in result.rows()] == [result.kv_numbers(point) for point in result.points]
    assert all(one < other for one, other in pairwise(point.limit for point in result.points))


def test_what_was_edited_is_refused(result: Frontier, tmp_path: Path) -> None:
    result.save(tmp_path / "edited.json")
    document = json.loads((tmp_path / "edited.json").read_text())
    index = next(index for index, point in enumerate(result.points) if point.together)
    document["points"][index]["together"] += 1
    (tmp_path / "edited.json").write_text(json.dumps(document))
    with pytest.raises(PlanError, match=f"point {index} states"):
        Frontier.load(tmp_path / "edited.json")


def test_a_limit_of_latency_beside_the_parameters_can_be_met_at_every_point() -> None:
    """The fastest latents have more parameters than the dense weights, so that not all weights can have them."""
    timed = [measured("linear", 100, m=8, k=HIDDEN, n=OUT)]
    for rank in range(1, OUT):
        ns, second = (10 if rank > 19 else 40 if rank < 4 else 200), batched_gemm(1, 8, rank, OUT)
        timed += [measured("linear", ns, m=8, k=HIDDEN, n=rank), measured(second.operator, ns, **second.axes)]
    result = frontier(replace(asking(problem(), 1.0, workloads=[PREFILL]), profile=profile(timed)), limit=PREFILL)
    assert result.points[-1].loss < result.points[0].loss
    for index, point in enumerate(result.points):
        assert point.params <= result.dense_params
        assert result.plan(index).certificate.status == "optimal"


def test_a_form_with_a_width_is_asked_for_each_of_them() -> None:
    weights = (
        Weight("gate", 24, 12, neurons="out", input_group="x"),
        Weight("up", 24, 12, neurons="out", input_group="x"),
        Weight("down", 12, 24, neurons="in", to_residual=True),
    )
    recipe = Recipe.of(forms=["narrow", "narrow_pair"], memory=0.7, workloads=[], align=False, refit="none", latency={})
    curves = curves_by(narrow={"down": LossCurve(0.9 ** np.arange(25) * (np.arange(25) < 24))})
    of = Problem((Site("mlp", 0, "mlp", weights),), curves, profile(rows(8, [10] * 6)), recipe, MEASURED)
    assert not of.may_outgrow
    assert decide(of).plan.size.used <= decide(of).plan.size.limit
    assert frontier(asking(of, 1.0, memory=None), limit=BYTES).points[-1].loss == 0


def test_a_cache_that_no_form_makes_smaller() -> None:
    expected = "a frontier over kv_numbers with forms low_rank; expected a form that makes the KV cache smaller"
    of = asking(problem(), 1.0, forms=["low_rank"])
    with pytest.raises(BudgetError, match=expected):
        check_limited(of.sites, of.profile, of.recipe, KV_NUMBERS)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"value": 7.0}, "states a proof of 7.0 with 2 multipliers; expected"),
        ({"multipliers": [0.0, 0.0, 0.0]}, "with 3 multipliers; expected"),
    ],
)
def test_another_proof_than_of_its_choice_is_refused(
    changed: dict[str, Any], message: str, result: Frontier, tmp_path: Path
) -> None:
    result.save(tmp_path / "edited.json")
    document = json.loads((tmp_path / "edited.json").read_text())
    document["points"][0]["certificate"] |= changed
    (tmp_path / "edited.json").write_text(json.dumps(document))
    with pytest.raises(PlanError, match=message):
        Frontier.load(tmp_path / "edited.json")


def test_a_page_says_what_the_dots_are(result: Frontier, tmp_path: Path) -> None:
    gac.report(result.plan(4), tmp_path / "plan.html", frontier=result)
    page = (tmp_path / "plan.html").read_text("utf-8")
    assert "whose sum of losses is least within one limit on the KV cache" in page
    assert "Perplexity against KV cache" in page
    assert "KV cache (numbers a token)" in page
