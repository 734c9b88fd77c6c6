"""Small random models: one of each layout for property tests, all of them for the round trip."""

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from gac.models.families import family_of, supported
from gac.models.sites import Weight

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
ODD: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "qwen3_5_text": {
        "full_attention_interval": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 8,
    },
}
"""What some architectures need besides."""

LAYOUTS = ("llama", "cohere2", "gemma3_text", "glm", "gpt2", "granite", "olmo2", "opt", "phi3", "qwen3_5_text")
"""Separate q, k, v; one norm for both blocks and sliding windows; norms on both sides; stacked gate and up; Conv1D,
stacked q, k, v and LayerNorm; a factor; norms behind only and fixed heads; no gate and another name of everything;
q, k, v and gate, up stacked; linear attention in one layer, and queries with a gate in the other."""

STACKED = ("bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "mpt", "persimmon", "phi3")
"""Queries, keys and values are one weight."""

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
    key = family_of(kind()).neurons
    neurons = {key: NEURONS} if key else {}
    return kind(**ODD.get(model_type, {}) | neurons | {name: named[name] for name in named if name in known})


def small_model(config: Any) -> PreTrainedModel:
    """Random weights, the same every time, and biases that are not zero where there are any."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def weights_of(config: Any) -> list[Weight]:
    """Every weight that can change, in model order."""
    return [weight for site in family_of(config).sites(config) for weight in site.weights]


def has_value_weights(model_type: str) -> bool:
    """True if values are the outputs of a weight of their own."""
    return any(weight.values for weight in weights_of(small_config(model_type)))


VALUE_LAYOUTS = tuple(filter(has_value_weights, LAYOUTS))
