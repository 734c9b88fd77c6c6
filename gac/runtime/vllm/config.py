"""Configs of compressed models as vLLM takes them: the dense model's, with the key ``gac``."""

from contextlib import suppress
from functools import cache
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig
from vllm.model_executor.models.config import VerifyAndUpdateConfig

from gac.runtime.contract import COMPRESSED, QUANTIZATION, chooses_code


@cache
def make_config(model_type: str) -> type[PretrainedConfig]:
    """Make the class that vLLM opens the config of a compressed model with.

    Args:
        model_type: of the dense model. The engine decides by it, so its configs are those of the dense class.
    """
    return type("GacConfig", (_CompressedConfig,), {"model_type": COMPRESSED + model_type, "dense_type": model_type})


class _CompressedConfig(PretrainedConfig):  # type: ignore[no-untyped-call]
    dense_type: str

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **options: Any) -> Any:
        """Return the dense config, without keys that choose code or a quantiser: the plugin decides."""
        from gac.runtime.header import header_of  # these load modules that no other model needs
        from gac.runtime.vllm.check import is_multimodal, is_served
        from gac.runtime.vllm.heads import BACKEND, with_fewer_heads

        dropped = ("auto_map", QUANTIZATION)
        values = {name: value for name, value in config_dict.items() if not chooses_code(name) and name not in dropped}
        opened = CONFIG_MAPPING[cls.dense_type].from_dict({**values, "model_type": cls.dense_type}, **options)
        config = opened[0] if isinstance(opened, tuple) else opened  # the other are options that it has no use for
        with suppress(ValueError):  # ``Checks`` refuses it
            if (header := header_of(config)) and with_fewer_heads(header.modules):
                config.architectures = [f"Gac{BACKEND}"]
        if is_multimodal(config) and not is_served(config):  # ``Checks`` refuses it, before a processor is asked for
            config.architectures = [f"Gac{BACKEND}"]
        return opened


class Checks(VerifyAndUpdateConfig):  # type: ignore[misc]
    """Refusals before the engine starts. Here vLLM shows an error last, once, and as it is if it is no ValueError."""

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        from gac.runtime.vllm.check import refusal, warn_of_version
        from gac.runtime.vllm.heads import set_heads

        if problem := refusal(vllm_config.model_config.hf_config):
            raise RuntimeError("{}; expected {}. {}".format(*problem))
        model_config = vllm_config.model_config
        if model_config.quantization == "compressed-tensors":  # for readers without GAC; the plugin has the key gac
            model_config.quantization = None
        if (name := model_config.quantization) is not None:
            raise RuntimeError(f"quantization {name} of a compressed model; expected none. Leave --quantization out.")
        if (stages := vllm_config.parallel_config.pipeline_parallel_size) > 1:
            raise RuntimeError(f"pipeline_parallel_size is {stages}; expected 1. Use --tensor-parallel-size.")
        set_heads(vllm_config)
        warn_of_version()
