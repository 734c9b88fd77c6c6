"""A model that was compressed in memory, as one that transformers' own methods save, push and load whole."""

import copy
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel

from gac.checkpoint.card import model_card
from gac.checkpoint.classes import classes_of
from gac.checkpoint.header import header_of
from gac.errors import CheckpointError
from gac.io import to_json
from gac.plan import Plan
from gac.runtime.compressed import CompressedModel
from gac.runtime.contract import COMPRESSED


def attach_plan(model: PreTrainedModel, plan: Plan) -> None:
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
    factories = {"AutoConfig": classes.config, "AutoModel": classes.base, "AutoModelForCausalLM": classes.causal_lm}
    described.auto_map = {factory: f"modeling_gac.{found.__name__}" for factory, found in factories.items()}
    changed: Any = model
    for module in changed.modules():
        if getattr(module, "config", None) is config:
            module.config = described
    changed.gac_plan = plan
    changed.gac_files = {"plan.json": text, "README.md": model_card(plan)}


def planned(model: PreTrainedModel) -> Plan:
    """The plan that a compressed model carries.

    Raises:
        CheckpointError: it has none.
    """
    plan = getattr(model, "gac_plan", None)
    if not isinstance(plan, Plan):
        given = f"a {type(model).__name__} without a plan"
        raise CheckpointError(given, "a model from gac.compress or gac.load", "Compress it first.")
    return plan


def check_class(model: PreTrainedModel) -> None:
    """Refuse a dense model of a class that no checkpoint can name.

    Raises:
        CheckpointError: it is not transformers' own causal LM of its architecture.
    """
    dense: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(model.config)]
    if type(model) is not dense:
        raise CheckpointError(
            f"a {type(model).__name__}", f"a {dense.__name__} of transformers", "Load it with AutoModelForCausalLM."
        )
