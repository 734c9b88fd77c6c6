"""Every point of a frontier is the choice that a plan for its limit would be."""

import re
from collections.abc import Callable
from dataclasses import replace
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gac.allocation.decide import decide
from gac.allocation.frontier import Frontier, check_limited, frontier
from gac.allocation.problem import Problem
from gac.core.errors import BudgetError, PlanError, ProfileError
from gac.core.operations import batched_gemm
from gac.forms import form_named
from gac.forms.loss_curves import LossCurve, WholeModelLoss
from gac.models.sites import Site, Weight
from gac.plan.costs import COSTS, KV_NUMBERS
from gac.plan.plan import Plan
from gac.plan.recipe import Recipe
from tests.allocation.small_problems import (
    DECODE,
    MEASURED,
    PREFILL,
    SIDE,
    asking,
    curves_by,
    measured,
    problem,
    profile,
    rows,
)
from tests.changed import edited
from tests.reporting.rendering import shown
from tests.reporting.report_plans import rounding

FALLING = st.lists(st.integers(0, 100), min_size=5, max_size=5).map(lambda row: sorted(row, reverse=True))
PROBLEMS = st.builds(
    lambda rows, latencies: problem([[loss / 8 for loss in row] for row in rows], latencies),
    st.lists(FALLING, min_size=1, max_size=4),
    st.lists(st.integers(1, 50), min_size=6, max_size=6),
)
LATENCIES = [10, 20, 30, 40, 50, 60]
TWO = problem([[8, 4, 2, 1, 0.5], [6, 3, 1.5, 0.75, 0.375]], LATENCIES)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "frontier.json"
    frontier(TWO, points=5).save(path)
    return path


# --- the choices ----------------------------------------------------------------------------------------------------


def test_points_from_the_smallest_reachable_to_dense() -> None:
    result = frontier(TWO, points=5)
    assert [(point.asked, point.limit, point.params, point.loss) for point in result.points] == [
        (0.166667, 48, 48, 14.0),
        (0.375, 108, 96, 7.0),
        (0.583333, 167, 144, 3.5),
        (0.791666, 227, 216, 1.25),
        (1.0, 288, 288, 0.0),
    ]
    assert {(point.certificate.status, point.certificate.gap) for point in result.points} == {("optimal", 0.0)}


def test_a_point_keeps_what_is_fused(tmp_path: Path) -> None:
    """Pairs of ranks are faster fused, the two dense weights by themselves."""
    weights = tuple(Weight(f"site{index}", SIDE, SIDE, input_group="x") for index in range(2))
    shared = [measured("linear", 9 if n < 2 * SIDE else 200, m=8, k=SIDE, n=n) for n in range(2, 25) if n != SIDE]
    table = profile([*rows(8, LATENCIES), *shared, *(measured("linear", 1, m=8, k=r, n=SIDE) for r in range(1, 6))])
    site = Site("both", 0, "q_proj", weights, fused=(0, 1), fusion_optional=True)
    chosen = replace(TWO, sites=(site,), profile=table)
    frontier(asking(chosen, 1.0, fuse="auto", workloads=[PREFILL]), points=3).save(tmp_path / "chosen.json")
    result = Frontier.load(tmp_path / "chosen.json")
    assert [result.plan(index).sites[0].shared for index in range(3)] == [True, True, False]


@settings(max_examples=settings.default.max_examples // 2)
@given(PROBLEMS, st.integers(2, 12), st.sampled_from(["params", PREFILL, DECODE]))
def test_every_point_is_the_decision_for_its_limit(small: Problem, points: int, limit: str) -> None:
    result = frontier(small, points=points, limit=limit)
    assert [point.loss for point in result.points] == sorted({point.loss for point in result.points}, reverse=True)
    assert len(result.points) <= points
    assert result.points[-1].loss == 0.0
    for point in result.points:
        budget, latency = (point.asked, {}) if limit == "params" else (1.0, {limit: point.asked})
        decided = decide(asking(small, budget, latency=latency)).plan
        assert point.loss == decided.prediction.loss
        assert point.certificate.status == decided.certificate.status == "optimal"


def test_perplexity_is_the_dense_one_times_the_predicted_change_up_to_e_709() -> None:
    result = frontier(TWO, points=3)
    assert result.dense_perplexity == result.points[-1].perplexity == exp(2.0)
    assert result.points[0].perplexity == pytest.approx(exp(2.0 + 14.0))
    huge = frontier(problem([[2000.0, 1, 1, 1, 1]], [1] * 6), points=2)
    assert [point.perplexity for point in huge.points] == [exp(709), exp(2)]


# --- a plan from a point --------------------------------------------------------------------------------------------


def bare(plan: Plan) -> Plan:
    """Without the choices that no point makes: a frontier does not keep them."""
    return replace(plan, any_latency=None, sites=tuple(replace(site, alternatives=()) for site in plan.sites))


@pytest.mark.parametrize("limit", ["params", PREFILL])
def test_a_point_makes_the_plan_of_its_limit(limit: str) -> None:
    result = frontier(TWO, points=5, limit=limit)
    asked, plan = result.points[1].asked, result.plan(1)
    of = asking(TWO, asked) if limit == "params" else asking(TWO, 1.0, latency={limit: asked})
    decided = bare(decide(of).plan)
    assert plan == replace(decided, certificate=plan.certificate)
    assert result.plan(1 - len(result.points)) == plan
    assert result.plan(-len(result.points)).recipe.limits != plan.recipe.limits
    assert (plan.certificate.status, plan.certificate.value) == ("optimal", decided.certificate.value)


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *[({"points": points}, f"{points!r} points; expected a whole number") for points in (1, 2.5, True, "ten")],
        ({"limit": "decode:8@8"}, f"a frontier over 'decode:8@8'; expected {', '.join(COSTS)} or one of the"),
        ({"limit": "memory"}, r"a frontier over 'memory'; .* Did you mean 'bytes'\?"),
    ],
)
def test_what_no_frontier_can_be_made_of(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BudgetError, match=words):
        frontier(TWO, **options)


def test_a_latency_that_the_profile_lacks() -> None:
    lacking = problem([[1.0] * 5], [1] * 6, ["decode:4@8"])
    check_limited(lacking.sites, lacking.profile, lacking.recipe, "params")
    with pytest.raises(ProfileError, match="lacks the latency of site0 for decode:4@8; expected known latencies"):
        check_limited(lacking.sites, lacking.profile, lacking.recipe, "decode:4@8")


# --- on disk --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", ["params", DECODE])
def test_a_frontier_is_read_back_equal(limit: str, tmp_path: Path) -> None:
    result = frontier(TWO, limit=limit)
    result.save(tmp_path / "new" / "frontier.json")
    assert Frontier.load(tmp_path / "new" / "frontier.json") == result
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["frontier.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(extra=1), "extra: Unexpected keyword argument"),
        (lambda d: d["points"][0].update(params="48"), "points.0.params: Input should be a valid integer"),
        (lambda d: d.update(schema_version=1), "frontier has schema version 1"),
        (lambda d: d.update(limit="decode:4@8"), "frontier limits 'decode:4@8'"),
        (lambda d: d.update(points=[]), "frontier has no points"),
        (lambda d: d["sites"][0]["options"][0].update(dims=[2]), "an option of site site0 states 24 parameters"),
        (lambda d: d["sites"][0]["options"][0].update(forms=["magic"]), "form 'magic' is unknown"),
        (lambda d: d["sites"][0]["options"][0].update(forms=[]), "an option of site site0 has 0 forms"),
        (lambda d: d["points"][1].update(params=1), "point 1 states params 1"),
        (lambda d: d["points"][1].update(loss=1.0), "point 1 states loss 1.0"),
        (lambda d: d["points"][1].update(latency_ns=[1, 1]), "point 1 states latency_ns (1, 1)"),
        (lambda d: d["points"][1].update(choice=[9, 0]), "point 1 chooses options that are not there"),
        (lambda d: d["points"][1].update(limit=95), "point 1 states limit 95; expected 108"),
        (lambda d: d["points"][1].update(asked=0.2), "point 1 states limit 108; expected 57"),
        (lambda d: d["points"][1].update(perplexity=1.0), "point 1 states perplexity 1.0; expected"),
        (lambda d: d["points"][1]["certificate"].update(value=9.0), "point 1 states a proof of 9.0"),
        (lambda d: d["points"].reverse(), "points at 288 and 227 lose 0 and 1.25"),
    ],
)
def test_an_edited_frontier_is_refused(saved: Path, change: Callable[[dict[str, Any]], None], message: str) -> None:
    with edited(saved) as document:
        change(document)
    with pytest.raises(PlanError, match=re.escape(message)):
        Frontier.load(saved)


# --- bytes ----------------------------------------------------------------------------------------------------------


def test_memory_is_gone_through_with_schemes_and_a_proof_a_point(tmp_path: Path) -> None:
    of = rounding(budget=1.0)
    result = frontier(of, points=9, limit="bytes")
    assert {point.certificate.status for point in result.points} == {"optimal"}
    assert [result.bytes(point) <= point.limit for point in result.points] == [True] * len(result.points)
    assert result.dense_amount("bytes") == result.bytes(result.points[-1]) == 576
    schemes = {scheme for each in result.sites for option in each.options for scheme in option.schemes}
    assert schemes == {"bf16", "w4a16"}
    result.save(tmp_path / "frontier.json")
    assert Frontier.load(tmp_path / "frontier.json") == result
    for index, point in enumerate(result.points):
        plan = result.plan(index)
        assert (plan.bytes[0], plan.size.limit, plan.size.asked) == (result.bytes(point), point.limit, point.asked)
        assert plan.prediction.loss == decide(rounding(memory=point.asked)).plan.prediction.loss


# --- over the KV cache: latents at every rank, whose pairs may have more parameters than the dense weight ------------

LAYERS, OUT, HIDDEN = 3, 24, 40


def cached() -> Problem:
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
    frontier(cached(), points=9, limit=KV_NUMBERS).save(tmp_path / "frontier.json")
    return Frontier.load(tmp_path / "frontier.json")


def test_every_point_over_the_cache_is_the_plan_of_its_limit(result: Frontier) -> None:
    assert len(result.points) == 9
    assert {point.certificate.status for point in result.points} == {"optimal"}
    assert any(point.together > 0.05 for point in result.points)
    for index, point in enumerate(result.points):
        plan = result.plan(index)
        decided = bare(decide(asking(cached(), 1.0, kv_cache=point.asked, latency={})).plan)
        assert plan == replace(decided, certificate=plan.certificate)
        assert plan.prediction.loss == pytest.approx(point.loss, rel=1e-14)
        assert plan.prediction.together == point.together
        assert plan.kv_numbers == (result.amount(point, KV_NUMBERS), LAYERS * 2 * OUT)
        assert plan.kv_numbers[0] <= point.limit
        assert len(plan.certificate.multipliers) == len(plan.limits) == 2


def test_no_point_has_more_parameters_than_the_dense_model(result: Frontier) -> None:
    of = cached()
    assert of.may_outgrow
    assert form_named("latent").can_exceed_dense(of.sites[0].weights[0])
    assert not form_named("low_rank").can_exceed_dense(of.sites[0].weights[0])
    assert any(option.params > site.site.params for site in result.sites for option in site.options)
    assert max(point.params for point in result.points) <= result.dense_params


def lines_of(result: Frontier) -> list[str]:
    (table,) = result.tables()
    return shown(table)[1:]


def test_the_table_says_what_is_left_of_the_cache_and_what_has_no_latency() -> None:
    lines = lines_of(frontier(asking(cached(), 1.0, workloads=["prefill:3x5"]), points=9, limit=KV_NUMBERS))
    assert lines[0] == "kept params KV cache loss perplexity prefill:3x5"
    assert lines[2].split()[:3] == ["1.0000", "5,760", "1.0000"]
    assert "KV cache: of the 144 numbers a token of the dense model" in lines
    timed = [measured("linear", 100, m=8, k=HIDDEN, n=OUT)]
    asked = replace(asking(cached(), 1.0, workloads=[PREFILL]), profile=profile(timed))
    lines = lines_of(frontier(asked, points=9, limit=KV_NUMBERS))
    assert lines[-1] == "-: the profile lacks shapes in latent"


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
    asked = replace(asking(cached(), 1.0, workloads=[PREFILL]), profile=profile(timed))
    result = frontier(asked, points=20, limit=PREFILL)
    assert result.points[-1].loss < result.points[0].loss
    for index, point in enumerate(result.points):
        assert point.params <= result.dense_params
        assert result.plan(index).certificate.status == "optimal"


def test_a_cache_that_no_form_makes_smaller() -> None:
    expected = "a frontier over kv_numbers with forms low_rank; expected a form that makes the KV cache smaller"
    of = asking(cached(), 1.0, forms=["low_rank"])
    with pytest.raises(BudgetError, match=expected):
        check_limited(of.sites, of.profile, of.recipe, KV_NUMBERS)
