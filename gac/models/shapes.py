"""Shapes of well-known models, so that a GPU can be profiled for them with no weights and no network."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from gac.core.errors import ModelError, did_you_mean


@dataclass(frozen=True)
class Shapes:
    """The part of a transformers config that decides the dims of its linear weights, and how many tokens it has."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int = 32_000
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None


def _every_sixth(layers: int) -> tuple[str, ...]:
    return tuple("full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(layers))


SHAPES: Mapping[str, Shapes] = MappingProxyType(
    {
        "smollm2": Shapes("llama", 576, 1536, 30, 9, 3, 64, 49_152),
        "llama-3-8b": Shapes("llama", 4096, 14336, 32, 32, 8, 128, 128_256),
        "llama-2-7b": Shapes("llama", 4096, 11008, 32, 32, 32, 128),
        "mistral-7b": Shapes("mistral", 4096, 14336, 32, 32, 8, 128),
        "qwen3-8b": Shapes("qwen3", 4096, 12288, 36, 32, 8, 128, 151_936),
        "gemma-3-4b": Shapes("gemma3_text", 2560, 10240, 34, 8, 4, 256, 262_208, 1024, _every_sixth(34)),
        "llama-3-70b": Shapes("llama", 8192, 28672, 80, 64, 8, 128, 128_256),
    }
)


def shapes_of(model: Any) -> Any:
    """The shapes of a known name, else a ModelError; anything but a string is taken for a transformers config."""
    if isinstance(model, str) and model not in SHAPES:
        expected = f"one of {', '.join(SHAPES)}, or a transformers config"
        remedy = did_you_mean(model, SHAPES, "Pass the model's config.")
        raise ModelError(f"no shapes are known for model {model!r}", expected, remedy)
    return SHAPES[model] if isinstance(model, str) else model
