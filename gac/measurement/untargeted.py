"""Parameters and bytes of a model that no choice changes."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from gac.core.errors import ModelError
from gac.forms.planned_sites import targeted_sites
from gac.measurement.embeddings import embedding_shapes
from gac.models.loading import load_config
from gac.models.packaged import PACKAGED
from gac.models.rotation import untied_by_rotation
from gac.plan.costs import BYTES, PARAMS
from gac.plan.evidence import RoundedHead
from gac.plan.recipe import Space
from gac.runtime.architectures import generating_class
from gac.schemes import DEFAULT_SCHEME, scheme_named


def untargeted(model: PreTrainedModel | str | Path, space: Space) -> dict[str, int]:
    """Count what no choice changes, as plans count it (``PlanRecord.model_bytes``): embeddings, head, norms, biases.

    No weights are read.

    Returns:
        Parameters and bytes by cost: tied weights once, in 16 bits, with the head that rotation unties, and embedding
        and head in ``space.head``.

    Raises:
        ModelError: there is no such model, or its architecture is not supported.
    """
    dense = _without_weights(model)
    sites = targeted_sites(dense.config, space.forms)
    targeted = sum(weight.params for site in sites for weight in site.weights)
    params = sum(values.numel() for values in dense.parameters()) - targeted
    untied = untied_by_rotation(dense) if space.rotate else 0
    params, plain = params + untied, scheme_named(DEFAULT_SCHEME)
    if space.head == DEFAULT_SCHEME:
        return {PARAMS: params, BYTES: plain.bytes(1, params)}
    shapes = embedding_shapes(dense)
    head = RoundedHead(space.head, shapes * 2 if untied else shapes, 0.0)
    return {PARAMS: params, BYTES: plain.bytes(1, params - head.params) + head.bytes}


def _without_weights(model: PreTrainedModel | str | Path) -> Any:
    if isinstance(model, PreTrainedModel):
        return model
    packaged = PACKAGED.get(str(model))
    config = packaged.config() if packaged else load_config(model)
    if (architecture := generating_class(type(config))) is None:
        problem = f"{model}, with a size of the whole model as a limit"
        raise ModelError(problem, "a dense model of transformers, whose weights can be counted", "Give a fraction.")
    with torch.device("meta"):
        return architecture._from_config(deepcopy(config))
