"""Heads and sliding windows of a model's attentions, from its config alone."""

from dataclasses import dataclass
from typing import Any

from gac.core.operations import Operation, attend
from gac.runtime.contract import COMPRESSED

WITHOUT_HEAD_KEYS = (
    *("biogpt", "bloom", "codegen", "ctrl", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "gptj"),
    *("modernbert-decoder", "mpt", "opt", "persimmon", "xglm"),
)
"""Architectures that read neither ``num_key_value_heads`` nor ``head_dim``, which a config may hold all the same."""


@dataclass(frozen=True)
class Heads:
    queries: int  # query heads
    cached: int  # key-value heads
    length: int  # numbers of a key and of a value

    @property
    def numbers(self) -> int:
        """Cached numbers of a token in a layer, keys and values."""
        return 2 * self.cached * self.length

    def over(self, texts: int, tokens: int) -> Operation:
        return attend(texts, self.queries, self.cached, tokens, self.length)


def of_layer(config: Any, layer: int) -> Any:
    """The config as a layer reads it: transformers keeps those sizes apart in which layers differ."""
    return config.per_layer_config[layer] if getattr(config, "is_heterogeneous", False) else config


def heads_of(config: Any) -> Heads:
    """Heads of every layer, or of the one whose config it is.

    They are as long as the hidden size leaves them where the config does not say.
    """
    queries = config.num_attention_heads
    if getattr(config, "model_type", "").removeprefix(COMPRESSED) in WITHOUT_HEAD_KEYS:
        cached = queries
        if getattr(config, "new_decoder_architecture", False):  # of Falcon
            cached = config.num_kv_heads
        elif getattr(config, "multi_query", False):
            cached = 1
        return Heads(queries, cached, config.hidden_size // queries)
    length = getattr(config, "head_dim", None) or config.hidden_size // queries
    return Heads(queries, getattr(config, "num_key_value_heads", None) or queries, length)


def sliding_layers(config: Any) -> tuple[int, ...]:
    """The layers whose attention is of a sliding window, or of no other full kind."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        every = range(config.num_hidden_layers)
        return tuple(every) if getattr(config, "sliding_window", None) else ()
    return tuple(layer for layer, kind in enumerate(kinds) if kind != "full_attention")
