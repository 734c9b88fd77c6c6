"""The plugin for vLLM: compressed models in the engine's own classes. ``vllm serve DIRECTORY`` finds it by itself."""

from typing import Any


def register() -> None:
    """Tell vLLM of the architectures and configs of compressed models; the entry point ``vllm.general_plugins``.

    vLLM calls it in every process, more than once. It loads no model class and no config class of transformers.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from vllm import ModelRegistry
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    from gac.runtime.vllm.config import make_config

    supported = ModelRegistry.get_supported_archs()
    for model_type, architectures in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        for architecture in (architectures,) if isinstance(architectures, str) else architectures:
            name = f"Gac{architecture}"
            if architecture in supported and name not in supported:
                ModelRegistry.register_model(name, f"gac.runtime.vllm.model:{name}")
        config: Any = make_config(model_type)
        _CONFIG_REGISTRY[config.model_type] = config
