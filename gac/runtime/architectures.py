"""The classes of transformers that run an architecture: a causal language model, or a multimodal model around one."""

from typing import Any

import transformers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_MAPPING

_BASE, _CAUSAL_LM, _IMAGE_TEXT = "AutoModel", "AutoModelForCausalLM", "AutoModelForImageTextToText"
_MAPPINGS: dict[str, Any] = {
    _BASE: MODEL_MAPPING,
    _CAUSAL_LM: MODEL_FOR_CAUSAL_LM_MAPPING,
    _IMAGE_TEXT: MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
}


def factory_of(config_class: type) -> Any:
    """Return the factory of transformers that loads whole models with such a config."""
    name = _IMAGE_TEXT if config_class in _MAPPINGS[_IMAGE_TEXT] else _CAUSAL_LM
    return getattr(transformers, name)


def generating_class(config_class: type) -> Any:
    """Return the class of whole models with such a config, which generate text; None where there is none."""
    return _MAPPINGS[factory_of(config_class).__name__].get(config_class, None)


def known_by(config_class: type) -> dict[str, Any]:
    """Return the base model and the whole model with such a config, by the names of the factories that make them."""
    generating = generating_class(config_class)
    classes = {name: mapping.get(config_class, None) for name, mapping in _MAPPINGS.items()}
    return {name: result for name, result in classes.items() if result and (name == _BASE or result is generating)}
