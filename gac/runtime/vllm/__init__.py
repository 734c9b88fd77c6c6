"""The plugin for vLLM: compressed models in the engine's own classes. ``vllm serve DIRECTORY`` finds it by itself."""

from itertools import chain
from typing import Any


def register() -> None:
    """Tell vLLM of the architectures and configs of compressed models; the entry point ``vllm.general_plugins``.

    vLLM calls it in every process, more than once. It loads no model class and no config class of transformers.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # type: ignore[attr-defined]
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    from gac.runtime.vllm.config import Checks, make_config

    registered = ModelRegistry.get_supported_archs()
    names = ["TransformersForCausalLM"]  # vLLM's own, of any model
    known = (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    for model_type, classes in chain.from_iterable(mapping.items() for mapping in known):
        for name in (classes,) if isinstance(classes, str) else classes:
            names += [name, f"{name}Of{CONFIG_MAPPING_NAMES[model_type]}"]  # as ``modeling_gac`` names them
        config: Any = make_config(model_type)
        _CONFIG_REGISTRY[config.model_type] = config
    for name in (f"Gac{name}" for name in dict.fromkeys(names)):
        if name not in registered:
            ModelRegistry.register_model(name, f"gac.runtime.vllm.model:{name}")
            MODELS_CONFIG_MAP[name] = Checks
