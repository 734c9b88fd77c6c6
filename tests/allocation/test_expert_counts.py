"""Plans of how many experts each layer keeps, on made-up curves."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gac.allocation.decide import decide
from gac.allocation.problem import Problem
from gac.allocation.resolve import speed_defaults
from gac.core.errors import PlanError, ProfileError
from gac.forms import check_choice, form_named
from gac.forms.loss_curves import LossCurve
from gac.forms.planned_sites import as_planned, check_forms_fit, targeted_sites
from gac.models.sites import Site
from gac.plan.choices import check_site
from gac.plan.costs import COSTS
from gac.plan.recipe import Recipe
from gac.schemes import scheme_named, scheme_of
from tests.allocation.small_problems import MEASURED, PREFILL, curves_by, measured, profile
from tests.changed import changed_recipe
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


def test_only_that_form_takes_a_router_or_experts() -> None:
    weights = expert_sites()[0].weights
    for name in ("low_rank", "narrow", "head_dim", "skip", "heads", "narrow_pair", "latent"):
        assert not any(map(form_named(name).applies_to, weights))
    assert all(map(FORM.applies_to, weights))


def test_schemes_with_a_storage_take_experts_that_share_no_scale_and_no_router() -> None:
    router, stack = expert_sites()[0].weights
    for name in ("w4a16", "w2a16", "w8a16", "fp8", "w8a8", "nvfp4a16"):
        scheme = scheme_named(name)
        assert scheme.applies_to(stack)
        assert not scheme.applies_to(router)
        assert scheme_of(scheme, router).name == "bf16"
    assert not scheme_named("fp8_block").applies_to(stack)  # scales of 128 rows


def test_bytes_are_those_of_real_matrices() -> None:
    _, stack = expert_sites()[0].weights
    narrow = form_named("experts:32")
    matrices = narrow.latency.matrices(stack, 5)
    assert matrices == ((5 * 2 * 32, 64), (5 * 64, 32))
    amount = COSTS["bytes"].of_choice
    assert amount(narrow, scheme_named("bf16"), stack, 5) == 2 * narrow.params(stack, 5)
    scales = 2 * (5 * 2 * 32 + 5 * 64)
    assert amount(narrow, scheme_named("fp8"), stack, 5) == narrow.params(stack, 5) + scales


def test_limits_of_latency_with_experts_in_a_scheme_need_a_table_that_has_them() -> None:
    sites = as_planned(expert_sites(), ["experts"], fused=False)
    shape = {"m": 8, "e": EXPERTS, "t": 2, "k": 64, "n": EXPERT_NEURONS}
    table = profile([measured("experts", 1000, **shape), measured("linear", 10, m=8, k=64, n=EXPERTS)])
    recipe = Recipe.of(0.8, forms=["experts"], schemes=["bf16", "w8a16"], workloads=[PREFILL], align=False)
    assert speed_defaults(recipe, sites, table).limits.latency == {}
    limited = changed_recipe(recipe, latency=1.0)
    assert_refused(
        lambda: speed_defaults(limited, sites, table),
        f"a limit of latency for {PREFILL} with scheme w8a16, which the profile does not have",
        error=ProfileError,
    )


def test_a_plan_with_a_router_in_a_scheme_is_refused() -> None:
    plan = decide(problem({"cheap": 1.0, "dear": 3.0})).plan
    first = plan.sites[0]
    router, stack = first.weights
    assert_refused(
        lambda: check_site(replace(first, weights=(replace(router, scheme="w8a16"), stack))),
        "site model.layers.0.mlp.experts has model.layers.0.mlp.gate in w8a16",
        "a scheme that takes the weight",
        error=PlanError,
    )


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


def test_groups_of_experts_lose_as_many_each() -> None:
    site = expert_sites("deepseek_v3")[0]
    stack = site.weights[1]
    assert (stack.expert_groups, stack.chosen_groups, stack.top_k) == (2, 1, 2)
    assert (FORM.least(stack), FORM.multiple(stack)) == (4, 2)  # a token takes two of one group
    for dim in (2, 5):
        said = "model.layers.1.mlp.experts has experts dim {}; expected a dim from 4 to 8 that is a multiple of 2"
        assert_refused(
            lambda dim=dim: check_choice(stack, "experts", dim), f"weight {said.format(dim)}", error=PlanError
        )
    curve = LossCurve(np.arange(EXPERTS, -1, -1.0))
    recipe = Recipe.of(0.7, forms=["experts"], workloads=[], refit="none")
    of = Problem([site], curves_by(experts={stack.name: curve}), profile([]), recipe, replace(MEASURED, params=10**6))
    assert {*of.candidates(["params"])[0].dims[:, 1].tolist()} == {4, 6, form_named("dense").full(stack)}
    assert decide(of).plan.weights[1].dim == 4  # of 8, as 5 would be in the budget too


@pytest.mark.parametrize("model_type", ["llama4_text", "minimax_m2", "llama"])
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
