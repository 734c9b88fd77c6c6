"""Limits that are sizes of a whole model, as the fractions of its targeted weights that they allow."""

import logging
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from gac.core.errors import BudgetError, ModelError
from gac.models.sites import Site
from gac.plan.costs import BYTES, COSTS, PARAMS, fraction_of
from gac.plan.evidence import RoundedHead
from gac.plan.recipe import Recipe, Space
from gac.plan.sizes import SIZED, size_of, size_text
from gac.schemes import DEFAULT_SCHEME, scheme_named

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

logger = logging.getLogger("gac")


def untargeted(model: "PreTrainedModel | str | Path", space: Space) -> dict[str, int]:
    """Count what no choice changes, as plans count it (``PlanRecord.model_bytes``): embeddings, head, norms, biases.

    No weights are read.

    Returns:
        Parameters and bytes by cost: tied weights once, in 16 bits, with the head that rotation unties, and embedding
        and head in ``space.head``.

    Raises:
        ModelError: there is no such model, or its architecture is not supported.
    """
    from gac.measurement.embeddings import embedding_shapes
    from gac.models.families import family_of
    from gac.models.rotation import untied_by_rotation

    dense = _without_weights(model)
    sites = family_of(dense.config).sites(dense.config)
    params = sum(values.numel() for values in dense.parameters()) - _dense(sites)[PARAMS]
    untied = untied_by_rotation(dense) if space.rotate else 0
    params, plain = params + untied, scheme_named(DEFAULT_SCHEME)
    if space.head == DEFAULT_SCHEME:
        return {PARAMS: params, BYTES: plain.bytes(1, params)}
    shapes = embedding_shapes(dense)
    head = RoundedHead(space.head, shapes * 2 if untied else shapes, 0.0)
    return {PARAMS: params, BYTES: plain.bytes(1, params - head.params) + head.bytes}


def _without_weights(model: "PreTrainedModel | str | Path") -> Any:
    import torch
    from transformers import PreTrainedModel
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    from gac.models.loading import load_config
    from gac.models.packaged import PACKAGED

    if isinstance(model, PreTrainedModel):
        return model
    packaged = PACKAGED.get(str(model))
    config = packaged.config() if packaged else load_config(model)
    if (architecture := cast(Any, MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None))) is None:
        problem = f"{model}, with a size of the whole model as a limit"
        raise ModelError(problem, "a dense model of transformers, whose weights can be counted", "Give a fraction.")
    with torch.device("meta"):
        return architecture._from_config(deepcopy(config))


def _dense(sites: Sequence[Site]) -> dict[str, int]:
    weights, plain = [weight for site in sites for weight in site.weights], scheme_named(DEFAULT_SCHEME)
    counted = sum(plain.bytes(weight.out_features, weight.in_features) for weight in weights)
    return {PARAMS: sum(weight.params for weight in weights), BYTES: counted}


def in_fractions(recipe: Recipe, sites: Sequence[Site], others: Mapping[str, int]) -> Recipe:
    """Return the recipe with each size as the largest fraction of the targeted weights that keeps the model within it.

    Args:
        sites: all that are targeted.
        others: what ``untargeted`` counts.

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
                f"more than {others[column]:,} {COSTS[column].unit}, which embeddings, head, norms and biases take",
                f"Ask for more than {size_text(column, others[column])}"
                f"{', or store embedding and head in 8 bits (head=w8a16).' if smaller else '.'}",
            )
        if allowed >= dense[column]:
            logger.info("%s %s limits nothing: the dense model takes less", option, asked)
        changed: dict[str, Any] = {name: fraction_of(min(allowed, dense[column]), dense[column])}
        limits = replace(limits, **changed)
    return replace(recipe, limits=limits)
