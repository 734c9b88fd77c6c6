"""The config of a DeciLM checkpoint, for engines that read it through transformers. Licence: Apache-2.0.

transformers has no DeciLM. Engines that run one (vLLM, TensorRT-LLM) read the sizes of a layer as attributes, such as
``config.block_configs[0].attention.no_op``, and leave it to the checkpoint to make attributes of its JSON.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from transformers import LlamaConfig


class Fields(dict[str, Any]):
    """A JSON object whose values are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class DeciLMConfig(LlamaConfig):
    """Llama's config with the sizes of every layer, its attention's and its MLP's, in ``block_configs``."""

    model_type = "nemotron-nas"

    def __init__(self, block_configs: Iterable[Mapping[str, Mapping[str, Any]]] = (), **options: Any) -> None:
        super().__init__(**options)
        self.block_configs = [Fields({name: Fields(part) for name, part in block.items()}) for block in block_configs]
