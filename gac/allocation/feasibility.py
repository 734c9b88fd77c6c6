"""Whether a budget can be met at all, known before anything is measured."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from gac.allocation.candidates import candidates, dense_candidate
from gac.allocation.dims import first_dim
from gac.allocation.knapsack import Group, knapsack
from gac.allocation.latencies import UNKNOWN, Timing
from gac.allocation.problem import allowed, as_knapsack, dense_total, name_of, with_known_costs
from gac.allocation.split_latencies import timing_of
from gac.core.arrays import Floats, Ints
from gac.core.errors import BudgetError, ProfileError
from gac.forms import DENSE, FORMS, form_named, variants_of
from gac.forms.loss_curves import LossCurve, LossCurves
from gac.models.sites import Site, Weight
from gac.plan.costs import BYTES, COSTS, KV_NUMBERS, PARAMS, floored
from gac.plan.recipe import Recipe, Space
from gac.profiling.table import Profile
from gac.schemes import DEFAULT_SCHEME, scheme_named

T = TypeVar("T")


def check_reachable(sites: Sequence[Site], recipe: Recipe, profile: Profile) -> None:
    """Refuse a recipe that no choice can meet: limits below the smallest candidates of all sites together.

    Raises:
        BudgetError: with the smallest budget, memory or KV-cache limit that can be reached.
        PlanError: no scheme allows any dim of a weight.
        ProfileError: the profile does not know what dense weights take in the recipe's decode kernel.
    """
    if recipe.deployment.triton:
        _check_decode_kernel(sites, recipe, profile)
    dense = [dense_candidate(site, Timing(None, ())) for site in sites]
    fractions = recipe.fractions
    smallest = {column: _smallest(sites, recipe, profile, column) for column in (PARAMS, BYTES) if column in fractions}
    rounded = f" in schemes {', '.join(recipe.space.schemes)}"
    for column, words, option, means, more in (
        (PARAMS, "parameters", "a budget", "", "forms"),
        (BYTES, "bytes", "memory", rounded, "forms or schemes"),
    ):
        whole = dense_total(dense, column)
        if column in smallest and smallest[column] > (limit := floored(fractions[column], whole)):
            least = -(-smallest[column] * 10**6 // whole) / 10**6
            raise BudgetError(
                f"a limit of {limit:,} of {whole:,} {words} ({limit / whole:.6g})",
                f"at least {smallest[column]:,}, the smallest that forms {_named(recipe)} can reach{means}",
                f"Ask for {option} of {least:g} or more, or allow more {more}.",
            )
    if KV_NUMBERS in fractions:
        _check_cache(sites, recipe, dense_total(dense, KV_NUMBERS))
    if recipe.limits.latency:
        _check_latency(sites, recipe, profile)


def meets_without_loss(sites: Sequence[Site], recipe: Recipe, profile: Profile) -> bool:
    """Say whether dense weights that are not rounded keep every limit, in shared GEMMs or not: they lose nothing."""
    exact = tuple(name for name in recipe.space.schemes if not scheme_named(name).lossy)
    if not exact:
        return False
    space, timing = replace(recipe.space, forms=(), schemes=exact), timing_of(profile, recipe.deployment)
    dense = [dense_candidate(site, replace(timing, triton=False)) for site in sites]
    limits = allowed(recipe, dense)
    sets = [candidates(site, LossCurves({}), space, timing, limits, needed=limits) for site in sites]
    try:
        as_knapsack(sets, limits).solve()
    except (BudgetError, ProfileError):
        return False
    return True


def _smallest(sites: Sequence[Site], recipe: Recipe, profile: Profile, column: str) -> int:
    space = recipe.space
    anything = [name for name in space.schemes if scheme_named(name).shape_requirement is None]
    if column != BYTES and anything:  # then any of these tells
        space = replace(space, schemes=(anything[0],))
    timing = timing_of(profile, recipe.deployment)

    def smallest(site: Site) -> int:
        return int(candidates(site, _flat(site, space), space, timing, (column,)).cost(column).min())

    return sum(_of_each(sites, smallest))


def _of_each(sites: Sequence[Site], count: Callable[[Site], T]) -> list[T]:
    """What is counted of every site, once for all that differ in their names alone."""
    alike = [replace(site, name="", layer=0, weights=tuple(map(_nameless, site.weights))) for site in sites]
    found = {one: count(site) for one, site in dict(zip(alike, sites, strict=True)).items()}
    return [found[one] for one in alike]


def _nameless(weight: Weight) -> Weight:
    return replace(weight, name="", input_group=None)


def _check_latency(sites: Sequence[Site], recipe: Recipe, profile: Profile) -> None:
    """Whether some choice keeps the limits of latency and of parameters together."""
    timing = timing_of(profile, recipe.deployment)
    dense = [dense_candidate(site, replace(timing, triton=False)) for site in sites]
    columns = [column for column in recipe.fractions if column not in COSTS]
    limits = {column: floored(recipe.fractions[column], dense_total(dense, column)) for column in columns}
    counted = _of_each(sites, lambda site: _matching(site, recipe, timing, columns))
    groups = [Group(site.name, *own) for site, own in zip(sites, counted, strict=True)]
    smallest = int(knapsack(groups, list(limits.values()), names=list(map(name_of, columns))).certificate.lower_bound)
    whole = dense_total(dense, PARAMS)
    if smallest > (limit := floored(recipe.limits.budget, whole)):
        slower = all(recipe.fractions[column] == 1 for column in columns)
        kept = "with no workload slower than the dense model" if slower else f"with latency {recipe.limits.latency}"
        least = -(-smallest * 10**6 // whole) / 10**6
        raise BudgetError(
            f"a limit of {limit:,} of {whole:,} parameters ({limit / whole:.6g}) {kept}",
            f"at least {smallest:,}, the smallest that forms {_named(recipe)} can reach so",
            f"Ask for a budget of {least:g} or more, or lift the limit of latency with latency='any' (--latency any).",
        )


def _matching(site: Site, recipe: Recipe, timing: Timing, columns: Sequence[str]) -> tuple[Floats, Ints]:
    """Parameters, and latencies by column, of the candidates whose latencies are known."""
    found = candidates(site, _flat(site, recipe.space), recipe.space, timing, (PARAMS, *columns), needed=columns)
    found = with_known_costs(replace(found, site=site.kind), columns)
    return found.params.astype(np.float64), np.column_stack([found.cost(column) for column in columns])


def _check_decode_kernel(sites: Sequence[Site], recipe: Recipe, profile: Profile) -> None:
    single = tuple(workload for workload in recipe.deployment.parsed if workload.rows == 1)
    timing = replace(timing_of(profile, recipe.deployment), workloads=single)
    for site in sites:
        rows = dense_candidate(site, timing)
        for workload, ns in zip(single, rows.latency[0].tolist(), strict=True):
            if ns == UNKNOWN:
                raise ProfileError(
                    f"the profile lacks the latency of {site.name} for {workload} in Triton",
                    "a profile of this model's shapes at one row",
                    "Measure it with gac profile --model NAME --decode-kernel triton (and --fuse), or plan without it.",
                )


def _check_cache(sites: Sequence[Site], recipe: Recipe, total: int) -> None:
    """Whatever the profile says of the forms' dims."""
    forms, fraction = recipe.space.forms, recipe.fractions[KV_NUMBERS]
    smallest = _least_cached(sites, forms, recipe)
    if smallest > floored(fraction, total):
        raise BudgetError(
            f"a KV-cache limit of {fraction:g}",
            f"at least {smallest / total:.4f}, the smallest that forms {_named(recipe)} can reach",
            _smaller_cache(sites, recipe, smallest, total),
        )


def check_shrinks_cache(sites: Sequence[Site], recipe: Recipe) -> None:
    """Refuse forms that leave the KV cache as it is, where all of its sizes are gone through.

    Raises:
        BudgetError: with the forms that make it smaller.
    """
    total = _least_cached(sites, (), recipe)
    if _least_cached(sites, recipe.space.forms, recipe) == total:
        others = [one.name for one in FORMS if _least_cached(sites, (one.name,), recipe) < total]
        raise BudgetError(
            f"a frontier over {KV_NUMBERS} with forms {_named(recipe)}",
            f"a form that makes the KV cache smaller ({', '.join(others) or 'none does'})",
            "Add one of these, or limit parameters." if others else "Limit parameters.",
        )


def _least_cached(sites: Sequence[Site], forms: Sequence[str], recipe: Recipe) -> int:
    """Numbers of a token that the smallest cache keeps which these forms can reach."""
    align, gpus = recipe.space.align, recipe.deployment.tensor_parallel
    dense, plain, smallest = DENSE, scheme_named(DEFAULT_SCHEME), 0
    for weight in (weight for site in sites for weight in site.weights):
        taken = variants_of(map(form_named, forms), weight)
        firsts = [(form, first_dim(form, weight, plain, align, gpus)) for form in taken if form.applies_to(weight)]
        cached = (form.cache.numbers(weight, dim) for form, dim in firsts if dim is not None)
        smallest += min([dense.cache.numbers(weight, 1), *cached])
    return smallest


def _smaller_cache(sites: Sequence[Site], recipe: Recipe, smallest: int, total: int) -> str:
    """What to do where the forms reach no smaller cache than that: name the one that would, with them."""
    forms = recipe.space.forms
    others = {one.name: _least_cached(sites, (*forms, one.name), recipe) for one in FORMS if one.name not in forms}
    name = min(others, key=lambda other: others[other], default="")
    if not name or others[name] >= smallest:
        return "Allow more."
    return f"Allow more, or add the form {name}, which reaches {others[name] / total:.4f}."


def _named(recipe: Recipe) -> str:
    return ", ".join(recipe.space.forms) or DENSE.name


def _flat(site: Site, space: Space) -> LossCurves:
    """Curves that lose nothing anywhere, so that the smallest candidate is among those that stay."""
    return LossCurves(
        {
            (form.name, scheme, weight.name): LossCurve(np.zeros(form.full(weight) + 1))
            for weight in site.weights
            for form in variants_of(map(form_named, (DENSE.name, *space.forms)), weight)
            for scheme in space.schemes
            if form.applies_to(weight)
        }
    )
