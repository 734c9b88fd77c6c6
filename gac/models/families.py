"""Families: what a model of each architecture can have changed, read from its config alone."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from gac.errors import ModelError
from gac.forms import Weight
from gac.sites import Site


class Family(ABC):
    """One architecture: which sites it has and where their weights live."""

    model_types: ClassVar[tuple[str, ...]]

    @abstractmethod
    def sites(self, config: Any) -> tuple[Site, ...]:
        """Every site in model order, from a transformers config (no weights are needed)."""


class Llama(Family):
    """Llama's layout: q/k/v/o projections and a gated MLP in every layer, GQA, head_dim free of the hidden size.

    What lies between the weights (norms of q and k, soft-capping, sliding windows, the MLP's activation) may differ.
    """

    model_types = (
        "gemma",
        "gemma2",
        "gemma3_text",
        "granite",
        "llama",
        "mistral",
        "olmo2",
        "qwen2",
        "qwen3",
        "smollm3",
    )

    def sites(self, config: Any) -> tuple[Site, ...]:
        hidden, neurons = config.hidden_size, config.intermediate_size
        head_dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
        heads = config.num_attention_heads
        groups = config.num_key_value_heads or heads
        query, key = head_dim * heads, head_dim * groups
        found: list[Site] = []
        for layer in range(config.num_hidden_layers):
            prefix = f"model.layers.{layer}"
            block = f"{prefix}.self_attn"
            for weight in (
                Weight(f"{block}.q_proj", query, hidden, reads=block),
                Weight(f"{block}.k_proj", key, hidden, reads=block, heads=groups, cached=True),
                Weight(f"{block}.v_proj", key, hidden, reads=block, values="out", heads=groups, cached=True),
                Weight(f"{block}.o_proj", hidden, query, values="in", heads=heads),
            ):
                found.append(Site(weight.name, layer, weight.name.rsplit(".", 1)[1], (weight,)))
            mlp = f"{prefix}.mlp"
            weights = (
                Weight(f"{mlp}.gate_proj", neurons, hidden, neurons="out", reads=mlp),
                Weight(f"{mlp}.up_proj", neurons, hidden, neurons="out", reads=mlp),
                Weight(f"{mlp}.down_proj", hidden, neurons, neurons="in"),
            )
            found.append(Site(mlp, layer, "mlp", weights))
        return tuple(found)


_FAMILIES: Mapping[str, Family] = MappingProxyType(
    {model_type: family for family in (Llama(),) for model_type in family.model_types}
)


def supported() -> tuple[str, ...]:
    """The ``model_type`` of every supported architecture."""
    return tuple(sorted(_FAMILIES))


def text_config(config: Any) -> Any:
    """The language model's part of a config: a multimodal one (Gemma 3's, say) keeps it in ``text_config``."""
    return getattr(config, "text_config", None) or config


def family_of(config: Any) -> Family:
    """The family of a transformers config. A multimodal model has none: its weights have other names.

    Raises:
        ModelError: the architecture is not supported.
    """
    model_type = str(getattr(config, "model_type", None))
    if model_type not in _FAMILIES:
        raise ModelError(
            f"model type {model_type!r}",
            f"a supported architecture ({', '.join(supported())})",
            "Use a model of one of these architectures.",
        )
    return _FAMILIES[model_type]
