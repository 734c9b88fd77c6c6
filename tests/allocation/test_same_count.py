"""Plans with the same experts in every layer: the best common choice, tried against every other."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gac.allocation.crosscheck import verified
from gac.allocation.decide import decide
from gac.allocation.frontier import frontier
from gac.allocation.problem import Problem
from gac.allocation.resolve import resolve
from gac.allocation.rules import RULES
from gac.core.errors import BudgetError, GacError, PlanError
from gac.forms import form_named
from gac.forms.loss_curves import LossCurve, LossCurves
from gac.forms.planned_sites import as_planned
from gac.models.sites import Site
from gac.plan.costs import COSTS
from gac.plan.evidence import ExpertTokens
from gac.plan.plan import Plan, ProfileUsed
from gac.plan.recipe import Recipe
from gac.schemes import scheme_named
from tests.allocation.small_problems import MEASURED, profile
from tests.allocation.test_expert_counts import expert_sites
from tests.models.small import EXPERTS, small_config
from tests.refused import assert_refused

FORMS, SCHEMES = ("experts", "experts:40", "experts:24"), ("bf16", "w8a16")
SMALLER = 6
"""Experts of a second shape."""


def sites_of(layers: int, smaller: int = 0) -> list[Site]:
    """Layers of 8 experts, and then some of 6."""
    first = as_planned(expert_sites(), ["experts"], fused=False)[0]
    sites = []
    for layer in range(layers + smaller):
        router, stack = (
            replace(weight, name=weight.name.replace("layers.0.", f"layers.{layer}.")) for weight in first.weights
        )
        if layer >= layers:
            router, stack = replace(router, out_features=SMALLER), replace(stack, experts=SMALLER)
        sites.append(replace(first, name=stack.name, layer=layer, weights=(router, stack)))
    return sites


def curves_of(sites: list[Site], seed: int) -> LossCurves:
    """Every form, count and scheme loses by chance, less with more experts."""
    random, by_key = np.random.default_rng(seed), dict[tuple[str, str, str], LossCurve]()
    for site, form, scheme in product(sites, FORMS, SCHEMES):
        stack = site.weights[-1]
        falling = np.sort(random.random(stack.experts + 1))[::-1] + FORMS.index(form) * random.random()
        by_key[form, scheme, stack.name] = LossCurve(falling + SCHEMES.index(scheme) * random.random())
    for site in sites:
        stack = site.weights[-1]
        full = form_named("dense").full(stack)
        by_key["dense", "w8a16", stack.name] = LossCurve(np.full(full + 1, random.random() / 4))
    return LossCurves(by_key)


def problem(seed: int, layers: int = 3, smaller: int = 0, **options: Any) -> Problem:
    sites = sites_of(layers, smaller)
    asked = {"budget": 0.7, "forms": ["experts"], "workloads": [], "refit": "none", "same_count": True} | options
    recipe = Recipe.of(**asked)
    return Problem(sites, curves_of(sites, seed), profile([]), recipe, replace(MEASURED, params=10**6))


def common_choices(sites: list[Site], curves: LossCurves, column: str) -> list[tuple[float, int]]:
    """Loss and cost of every choice that layers of one shape have in common."""
    router, stack = sites[0].weights
    cost, result = COSTS[column].of_choice, []
    plain = scheme_named("bf16")
    options = [(name, dim) for name in FORMS for dim in range(stack.top_k, stack.experts + 1)]
    for (name, dim), scheme in product([*options, ("dense", form_named("dense").full(stack))], SCHEMES):
        form = form_named(name)
        if name == "experts" and dim == stack.experts:
            continue  # the dense one
        of_router = dim if name != "dense" else form.full(router)
        amount = cost(form, scheme_named(scheme), stack, dim) + cost(form, plain, router, of_router)
        lost = [curves.of(form, site.weights[-1], scheme) for site in sites]
        loss = sum(0.0 if curve is None else float(curve.loss[dim]) for curve in lost)
        result.append((loss, amount * len(sites)))
    return result


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("smaller", [0, 2])
@pytest.mark.parametrize("column", ["params", "bytes"])
def test_the_choice_is_the_best_of_all_common_ones(seed: int, smaller: int, column: str, tmp_path: Path) -> None:
    share = {"budget": 0.7} if column == "params" else {"memory": 0.4}
    of = problem(seed, 3, smaller, schemes=SCHEMES, **({"budget": 1.0} | share))
    plan = verified(decide(of))
    limit = plan.limit(column)
    assert limit is not None
    shapes = [sites for sites in (of.sites[:3], of.sites[3:]) if sites]
    tried = product(*(common_choices([*sites], of.curves, column) for sites in shapes))
    least = min(
        sum(loss for loss, _ in chosen) for chosen in tried if sum(amount for _, amount in chosen) <= limit.limit
    )
    assert plan.prediction.loss == pytest.approx(least, rel=1e-12)
    assert plan.certificate.status == "optimal"
    assert [len({choice.becomes for choice in choices}) for choices in plan.experts] == [1] * len(shapes)
    assert sum(site.loss for site in plan.sites) == pytest.approx(least, rel=1e-12)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_alternatives_and_the_frontier_keep_the_same_sizes() -> None:
    of = problem(0, 3, 2, budget=1.0)
    limited = decide(replace(of, recipe=replace(of.recipe, limits=replace(of.recipe.limits, params=0.7)))).plan
    for position in range(len(limited.sites[0].alternatives)):
        assert len({site.alternatives[position].dims for site in limited.sites[:3]}) == 1
    points = frontier(of, points=8)
    assert len(points.points) > 3
    for number in range(len(points.points)):
        plan = points.plan(number)
        assert plan.recipe.space.same_count
        assert [len({choice.becomes for choice in choices}) for choices in plan.experts] == [1, 1]


def test_without_the_option_layers_differ_and_lose_less() -> None:
    same, free = (decide(problem(1, 3, same_count=same)).plan for same in (True, False))
    assert free.prediction.loss < same.prediction.loss
    assert len({choice.becomes for choice in free.experts[0]}) > 1


def test_a_plan_that_was_edited_to_differ_is_refused() -> None:
    plan = decide(problem(1, 3, same_count=False)).plan
    recipe = replace(plan.recipe, space=replace(plan.recipe.space, same_count=True))
    assert_refused(lambda: replace(plan, recipe=recipe), "plan has recipe.space.same_count=True", error=PlanError)


def test_budgets_out_of_reach_are_refused() -> None:
    assert_refused(lambda: decide(problem(0, budget=0.01)), "the limit of parameters", error=BudgetError)


def test_models_without_routed_experts_among_the_targets_are_refused() -> None:
    used = ProfileUsed("NVIDIA Test GPU", "2" * 64, "asked for")
    for model_type, forms in (("mixtral", ["low_rank"]), ("llama", ["low_rank", "narrow"])):
        recipe = Recipe.of(0.8, forms=forms, same_count=True, workloads=[], align=False)
        assert_refused(
            lambda model_type=model_type, recipe=recipe: resolve(recipe, small_config(model_type), profile([]), used),
            f"same_count with forms {', '.join(forms)} for a {model_type} model",
            "the form experts",
            error=PlanError,
        )


def test_rules_for_comparison_refuse_it() -> None:
    recipe = Recipe.of(0.8, rule="uniform", forms=["low_rank"], same_count=True)
    assert_refused(lambda: RULES.get("uniform").check(recipe), "rule uniform with same_count", error=GacError)


def test_the_summary_says_it() -> None:
    of = problem(0, 3, 2)
    plan = decide(replace(of, measured=replace(of.measured, expert_tokens=(ExpertTokens(0, 256, 1, 9),)))).plan
    for layers, dense, choices in zip((3, 2), (EXPERTS, SMALLER), plan.experts, strict=True):
        count, width = choices[0].expert_sizes
        assert f"the same in {layers} layers: {count} of {dense} experts, {width} of 48 neurons each" in plan.summary()
