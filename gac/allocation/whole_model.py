"""Limits that are sizes of a whole model, as the fractions of its targeted weights that they allow."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gac.core.errors import BudgetError
from gac.models.sites import Site
from gac.plan.costs import BYTES, COSTS, PARAMS, fraction_of
from gac.plan.recipe import Recipe
from gac.plan.sizes import SIZED, size_of, size_text
from gac.schemes import DEFAULT_SCHEME, scheme_named

logger = logging.getLogger("gac")


def _dense(sites: Sequence[Site]) -> dict[str, int]:
    weights, plain = [weight for site in sites for weight in site.weights], scheme_named(DEFAULT_SCHEME)
    counted = sum(plain.bytes(weight.params // weight.in_features, weight.in_features) for weight in weights)
    return {PARAMS: sum(weight.params for weight in weights), BYTES: counted}


def in_fractions(recipe: Recipe, sites: Sequence[Site], others: Mapping[str, int], routed: bool = False) -> Recipe:
    """Return the recipe with each size as the largest fraction of the targeted weights that keeps the model within it.

    Args:
        sites: all that are targeted.
        others: what ``gac.measurement.untargeted`` counts.
        routed: experts are among that.

    Raises:
        BudgetError: the weights that are not targeted take the size alone.
    """
    limits, dense = recipe.limits, _dense(sites)
    for column in SIZED:
        name, option = COSTS[column].limit, "budget" if column == PARAMS else COSTS[column].limit
        if not isinstance(asked := getattr(limits, name), str):
            continue
        allowed = size_of(column, asked) - others[column]
        if allowed <= 0:
            smaller = column == BYTES and recipe.space.head == DEFAULT_SCHEME
            raise BudgetError(
                f"{option}={asked!r}, of the whole model",
                f"more than {others[column]:,} {COSTS[column].unit}, which embeddings, head, norms and biases take"
                f"{', with the routed experts' if routed else ''}",
                f"Ask for more than {size_text(column, others[column])}"
                f"{', or store embedding and head in 8 bits (head=w8a16).' if smaller else '.'}",
            )
        if allowed >= dense[column]:
            logger.info("%s %s limits nothing: the dense model takes less", option, asked)
        changed: dict[str, Any] = {name: fraction_of(min(allowed, dense[column]), dense[column])}
        limits = replace(limits, **changed)
    return replace(recipe, limits=limits)
