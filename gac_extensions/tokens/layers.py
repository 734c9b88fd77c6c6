"""Layers from whose caches tokens can be taken, from a model's config alone."""

from typing import Any

from gac.core.errors import ModelError
from gac.models.attentions import sliding_layers
from gac.models.families import Family


def finds_attentions(family: Family) -> bool:
    """Return True if kvpress finds the attentions: in layers of ``model.layers``, with rotary embedding."""
    return family.layers == "model.layers"


def window_of(config: Any) -> int | None:
    """The most tokens that those layers cache; None: there are no such layers, or no limit in the config."""
    return getattr(config, "sliding_window", None) if sliding_layers(config) else None


def cut_layers(config: Any) -> list[int]:
    """The layers from whose caches tokens can be taken: all that are not of a sliding window; a ModelError if none."""
    sliding = sliding_layers(config)
    layers = [layer for layer in range(config.num_hidden_layers) if layer not in sliding]
    if not layers:
        raise ModelError(
            f"a {config.model_type} whose layers all attend within a sliding window",
            "a layer that attends to the whole context",
            "Keep all tokens: such a cache does not grow beyond the window.",
        )
    return layers


def not_pressed(model_type: str) -> ModelError:
    return ModelError(
        f"a {model_type}, in which kvpress finds no attention with rotary embedding",
        "an architecture like Llama, Mistral, Phi-3, Qwen or Gemma-3",
        "Keep all tokens of this one.",
    )
