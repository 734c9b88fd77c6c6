"""Attach a plan to a model that was compressed in memory."""

import copy
from typing import Any

from transformers import PreTrainedModel

from gac.checkpoint.card import model_card
from gac.checkpoint.classes import auto_map, classes_of
from gac.checkpoint.header import header_of
from gac.checkpoint.layout import layout_of
from gac.checkpoint.planned import PlannedModel
from gac.core.io import to_json
from gac.models.plain import check_class
from gac.plan.plan import Plan
from gac.runtime.contract import COMPRESSED, LAYOUT
from gac.runtime.model import CompressedModel
from gac.runtime.storage.embeddings import embeddings_of


def attach_plan(model: PreTrainedModel, plan: Plan) -> PlannedModel:
    """Make a model that was compressed in memory one of the class that loads such models; it is changed in place.

    Its class becomes a subclass of what it was, and its config one that names the modules, so that
    ``save_pretrained`` and ``push_to_hub`` write a whole checkpoint.

    Args:
        model: with the plan's modules in it.

    Raises:
        CheckpointError: its class is none of transformers' own causal LMs.
    """
    config = model.config
    classes = classes_of(config.model_type.removeprefix(COMPRESSED))
    if not isinstance(model, CompressedModel):
        check_class(model)
        model.__class__ = classes.causal_lm
    described = copy.deepcopy(config)
    described.__class__ = classes.config
    text = to_json(plan, indent=1).decode() + "\n"
    described.gac = header_of(plan, described, text)
    described.auto_map = auto_map(classes)
    vars(described).pop(LAYOUT, None)
    if (layout := layout_of(model, plan)) is not None:
        setattr(described, LAYOUT, layout)
    changed: Any = model
    for module in changed.modules():
        if getattr(module, "config", None) is config:
            module.config = described
    if not described.tie_word_embeddings and _is_tied(changed):  # by hand; transformers would save one and miss it
        described.tie_word_embeddings = True
        changed.all_tied_weights_keys = changed.get_expanded_tied_weights_keys(all_submodels=True)
    changed.gac_plan = plan
    changed.gac_files = {"plan.json": text, "README.md": model_card(plan, model.dtype.itemsize)}
    planned_model: PlannedModel = changed
    return planned_model


def _is_tied(model: Any) -> bool:
    weights = [getattr(module, "weight", None) for module in embeddings_of(model).values()]
    return len(weights) == 2 and weights[0] is not None and weights[0] is weights[1]
