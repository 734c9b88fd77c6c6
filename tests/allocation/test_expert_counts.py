"""Plans of how many experts each layer keeps, on made-up curves."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gac.allocation.decide import decide
from gac.allocation.problem import Problem
from gac.core.errors import PlanError
from gac.forms import check_choice, form_named
from gac.forms.loss_curves import LossCurve
from gac.forms.planned_sites import as_planned, check_forms_fit, targeted_sites
from gac.models.sites import Site
from gac.plan.recipe import Recipe
from tests.allocation.small_problems import MEASURED, curves_by, profile
from tests.models.small import EXPERT_NEURONS, EXPERTS, small_config
from tests.refused import assert_refused

FORM = form_named("experts")


def expert_sites(model_type: str = "mixtral", forms: tuple[str, ...] = ("experts",)) -> list[Site]:
    return [site for site in targeted_sites(small_config(model_type), forms) if site.kind == "experts"]


def problem(slopes: dict[str, float], **options: Any) -> Problem:
    """Experts alone are targeted; the one that goes as number i of a layer loses its slope times i more."""
    sites = as_planned(expert_sites(), ["experts"], fused=False)
    gone = np.arange(EXPERTS, -1, -1)
    curves = {
        site.weights[-1].name: LossCurve(slope * gone * (gone + 1) / 2)
        for site, slope in zip(sites, slopes.values(), strict=True)
    }
    asked = {"budget": 0.75, "forms": ["experts"], "workloads": [], "refit": "none"} | options
    return Problem(sites, curves_by(experts=curves), profile([]), Recipe.of(**asked), replace(MEASURED, params=10**6))


def test_experts_are_sites_only_where_a_form_takes_them() -> None:
    assert not expert_sites(forms=("low_rank", "narrow", "skip"))
    site, _ = expert_sites(forms=("low_rank", "experts"))
    router, stack = site.weights
    assert (site.name, site.layer) == ("model.layers.0.mlp.experts", 0)
    assert (router.name, router.params) == ("model.layers.0.mlp.gate", EXPERTS * 64)
    assert stack.params == EXPERTS * 3 * EXPERT_NEURONS * 64


def test_only_that_form_and_no_scheme_takes_a_router_or_experts() -> None:
    weights = expert_sites()[0].weights
    for name in ("low_rank", "narrow", "head_dim", "skip", "heads", "narrow_pair", "latent"):
        assert not any(map(form_named(name).applies_to, weights))
    assert all(map(FORM.applies_to, weights))


def test_parameters_and_modules_of_a_count() -> None:
    router, stack = expert_sites()[0].weights
    assert [FORM.params(weight, 5) * EXPERTS for weight in (router, stack)] == [5 * router.params, 5 * stack.params]
    assert [str(FORM.module(weight, 5)) for weight in (router, stack)] == [
        "Router(experts=5)",
        "Experts(experts=5, width=48)",
    ]


@pytest.mark.parametrize("dim", [1, 9])
def test_a_token_keeps_its_number_of_experts(dim: int) -> None:
    check_choice(expert_sites()[0].weights[1], "experts", 2)
    expected = "a dim from 2 to 8"
    assert_refused(
        lambda: check_choice(expert_sites()[0].weights[1], "experts", dim),
        f"weight model.layers.0.mlp.experts has experts dim {dim}; expected {expected}",
        error=PlanError,
    )


@pytest.mark.parametrize("model_type", ["granitemoe", "glm4_moe", "minimax_m2", "llama"])
def test_models_whose_experts_cannot_go_are_refused(model_type: str) -> None:
    sites = targeted_sites(small_config(model_type), ["experts"])
    assert_refused(
        lambda: check_forms_fit(sites, ["experts"], model_type),
        f"form experts, which fits no weight of a {model_type} model; expected one of dense, low_rank",
        error=PlanError,
    )


def test_counts_of_all_layers_are_chosen_together() -> None:
    plan = decide(problem({"cheap": 1.0, "dear": 3.0})).plan
    counts = [[choice.dim for choice in site.weights] for site in plan.sites]
    assert counts == [[5, 5], [7, 7]]  # 6 + 3 is the least at which 4 of 16 are gone
    assert plan.prediction.loss == pytest.approx(9.0)
    stated = 3 * EXPERT_NEURONS * 64 + 64
    assert (plan.size.used, plan.size.total) == (12 * stated, 16 * stated)


def test_the_smallest_count_is_that_of_a_token() -> None:
    plan = decide(problem({"cheap": 1.0, "dear": 1.0}, budget=0.25)).plan
    assert {choice.dim for choice in plan.weights} == {2}
