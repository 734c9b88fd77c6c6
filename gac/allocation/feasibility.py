"""Checks that limits can be met at all, before anything is measured."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from gac.allocation.candidate_set import CandidateSet
from gac.allocation.candidates import candidates
from gac.allocation.dense import DenseModel
from gac.allocation.dims import first_dim, takes_any_dim
from gac.allocation.knapsack import knapsack
from gac.allocation.latencies import Timing
from gac.allocation.problem import as_knapsack, name_of
from gac.allocation.same_sizes import candidate_sets, without_names
from gac.core.errors import BudgetError
from gac.forms import DENSE, FORMS, form_named, variants_of
from gac.forms.loss_curves import LossCurve, LossCurves
from gac.models.sites import Site
from gac.plan.costs import BYTES, COSTS, KV_NUMBERS, PARAMS, floored
from gac.plan.engines import ENGINES, TRANSFORMERS, Step
from gac.plan.recipe import Recipe, Space
from gac.plan.sizes import size_text
from gac.profiling.table import Profile
from gac.schemes import DEFAULT_SCHEME, scheme_named


def check_reachable(
    sites: Sequence[Site],
    recipe: Recipe,
    profile: Profile,
    steps: Mapping[str, Step] = MappingProxyType({}),
    others: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Refuse a recipe that no choice can meet: limits below the smallest candidates of all sites together.

    Args:
        steps: whole steps of the dense model in the engine, by workload.
        others: what is not targeted, by cost, where errors are to name sizes of the whole model too.

    Raises:
        BudgetError: with the smallest budget, memory or KV-cache limit that can be reached.
        PlanError: no scheme allows any dim of a weight.
    """
    dense, fractions = DenseModel.of(sites, profile, recipe.deployment, steps), recipe.fractions
    in_schemes = f" in schemes {', '.join(recipe.space.schemes)}"
    any_dim = [name for name in recipe.space.schemes if takes_any_dim(scheme_named(name), dense.timing.engine)]
    for cost in (COSTS[name] for name in fractions if name in COSTS and COSTS[name].of_weights):
        space, dense_amount = recipe.space, dense.amount(cost.name)
        if cost.name != BYTES and any_dim:  # all of these have the same dims
            space = replace(space, schemes=(any_dim[0],))
        sets = _without_loss(sites, space, dense.timing, (cost.name,))
        smallest = sum(int(rows.cost(cost.name).min()) for rows in sets)
        option, means, more = (
            ("a budget", "", "forms") if cost.name == PARAMS else (cost.limit, in_schemes, "forms or schemes")
        )
        if smallest > (limit := floored(fractions[cost.name], dense_amount)):
            least = f"{_rounded_up(smallest, dense_amount)}{_size(cost.name, smallest, others)}"
            raise BudgetError(
                f"a limit of {limit:,} of {dense_amount:,} {cost.unit} ({limit / dense_amount:.6g})"
                f"{_size(cost.name, limit, others)}",
                f"at least {smallest:,}, the smallest that forms {_forms(recipe)} can reach{means}",
                f"Ask for {option} of {least} or more, or allow more {more}.",
            )
    if KV_NUMBERS in fractions:
        _check_cache(sites, recipe, dense.amount(KV_NUMBERS))
    if recipe.limits.latency:
        _check_latency(sites, recipe, dense, others)


def _without_loss(
    sites: Sequence[Site], space: Space, timing: Timing, limited: Sequence[str], needed: Sequence[str] = ()
) -> list[CandidateSet]:
    """Candidates on curves without loss, so that the smallest ones are Pareto-optimal; built once for equal sites."""
    sets = {
        key: replace(candidates(site, _flat_curves(site, space), space, timing, limited, needed), site=site.kind)
        for key, site in dict(zip(map(without_names, sites), sites, strict=True)).items()
    }
    return candidate_sets(sites, LossCurves({}), space, lambda site, _: sets[without_names(site)])


def _check_latency(sites: Sequence[Site], recipe: Recipe, dense: DenseModel, others: Mapping[str, int]) -> None:
    columns = [column for column in recipe.fractions if column not in COSTS]
    allowed = dense.allowed(recipe)
    sets = _without_loss(sites, recipe.space, dense.timing, (PARAMS, *columns), columns)
    by_params = [replace(rows, loss=rows.params.astype(np.float64)) for rows in sets]
    instance = as_knapsack(by_params, {column: allowed[column] for column in columns})
    for column, limit in instance.limits.items():
        smallest = sum(int(rows.cost(column).min()) for rows in instance.sets)
        if smallest > limit:
            raise BudgetError(
                f"a latency limit of {recipe.fractions[column]:g} of the dense model for {column.removeprefix('ns:')}",
                f"at least {_rounded_up(smallest + dense.rest_of(column), dense.amount(column))}, the smallest that "
                f"forms {_forms(recipe)} can reach",
                "Raise the limit of latency, or allow more forms.",
            )
    least = knapsack(instance.groups, instance.limits.values(), names=map(name_of, columns))
    smallest = int(least.certificate.lower_bound)
    params = dense.amount(PARAMS)
    if smallest > (limit := floored(recipe.limits.budget, params)):
        no_slower = all(recipe.fractions[column] == 1 for column in columns)
        kept = "with no workload slower than the dense model" if no_slower else f"with latency {recipe.limits.latency}"
        raise BudgetError(
            f"a limit of {limit:,} of {params:,} parameters ({limit / params:.6g}) {kept}",
            f"at least {smallest:,}, the smallest that forms {_forms(recipe)} can reach so",
            f"Ask for a budget of {_rounded_up(smallest, params)}{_size(PARAMS, smallest, others)} or more, or lift "
            "the limit of latency with latency='any' (--latency any).",
        )


def _check_cache(sites: Sequence[Site], recipe: Recipe, dense: int) -> None:
    forms, fraction = recipe.space.forms, recipe.fractions[KV_NUMBERS]
    smallest = _smallest_cache(sites, forms, recipe)
    if smallest <= floored(fraction, dense):
        return
    others = _cache_forms(sites, recipe, smallest)
    raise BudgetError(
        f"a KV-cache limit of {fraction:g}",
        f"at least {smallest / dense:.4f}, the smallest that forms {_forms(recipe)} can reach",
        f"Allow more, or add a form: {others}." if others else "Allow more.",
    )


def check_shrinks_cache(sites: Sequence[Site], recipe: Recipe) -> None:
    """Refuse a frontier over the KV cache with forms that leave it as it is."""
    dense = _smallest_cache(sites, (), recipe)
    if _smallest_cache(sites, recipe.space.forms, recipe) == dense:
        others = _cache_forms(sites, recipe, dense)
        raise BudgetError(
            f"a frontier over {KV_NUMBERS} with forms {_forms(recipe)}",
            f"a form that makes the KV cache smaller: {others or 'none does'}",
            "Add one of these, or limit parameters." if others else "Limit parameters.",
        )


def _cache_forms(sites: Sequence[Site], recipe: Recipe, smallest: int) -> str:
    """List forms that lead to a cache below ``smallest``: first what the engine runs, and of these skip last."""
    forms, dense = recipe.space.forms, _smallest_cache(sites, (), recipe)
    engine = ENGINES.get(str(recipe.deployment.engine), TRANSFORMERS)
    reached = {form: _smallest_cache(sites, (*forms, form.name), recipe) for form in FORMS}
    elsewhere = {form: f"engine {TRANSFORMERS.name}, " * bool(engine.unserved([form.name], ())) for form in FORMS}
    order = sorted(reached, key=lambda form: (elsewhere[form], not form.min_dim, reached[form]))
    smaller = [form for form in order if reached[form] < smallest]
    return ", ".join(f"{form.name} ({elsewhere[form]}reaches {reached[form] / dense:.4f})" for form in smaller)


def _smallest_cache(sites: Sequence[Site], forms: Sequence[str], recipe: Recipe) -> int:
    """Numbers of a token in the smallest cache that these forms can reach, whatever the profile has of their dims."""
    align, gpus = recipe.space.align, recipe.deployment.tensor_parallel
    plain, smallest = scheme_named(DEFAULT_SCHEME), 0
    for weight in (weight for site in sites for weight in site.weights):
        variants = variants_of(map(form_named, forms), weight)
        firsts = [(form, first_dim(form, weight, plain, align, gpus)) for form in variants if form.applies_to(weight)]
        cached = (form.cache.numbers(weight, dim) for form, dim in firsts if dim is not None)
        smallest += min([DENSE.cache.numbers(weight, 1), *cached])
    return smallest


def _forms(recipe: Recipe) -> str:
    return ", ".join(recipe.space.forms) or "dense"


def _size(column: str, amount: int, others: Mapping[str, int]) -> str:
    return f" ({size_text(column, amount + others[column])} of the whole model)" if column in others else ""


def _rounded_up(amount: int, dense: int) -> str:
    return f"{-(-amount * 10**6 // dense) / 10**6:g}"


def _flat_curves(site: Site, space: Space) -> LossCurves:
    return LossCurves(
        {
            (form.name, scheme, weight.name): LossCurve(np.zeros(form.full(weight) + 1))
            for weight in site.weights
            for form in variants_of(map(form_named, (DENSE.name, *space.forms)), weight)
            for scheme in space.schemes
            if form.applies_to(weight)
        }
    )
