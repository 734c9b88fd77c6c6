"""Mixers: the linear weights of linear attention, state spaces and the like, in the place of attention or beside it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gac.models.sites import Weight


@dataclass(frozen=True)
class Mixer:
    """The linear weights of such layers, all of one kind. Names are those in a layer."""

    kind: str  # in the config's ``layer_types``
    readers: tuple[str, ...]  # the weights that read the hidden states
    output: str  # the weight that writes to the residual stream
    keys: tuple[str, ...]  # of the config, from which the sizes follow
    sizes: Callable[..., tuple[int, ...]]  # outputs of each of the readers, and inputs of ``output``, from their values
    parallel: bool = False  # attention is in these layers too, and runs after it
    # The input norms of its layers, where these have no other norms, and the layers with attention have others.
    before: tuple[str, str] | None = None

    def weights(self, config: Any) -> Iterator[Weight]:
        """The weights in the order in which they run; the last one writes to the residual stream."""
        hidden, group = config.hidden_size, self.output.rpartition(".")[0]
        *outputs, inner = self.sizes(*(getattr(config, key) for key in self.keys))
        reading = partial(Weight, in_features=hidden, input_group=group)
        for name, size in zip(self.readers, outputs, strict=True):
            yield reading(name, size)
        yield Weight(self.output, hidden, inner, to_residual=True)


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) in every layer: no form shortens its heads."""

    kind: str = ""
    parallel: bool = False
    before: tuple[str, str] | None = None
    keys: tuple[str, ...] = (
        *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "num_attention_heads"),
    )

    def weights(self, config: Any) -> Iterator[Weight]:
        """The weights in the order in which they run, those that read the hidden states first."""
        of_queries, of_values, plain, rotated, values, heads = (getattr(config, key) for key in self.keys)
        hidden, queries = config.hidden_size, heads * (plain + rotated)
        reading = partial(Weight, in_features=hidden, input_group="self_attn")
        yield reading("self_attn.q_a_proj", of_queries) if of_queries else reading("self_attn.q_proj", queries)
        yield reading("self_attn.kv_a_proj_with_mqa", of_values + rotated)
        if of_queries:
            yield Weight("self_attn.q_b_proj", queries, of_queries)
        yield Weight("self_attn.kv_b_proj", heads * (plain + values), of_values)
        yield Weight("self_attn.o_proj", hidden, heads * values, to_residual=True)


LATENT_ATTENTION = LatentAttention()


def _delta_sizes(key_heads: int, value_heads: int, key_length: int, value_length: int) -> tuple[int, ...]:
    keys, values = key_heads * key_length, value_heads * value_length
    return 2 * keys + values, values, value_heads, value_heads, values


GATED_DELTA_NET = Mixer(
    "linear_attention",
    tuple(f"linear_attn.in_proj_{name}" for name in ("qkv", "z", "b", "a")),
    "linear_attn.out_proj",
    ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    _delta_sizes,
)
"""Qwen 3.5's gated delta net (arXiv 2412.06464): queries, keys and values are one weight, ``z`` gates the output."""


QWEN3_NEXT = replace(
    GATED_DELTA_NET,
    readers=("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"),
    sizes=lambda *values: _joined(*_delta_sizes(*values)),
)
"""The same of Qwen3-Next, whose weights are two."""


def _joined(keys: int, gates: int, *rest: int) -> tuple[int, ...]:
    return keys + gates, 2 * rest[0], rest[-1]


def _separate_sizes(key_heads: int, value_heads: int, key_length: int, value_length: int) -> tuple[int, ...]:
    keys, values = key_heads * key_length, value_heads * value_length
    return keys, keys, values, value_heads, value_heads, values, values


OLMO_DELTA_NET = Mixer(
    "linear_attention",
    tuple(f"linear_attn.{name}_proj" for name in "qkvbag"),
    "linear_attn.o_proj",
    GATED_DELTA_NET.keys,
    _separate_sizes,
    before=("input_layernorm", "post_attention_layernorm"),
)
"""The same with all weights apart, of OLMo Hybrid."""


def _mamba_sizes(heads: int, length: int, groups: int, state: int) -> tuple[int, ...]:
    return 2 * heads * length + 2 * groups * state + heads, heads * length


BAMBA = Mixer(
    "linear_attention",
    ("mamba.in_proj",),
    "mamba.out_proj",
    ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state"),
    _mamba_sizes,
)
"""Mamba 2 (arXiv 2405.21060), also of Granite 4.0: gate, states, B, C and step sizes are one weight."""

FALCON_H1 = replace(BAMBA, kind="hybrid", parallel=True)

NEMOTRON_H = Mixer(
    "linear_attention",
    ("mixer.in_proj",),
    "mixer.out_proj",
    ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size"),
    _mamba_sizes,
)

SHORT_CONVOLUTION = Mixer(
    "conv", ("conv.in_proj",), "conv.out_proj", ("hidden_size",), lambda hidden: (3 * hidden, hidden)
)
"""LFM2's gated convolution over a few tokens."""


def falcon_h1_factors(config: Any) -> Mapping[str, float]:
    """The factors of the outputs of Falcon-H1's layers before the residual stream, by the names of their weights."""
    return {
        "mamba.out_proj": config.ssm_out_multiplier,
        "self_attn.o_proj": config.attention_out_multiplier,
        "feed_forward.down_proj": config.mlp_multipliers[1],
    }


@dataclass(frozen=True)
class Width:
    """The width of MLPs, from values of the config that these keys name."""

    keys: tuple[str, ...]
    of: Callable[..., int]


def _lfm2_neurons(stated: int, adjusted: bool, factor: float, step: int) -> int:
    return -(-int(factor * int(2 * stated / 3)) // step) * step if adjusted else stated


LFM2_WIDTH = Width(
    ("intermediate_size", "block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of"), _lfm2_neurons
)
"""Two thirds of the config's width, times a factor, rounded up to a multiple."""
