"""The classes of compressed models, by architecture: ``GacLlamaForCausalLM`` and its like, made when first used."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import transformers
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
)

from .compressed import CompressedConfig
from .contract import COMPRESSED
from .serving import show_to_serve

_PREFIX = "Gac"


@dataclass(frozen=True)
class Classes:
    """The classes of one architecture's compressed models.

    Attributes:
        config: subclass of the dense config.
        base: subclass of the dense model without a head.
        causal_lm: subclass of the dense model.
    """

    config: Any
    base: Any
    causal_lm: Any


@cache
def make_classes(model_type: str, mixin: type, module: str) -> Classes:
    """The classes of an architecture's compressed models, which transformers' factories know from then on.

    Args:
        model_type: of the dense config.
        mixin: ``CompressedModel`` or a subclass.
        module: name of the module in which pickle finds them; it has ``class_named`` as its ``__getattr__``.
    """
    mapping: Any = CONFIG_MAPPING
    dense = mapping[model_type]
    config = _subclass(dense, CompressedConfig, module, model_type=COMPRESSED + model_type)
    base, causal_lm = (
        _subclass(models[dense], mixin, module, config_class=config)
        for models in (MODEL_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING)
    )
    AutoConfig.register(config.model_type, config, exist_ok=True)
    AutoModel.register(config, base, exist_ok=True)
    AutoModelForCausalLM.register(config, causal_lm, exist_ok=True)
    show_to_serve(causal_lm)
    return Classes(config, base, causal_lm)


def class_named(name: str, mixin: type, module: str) -> Any:
    """The compressed class of this name: what transformers calls the dense one, after ``Gac``.

    Args:
        mixin, module: as for ``make_classes``.

    Raises:
        AttributeError: transformers has no such class.
    """
    dense = getattr(transformers, name.removeprefix(_PREFIX), None) if name.startswith(_PREFIX) else None
    config = getattr(dense, "config_class", dense)
    if model_type := getattr(config, "model_type", None):
        made = make_classes(model_type, mixin, module)
        for found in (made.config, made.base, made.causal_lm):
            if found.__name__ == name:
                return found
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def _subclass(dense: Any, mixin: type, module: str, **body: Any) -> Any:
    return type(_PREFIX + dense.__name__, (mixin, dense), {"__module__": module, **body})
