"""What llama.cpp can be told of an architecture: how it is called there, its sizes, and what it takes for granted."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from gac.checkpoint.gguf.package import ELSEWHERE
from gac.core.errors import CheckpointError


@dataclass(frozen=True)
class Architecture:
    """An architecture of transformers as llama.cpp has it.

    Attributes:
        name: what llama.cpp calls it.
        paired: whether it turns neighbouring numbers of a head, and not the first half with the second: the rows of
            queries and keys then stand in another order.
        fixed: what a config has to say, for llama.cpp has no key for anything else.
    """

    name: str
    paired: bool = False
    fixed: Mapping[str, Any] = field(default_factory=dict)


_FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
_ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "llama": Architecture("llama", paired=True, fixed=_FIXED),
        "mistral": Architecture("llama", paired=True, fixed=_FIXED | {"sliding_window": None}),
        "qwen2": Architecture("qwen2", fixed=_FIXED | {"use_sliding_window": False}),
        "qwen3": Architecture("qwen3", fixed=_FIXED | {"use_sliding_window": False}),
    }
)
"""By the ``model_type`` of transformers. Each was read back and compared, by transformers and by llama.cpp."""


def architecture_of(config: Any) -> Architecture:
    """What llama.cpp knows the model of a stock config as.

    Raises:
        CheckpointError: no such architecture was tried, or llama.cpp has no key for something that the config says.
    """
    if config.model_type not in _ARCHITECTURES:
        raise CheckpointError(
            f"a model of the architecture {config.model_type}",
            f"one that has been tried in llama.cpp ({', '.join(_ARCHITECTURES)})",
            ELSEWHERE,
        )
    found = _ARCHITECTURES[config.model_type]
    for name, due in found.fixed.items():
        _check(config, name, getattr(config, name, due), due)
    rope = dict(getattr(config, "rope_parameters", None) or {})
    _check(config, "rope_type", rope.get("rope_type", "default"), "default")
    _check(config, "partial_rotary_factor", rope.get("partial_rotary_factor", 1), 1)
    return found


def _check(config: Any, name: str, said: Any, due: Any) -> None:
    if said != due:
        raise CheckpointError(
            f"a {config.model_type} config with {name} {said!r}",
            f"{due!r}, which llama.cpp takes for granted or GAC has not tried otherwise",
            ELSEWHERE,
        )


def head_dim(config: Any) -> int:
    """Numbers of a head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def add_sizes(writer: Any, config: Any) -> None:
    """Write the sizes of a stock config into the header of a ``gguf.GGUFWriter``."""
    size = head_dim(config)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_vocab_size(config.vocab_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
