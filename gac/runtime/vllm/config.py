"""Configs of compressed models as vLLM takes them: the dense model's, with the key ``gac``."""

from functools import cache
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

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
        """Return the dense config, without keys that choose code or a quantiser: the plugin decides.

        A ValueError names what the engine does not run, before it starts.
        """
        from gac.runtime.vllm.check import checked_header  # it loads modules that no other model needs
        from gac.runtime.vllm.heads import BACKEND, has_fewer_heads

        dropped = ("auto_map", QUANTIZATION)
        values = {name: value for name, value in config_dict.items() if not chooses_code(name) and name not in dropped}
        opened = CONFIG_MAPPING[cls.dense_type].from_dict({**values, "model_type": cls.dense_type}, **options)
        config = opened[0] if isinstance(opened, tuple) else opened  # the other are options that it has no use for
        if has_fewer_heads(checked_header(config).modules):
            config.architectures = [f"Gac{BACKEND}"]
        return opened
