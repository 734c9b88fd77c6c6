"""Small random models: one of each layout for property tests, all of them for the round trip."""

import re
from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedModel

from gac.models.families import Family, family_of, supported
from gac.models.linears import as_linear
from gac.models.sites import Weight
from gac.runtime.architectures import factory_of

SMALL = {
    "vocab_size": 258,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 257,
}
NEURONS = 176
EXPERTS, EXPERT_NEURONS = 8, 48
_DELTA = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
LATENTS = {
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "head_dim": 16,
    "num_key_value_heads": 4,
}
_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
ODD: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 16, "mamba_d_state": 16, "mamba_chunk_size": 16},
    "codegen": {"rotary_dim": 8},
    **{
        name: {
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 8,
            "hidden_size_per_layer_input": 0,
            "global_head_dim": 48,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
        }
        for name in ("gemma4_text", "gemma4_unified_text")
    },
    "falcon_h1": {
        "mamba_d_ssm": 128,
        "mamba_n_heads": 16,
        "mamba_d_state": 16,
        "mamba_chunk_size": 16,
        "mamba_rms_norm": True,
        "key_multiplier": 0.4,
        "attention_in_multiplier": 1.5,
        "attention_out_multiplier": 0.9,
        "ssm_in_multiplier": 1.2,
        "ssm_out_multiplier": 0.3,
        "ssm_multipliers": [0.3, 0.25, 0.2, 0.5, 0.7],
        "mlp_multipliers": [0.6, 0.2],
    },
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"],
        "num_local_experts": 0,
        "residual_multiplier": 0.3,
        "position_embedding_type": "rope",
        "mamba_n_heads": 16,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
        "mamba_chunk_size": 16,
    },
    "lfm2": {
        "layer_types": ["conv", "full_attention"],
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.5,
        "intermediate_size": NEURONS,
    },
    "cohere2_moe": {"num_shared_experts": 1, "prefix_dense_intermediate_size": NEURONS, "rms_norm_eps": 1e-5},
    "deepseek_v2": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2},
    "hunyuan_v1_moe": {"num_experts": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mistral4": {"head_dim": 32},
    "llama4_text": {"interleave_moe_layer_step": 2},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
        "mamba_num_heads": 16,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 16,
        "chunk_size": 16,
    },
    **{name: {"full_attention_interval": 2, **_DELTA} for name in ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"], **_DELTA},
}
"""What some architectures need besides; state spaces work in short chunks, for their memory is chunk by chunk."""

LAYOUTS = (
    *("llama", "cohere2", "gemma3_text", "glm", "gpt2", "granite", "olmo2", "opt", "phi3", "qwen3_5_text"),
    *("falcon_h1", "granitemoehybrid", "lfm2"),
)
"""Separate q, k, v; one norm for both blocks and sliding windows; norms on both sides; stacked gate and up; Conv1D,
stacked q, k, v and LayerNorm; a factor; norms behind only and fixed heads; no gate and another name of everything;
q, k, v and gate, up stacked; linear attention in one layer, and queries with a gate in the other; state spaces beside
attention; state spaces in one layer; a convolution in one layer."""

TWO_KINDS = ("bamba", "falcon_h1", "granitemoehybrid", "lfm2", "nemotron_h", "olmo_hybrid", "qwen3_5_text")
"""With layers of another kind than attention."""

STACKED = ("bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "mpt", "persimmon", "phi3")
"""Queries, keys and values are one weight."""

WITHOUT_HEADS = (
    *("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4", "sarvam_mla", "youtu"),
    *("afmoe", "gemma4_text", "gemma4_unified_text", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
)
"""No form shortens or drops heads: latent attention, attention with a gate, values that pass a norm."""

FEW = ("llama", "gemma3_text", "gpt2", "phi3")
every_layout = pytest.mark.parametrize(
    "model_type", [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS if name not in FEW)]
)
"""Four of them with the fast tests, the others with the slow ones."""
every_family = pytest.mark.parametrize("model_type", supported())


def small_config(model_type: str, **changed: Any) -> Any:
    """Two layers; 4 heads that are wider than the hidden size of 64 and share 2 values, where the architecture can."""
    kind = CONFIG_MAPPING[model_type]
    named = {kind.attribute_map.get(name, name): value for name, value in (SMALL | changed).items()}
    if model_type == "helium":  # whose o_proj has the hidden size on both sides
        named["head_dim"] = named["hidden_size"] // named["num_attention_heads"]
    known = vars(kind()).keys()
    odd = dict(ODD.get(model_type, {}))
    if model_type == "bamba":
        odd["attn_layer_indices"] = [*range(1, named["num_hidden_layers"], 2)]
    if "layer_types" in odd:
        odd["layer_types"] = (odd["layer_types"] * named["num_hidden_layers"])[: named["num_hidden_layers"]]
    fields = odd | {name: named[name] for name in named if name in known}
    if "kv_lora_rank" in known:
        fields |= LATENTS | odd
    family = family_of(kind(**fields))
    return kind(**({family.neurons: NEURONS} if family.neurons else {}) | routed(family, known, named) | fields)


def routed(family: Family, known: Collection[str], named: dict[str, Any]) -> dict[str, Any]:
    """The config's fields of routed experts: two of eight for a token, where possible in all layers but the first."""
    if (experts := family.experts) is None:
        return {}
    shared = experts.shared.width if experts.shared else ()
    fields: dict[str, Any] = dict.fromkeys(shared, EXPERT_NEURONS) | dict.fromkeys(_SHARED, 1)
    fields |= {experts.count: EXPERTS, experts.active: 2, experts.width: EXPERT_NEURONS, "n_group": 2, "topk_group": 1}
    fields |= dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), 1)
    fields |= {"mlp_only_layers": [0], "mlp_layer_types": ["dense"] + ["sparse"] * (named["num_hidden_layers"] - 1)}
    return {name: value for name, value in fields.items() if name in known or name in experts.keys}


def small_model(config: Any) -> PreTrainedModel:
    """Random weights, the same every time, and biases that are not zero where there are any."""
    torch.manual_seed(0)
    model = factory_of(type(config)).from_config(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def with_random_mlps(model: Any, seed: int, std: float) -> Any:
    """The model, with larger random weights in its MLPs, so that experts and the choices of routers differ."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, values in model.named_parameters():
            if ".mlp." in name:
                values.normal_(std=std)
    return model


def linear_weights(model: Any) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the linear modules of the layers, outside of experts and routers, by their names."""
    family = family_of(model.config)
    experts = family.experts
    left = (experts.router, experts.stack, experts.shared.gate if experts.shared else None) if experts else ()
    sizes = dict[str, tuple[int, int]]()
    for name, module in model.named_modules():
        path = re.match(rf"{re.escape(family.layers)}\.\d+\.(.+)", name)
        linear = as_linear(module)
        if path and isinstance(linear, nn.Linear) and not f"{path[1]}.".startswith(tuple(f"{each}." for each in left)):
            sizes[name] = (linear.out_features, linear.in_features)
    return sizes


def weights_of(config: Any) -> list[Weight]:
    """Every weight that can change, in model order."""
    return [weight for site in family_of(config).sites(config) for weight in site.weights]


def has_value_weights(model_type: str) -> bool:
    """True if values are the outputs of a weight of their own."""
    return any(weight.values for weight in weights_of(small_config(model_type)))


VALUE_LAYOUTS = tuple(filter(has_value_weights, LAYOUTS))

MIXTURES = tuple(name for name in supported() if family_of(small_config(name)).experts)
"""With routed experts in some layers."""
