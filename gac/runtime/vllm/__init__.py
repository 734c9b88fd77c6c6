"""The plugin for vLLM: compressed models in the engine's own classes. ``vllm serve DIRECTORY`` finds it by itself."""

from itertools import chain
from typing import Any


def register() -> None:
    """Tell vLLM of the architectures and configs of compressed models; the entry point ``vllm.general_plugins``.

    vLLM calls it in every process, more than once. It loads no model class and no config class of transformers.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    from gac.runtime.vllm.config import Checks, make_config

    registered = ModelRegistry.get_supported_archs()
    names = [(name,) if isinstance(name, str) else name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()]
    for architecture in ("TransformersForCausalLM", *chain.from_iterable(names)):  # the first: vLLM's own, of any model
        name = f"Gac{architecture}"
        if name not in registered:
            ModelRegistry.register_model(name, f"gac.runtime.vllm.model:{name}")
            MODELS_CONFIG_MAP[name] = Checks
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        config: Any = make_config(model_type)
        _CONFIG_REGISTRY[config.model_type] = config
