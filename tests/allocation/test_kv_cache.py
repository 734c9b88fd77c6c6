"""Shorter value vectors in the knapsack, and the KV cache as one more limit."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gac.allocation.decide import decide
from gac.allocation.feasibility import check_reachable
from gac.allocation.problem import Problem
from gac.core.errors import BudgetError, PlanError
from gac.core.workloads import Workload
from gac.forms import form_named
from gac.forms.loss_curves import LossCurve, LossCurves
from gac.forms.planned_sites import as_planned
from gac.models.sites import Site, Weight
from gac.plan.costs import KV_NUMBERS
from gac.plan.recipe import Recipe
from tests.allocation.small_problems import MEASURED, asking, curves_by, profile, rows

HIDDEN, HEADS, GROUPS, HEAD_DIM = 12, 4, 2, 6
FORMS = ("low_rank", "head_dim")
WORKLOAD = Workload.parse("prefill:1x8")


def layer(index: int) -> tuple[Site, ...]:
    """k_proj, v_proj and o_proj of one layer."""
    cached: dict[str, Any] = {"input_group": str(index), "cached": True}
    weights = (
        Weight(f"{index}.k", GROUPS * HEAD_DIM, HIDDEN, **cached),
        Weight(f"{index}.v", GROUPS * HEAD_DIM, HIDDEN, values="out", heads=GROUPS, **cached),
        Weight(f"{index}.o", HIDDEN, HEADS * HEAD_DIM, values="in", heads=HEADS),
    )
    return tuple(Site(weight.name, index, weight.name[-1], (weight,)) for weight in weights)


def falling(full: int, seed: int) -> LossCurve:
    steps = np.random.default_rng(seed).uniform(0.1, 1, full)
    return LossCurve(np.append(np.cumsum(steps)[::-1], 0.0))


def curves_of(sites: Sequence[Site]) -> LossCurves:
    weights = [weight for site in sites for weight in site.weights]
    ranks = {w.name: falling(min(w.out_features, w.in_features), 3 * index) for index, w in enumerate(weights)}
    lengths = {w.name: falling(HEAD_DIM, 3 * index + 1) for index, w in enumerate(weights) if w.values == "in"}
    return curves_by(low_rank=ranks, head_dim=lengths)


def problem(layers: int, fused: bool = False) -> Problem:
    plain = [site for index in range(layers) for site in layer(index)]
    sites = as_planned(plain, FORMS, fused)
    table = profile(rows(8, [10] * 6))
    recipe = Recipe.of(forms=FORMS, workloads=[str(WORKLOAD)], align=False, fuse=fused, refit="none")
    return Problem(sites, curves_of(plain), table, recipe, MEASURED)


Row = tuple[int, float, int]


def every_choice(site: Site, curves: LossCurves) -> list[Row]:
    """(params, loss, numbers in the cache) of every combination."""
    low, short, dense = (form_named(name) for name in ("low_rank", "head_dim", "dense"))
    single = []
    for weight in site.weights:
        ranks = range(1, low.max_useful_dim(weight) + 1)
        cached = dense.cache.numbers(weight, 1)
        options = [(low.params(weight, rank), float(curves.of(low, weight).loss[rank]), cached) for rank in ranks]
        single.append([*options, (weight.params, 0.0, cached)])
    result = [total(parts) for parts in itertools.product(*single)]
    taken = site.joint_weights(short)
    if taken:
        loss = curves.of(short, site.weights[taken[-1]])
        for dim in range(1, HEAD_DIM):
            pairs = [
                (short.params(site.weights[index], dim), 0.0, short.cache.numbers(site.weights[index], dim))
                for index in taken
            ]
            rest = [single[index] for index in range(len(single)) if index not in taken]
            result += [total((*parts, *pairs, (0, float(loss.loss[dim]), 0))) for parts in itertools.product(*rest)]
    return result


def total(parts: tuple[Row, ...]) -> Row:
    params, loss, cached = zip(*parts, strict=True)
    return sum(params), sum(loss), sum(cached)


def undominated(result: list[Row]) -> set[tuple[int, float, int]]:
    rounded = {(params, round(loss, 9), cached) for params, loss, cached in result}
    return {each for each in rounded if not any(other != each and all(np.less_equal(other, each)) for other in rounded)}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("budget", "kv_cache"), [(0.8, 0.75), (0.5, 0.9), (1.0, 0.6), (0.4, 1.0)])
def test_the_choice_is_the_best_of_all(budget: float, kv_cache: float, fused: bool) -> None:
    of = problem(2, fused)
    plan = decide(asking(of, budget, kv_cache=kv_cache)).plan
    cache, total_cached = plan.limit(KV_NUMBERS), 2 * 2 * GROUPS * HEAD_DIM
    assert cache is not None
    assert plan.kv_numbers == (cache.used, cache.total) == (cache.used, total_cached)
    assert cache.used <= cache.limit == int(kv_cache * total_cached)
    sets = [undominated(every_choice(site, of.curves)) for site in of.sites]
    best = min(
        loss
        for params, loss, cached in map(total, itertools.product(*sets))
        if params <= plan.budget.limit and cached <= cache.limit
    )
    assert plan.prediction.loss == pytest.approx(best, abs=1e-7)
    assert plan.certificate.status == "optimal"


def test_a_limit_out_of_reach_says_what_is_in_reach() -> None:
    of = problem(1)
    with pytest.raises(BudgetError, match=r"at least 0\.5833, .* or add a form: latent \(reaches 0\.5417\)\.$"):
        check_reachable(of.sites, asking(of, 1.0, kv_cache=0.5).recipe, of.profile)
    with pytest.raises(BudgetError, match=r"at least 1\.0000, the smallest that forms low_rank can reach"):
        check_reachable(layer(0), asking(of, 1.0, forms=["low_rank"], kv_cache=0.99).recipe, of.profile)
    check_reachable(of.sites, asking(of, 1.0, kv_cache=0.59).recipe, of.profile)


def test_an_edited_plan_is_refused() -> None:
    plan = decide(asking(problem(2), 0.8, kv_cache=0.75)).plan
    budget, cache = plan.limits
    assert "KV cache     36 of 48 numbers a token: 0.7500 kept, 36 allowed" in plan.summary()
    with pytest.raises(PlanError, match="plan states 35 of 48 kv_numbers"):
        replace(plan, limits=(budget, replace(cache, used=cache.used - 1)))
    index = next(index for index, site in enumerate(plan.sites) if site.weights[0].form == "head_dim")
    site = plan.sites[index]
    v, o = site.weights
    longer = replace(o, dim=o.dim + 1)
    torn = replace(site, weights=(v, longer), params=v.params + longer.params)
    with pytest.raises(PlanError, match="one form and dim for all weights that it shortens together"):
        replace(plan, sites=(*plan.sites[:index], torn, *plan.sites[index + 1 :]))
