"""Families: the layout of each architecture that GAC takes, and the reasons why others are refused."""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from gac.core.errors import ModelError
from gac.models.experts import ROUTED
from gac.models.family import FIXED_HEADS, MOST_LAYERS, Family, ResidualPath, model_type_of, text_config
from gac.models.mixers import (
    BAMBA,
    FALCON_H1,
    GATED_DELTA_NET,
    LFM2_WIDTH,
    NEMOTRON_H,
    OLMO_DELTA_NET,
    SHORT_CONVOLUTION,
    falcon_h1_factors,
)
from gac.models.mixtures import GRANITE, MIXTURES, NEMOTRON
from gac.runtime.contract import experts_of

__all__ = [
    "FIXED_HEADS",
    "MOST_LAYERS",
    "Family",
    "ResidualPath",
    "family_of",
    "is_supported",
    "mixtures",
    "supported",
    "text_config",
    "wrappers",
]

LLAMA = (  # architectures whose layers are named and shaped as Llama's: q/k/v/o and a gated MLP, GQA, any head_dim
    *("cwm", "ernie4_5", "exaone", "gemma", "helium", "hunyuan_v1_dense", "internlm3", "iquestcoder", "llama"),
    *("ministral", "ministral3", "mistral", "olmo", "qwen2", "qwen3", "seed_oss", "smollm3"),
)

LLAMA_TOWERS = (
    *("emu3_text_model", "hunyuan_vl_text", "paddleocr_vl_text", "qwen2_5_omni_text", "qwen2_5_vl_text"),
    *("qwen2_vl_text", "qwen3_vl_text"),
)
"""The same within multimodal models, and nowhere else."""

LLAMA_PARALLEL = ("cohere", "cohere2", "stablelm")
"""The same, but attention and MLP share one norm, in StableLM where the config says so."""

LLAMA_NORMED = ("exaone4", "olmo2", "olmo3")
"""The same, but norms stand behind o_proj and down_proj, and none before attention and MLP."""

_BEHIND = ("post_attention_layernorm", "post_feedforward_layernorm")
_OPT = partial(Family, output="self_attn.out_proj", up=("fc1",), down="fc2", before=("self_attn_layer_norm", ""))
_GPT = partial(Family, layers="transformer.h", last_norm="transformer.ln_f")
_GPT_J = partial(_GPT, output="attn.out_proj", up=("mlp.fc_in",), down="mlp.fc_out", neurons="n_inner", before=("", ""))
_FEED_FORWARD: dict[str, Any] = {
    "up": ("feed_forward.gate_proj", "feed_forward.up_proj"),
    "down": "feed_forward.down_proj",
}
_FOUR_TIMES: dict[str, Any] = {"up": ("mlp.dense_h_to_4h",), "down": "mlp.dense_4h_to_h"}
_BLOOM = partial(
    _GPT, qkv=("self_attention.query_key_value",), output="self_attention.dense", skips=(False, False), **_FOUR_TIMES
)

_ALL = (
    *MIXTURES,
    Family(LLAMA, towers=LLAMA_TOWERS),
    Family(("qwen3_5_text",), gated=True, mixer=GATED_DELTA_NET),
    Family(
        ("granitemoehybrid",),
        up=("shared_mlp.input_linear",),
        down="shared_mlp.output_linear",
        blocks=2,
        neurons="shared_intermediate_size",
        factor="residual_multiplier",
        mixer=BAMBA,
        experts=GRANITE,
    ),
    Family(
        ("bamba",),
        last_norm="model.final_layernorm",
        before=("input_layernorm", "pre_ff_layernorm"),
        mixer=BAMBA,
        **_FEED_FORWARD,
    ),
    Family(
        ("falcon_h1",),
        last_norm="model.final_layernorm",
        before=("", "pre_ff_layernorm"),
        factor=falcon_h1_factors,
        skips=(True, False),
        mixer=FALCON_H1,
        **_FEED_FORWARD,
    ),
    Family(
        ("lfm2",),
        last_norm="model.embedding_norm",
        output="self_attn.out_proj",
        up=("feed_forward.w1", "feed_forward.w3"),
        down="feed_forward.w2",
        before=("operator_norm", "ffn_norm"),
        width=LFM2_WIDTH,
        mixer=SHORT_CONVOLUTION,
    ),
    Family(
        ("nemotron_h",),
        last_norm="model.norm_f",
        qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
        output="mixer.o_proj",
        up=("mixer.up_proj",),
        down="mixer.down_proj",
        before=("norm", "norm"),
        mixer=NEMOTRON_H,
        divided=True,
        experts=NEMOTRON,
    ),
    Family(LLAMA_PARALLEL, before=("", "")),
    Family(LLAMA_NORMED, norms=_BEHIND, before=("", "")),
    Family(("olmo_hybrid",), norms=_BEHIND, before=("", ""), mixer=OLMO_DELTA_NET),
    Family(
        ("gemma2", "gemma3_text"),
        norms=_BEHIND,
        before=("input_layernorm", "pre_feedforward_layernorm"),
    ),
    Family(
        ("gemma4_text", "gemma4_unified_text"),
        norms=_BEHIND,
        before=("input_layernorm", "pre_feedforward_layernorm"),
        normed_values=True,
    ),
    Family(
        ("granite", "granite_swa"),
        factor="residual_multiplier",
        towers=("granite4_vision_text", "granite_docling_text"),
    ),
    Family(("hyperclovax",), norms=("post_norm1", "post_norm2"), normed="use_post_norm", factor="residual_multiplier"),
    Family(("vaultgemma",), before=("input_layernorm", "pre_feedforward_layernorm")),
    Family(
        ("apertus", "apertus1p5_text"), up=("mlp.up_proj",), before=("attention_layernorm", "feedforward_layernorm")
    ),
    Family(("arcee", "jais2", "nemotron"), up=("mlp.up_proj",)),
    Family(("nanochat",), up=("mlp.fc1",), down="mlp.fc2", towers=("cosmos3_edge_text",)),
    Family(("starcoder2",), up=("mlp.c_fc",), down="mlp.c_proj"),
    Family(
        ("phi",),
        last_norm="model.final_layernorm",
        output="self_attn.dense",
        up=("mlp.fc1",),
        down="mlp.fc2",
        before=("", ""),
    ),
    _OPT(
        ("opt",),
        "model.decoder.layers",
        "model.decoder.final_layer_norm",
        neurons="ffn_dim",
        pre_norm="do_layer_norm_before",
    ),
    _OPT(("xglm",), last_norm="model.layer_norm", neurons="ffn_dim"),
    _OPT(("biogpt",), "biogpt.layers", "biogpt.layer_norm"),
    Family(("glm",), up=("mlp.gate_up_proj",), blocks=2),
    Family(
        ("glm4",),
        up=("mlp.gate_up_proj",),
        blocks=2,
        norms=("post_self_attn_layernorm", "post_mlp_layernorm"),
        towers=("glm4v_text", "glm_ocr_text"),
    ),
    Family(
        ("phi3",),
        qkv=("self_attn.qkv_proj",),
        up=("mlp.gate_up_proj",),
        blocks=2,
        towers=("phi4_multimodal",),
    ),
    _GPT(
        ("gpt2", "gpt_bigcode"),
        qkv=("attn.c_attn",),
        output="attn.c_proj",
        up=("mlp.c_fc",),
        down="mlp.c_proj",
        neurons="n_inner",
        before=("ln_1", "ln_2"),
    ),
    _GPT_J(("gptj",), qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj")),
    _GPT_J(("codegen",), qkv=("attn.qkv_proj",)),
    _GPT(
        ("ctrl",),
        last_norm="transformer.layernorm",
        qkv=("multi_head_attention.Wq", "multi_head_attention.Wk", "multi_head_attention.Wv"),
        output="multi_head_attention.dense",
        up=("ffn.0",),
        down="ffn.2",
        neurons="dff",
        before=("layernorm1", "layernorm2"),
    ),
    Family(
        ("modernbert-decoder",),
        last_norm="model.final_norm",
        qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        output="attn.Wo",
        up=("mlp.Wi",),
        down="mlp.Wo",
        blocks=2,
        before=("attn_norm", "mlp_norm"),
    ),
    _BLOOM(("bloom",), neurons=""),
    _BLOOM(("falcon",), neurons="ffn_hidden_size", before=("", "")),
    Family(
        ("mpt",),
        layers="transformer.blocks",
        last_norm="transformer.norm_f",
        qkv=("attn.Wqkv",),
        output="attn.out_proj",
        up=("ffn.up_proj",),
        down="ffn.down_proj",
        neurons="",
        before=("norm_1", "norm_2"),
        skips=(False, False),
    ),
    Family(
        ("persimmon",),
        last_norm="model.final_layernorm",
        qkv=("self_attn.query_key_value",),
        output="self_attn.dense",
        **_FOUR_TIMES,
    ),
    Family(
        ("gpt_neox",),
        layers="gpt_neox.layers",
        last_norm="gpt_neox.final_layer_norm",
        qkv=("attention.query_key_value",),
        output="attention.dense",
        **_FOUR_TIMES,
    ),
)
_FAMILIES: Mapping[str, Family] = MappingProxyType(
    {model_type: family for family in _ALL for model_type in (*family.model_types, *family.towers)}
)

_DECODERS = {
    "model.language_model": (
        *("apertus1p5", "aya_vision", "cohere2_vision", "cosmos3_edge", "cosmos3_omni", "deepseek_vl"),
        *(
            "deepseek_vl_hybrid",
            "exaone4_5",
            "fuyu",
            "gemma3",
            "gemma4",
            "gemma4_unified",
            "glm46v",
            "glm4v",
            "glm_ocr",
            "glmga",
            "got_ocr2",
        ),
        *("granite4_vision", "hunyuan_vl", "hyperclovax_vision_v2", "internvl", "janus", "lighton_ocr", "llava"),
        *("llava_next", "llava_next_video", "llava_onevision", "minicpm_ocr", "minicpmv4_6", "minicpmv4_7"),
        *("lfm2_vl", "mistral3", "moss_transcribe_diarize", "ovis2", "paddleocr_vl", "paligemma", "pp_chart2table"),
        *("qianfan_ocr", "qwen2_5_omni_thinker", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_vl", "video_llama_3"),
        *("video_llava", "vipllava"),
        *("aria", "glm4v_moe", "kimi_k25", "qwen3_5_moe", "qwen3_omni_moe_thinker", "qwen3_vl_moe"),
    ),
    "model": ("phi4_multimodal",),
    "model.text_model": ("emu3", "granite_docling", "idefics2", "idefics3", "smolvlm"),
}
_WRAPPERS: Mapping[str, str] = MappingProxyType(
    {model_type: decoder for decoder, model_types in _DECODERS.items() for model_type in model_types}
)
"""Multimodal models that run on text alone, by model type, and the name of the decoder in each."""


def supported() -> tuple[str, ...]:
    """Model types of the causal language models that GAC takes."""
    return tuple(sorted(model_type for family in _ALL for model_type in family.model_types))


def wrappers() -> tuple[str, ...]:
    """Model types of the multimodal models that GAC takes around a decoder of a supported layout."""
    return tuple(sorted(_WRAPPERS))


def mixtures() -> tuple[str, ...]:
    """Those of ``supported`` that may have routed experts."""
    return tuple(sorted(model_type for family in _ALL if family.experts for model_type in family.model_types))


def is_supported(model_type: str) -> bool:
    """Return whether this is the type of a model that GAC takes, or of a decoder within one."""
    return model_type in _FAMILIES or model_type in _WRAPPERS


def family_of(config: Any) -> Family:
    """The family of a transformers config, dense or compressed; of a multimodal one, that of its decoder within it.

    A ModelError names what makes it another kind of model.
    """
    model_type = model_type_of(config)
    decoder, experts = _WRAPPERS.get(model_type), experts_of(config)
    family = _FAMILIES.get(model_type if decoder is None else model_type_of(text_config(config)))
    text = text_config(config)
    if (
        family is not None
        and family.mixer
        and family.mixer.kind not in ("", *(getattr(text, "layer_types", None) or ()))
    ):
        family = replace(family, mixer=None)
    if family is not None and family.experts:
        experts = 0
        if not getattr(text, family.experts.count, None) or (family.divided and ROUTED not in text.layer_types):
            family = replace(family, experts=None)
    linked = "" if family is None else _linked(text)
    if family is not None and not experts and not linked:
        return family if decoder is None else family.within(decoder)
    if linked and not experts:
        expected = "layers that take hidden states alone, as in the larger dense models of Gemma 4"
        raise ModelError(f"model type {model_type!r}, with layers that also take {linked}", expected, _DECODER)
    kind, expected, remedy = "", f"a supported architecture ({', '.join(supported())})", _OTHER
    if experts:
        kind = f", a mixture of experts ({experts} experts a layer)"
        expected = (
            f"one MLP a layer, which every token passes, or a mixture of a known layout ({', '.join(mixtures())})"
        )
    if family is None:
        kind, expected, remedy = _another_kind(config) or (kind, expected, remedy)
    raise ModelError(f"model type {model_type!r}{kind}", expected, remedy)


_OTHER = "Use a model of one of these architectures."
_RECURRENT = re.compile(
    r"mamba_\w+|ssm_\w+|state_size|conv_kernel|conv_L_cache|linear_num_\w+|block_types|rescale_every|qk_dim_factor"
)
_RECURRENT_LAYERS = {"linear_attention", "recurrent", "mamba", "conv", "hybrid"}


def _another_kind(config: Any) -> tuple[str, str, str] | None:
    text = text_config(config)
    kinds = {str(kind) for kind in getattr(text, "layer_types", None) or ()}
    if getattr(config, "is_encoder_decoder", False):
        return ", an encoder-decoder", "a decoder alone", _DECODER
    if experts_of(config) and model_type_of(config) not in _NOT_TAKEN:
        return None
    if kinds & _RECURRENT_LAYERS or any(map(_RECURRENT.fullmatch, dir(text))):
        mixed = sorted(model_type for family in _ALL if family.mixer for model_type in family.model_types)
        expected = f"attention in every layer, or layers as in one of {', '.join(mixed)}"
        return ", with layers of state spaces, convolutions or linear attention", expected, _DECODER
    if text is not config or hasattr(config, "vision_config"):
        kind = f", a multimodal model {_NOT_TAKEN.get(model_type_of(config), f'around a {model_type_of(text)}')}"
        remedy = "Use its language model, saved as a model of its own, if its architecture is supported."
        return kind, f"a language model, or a multimodal one of {', '.join(wrappers())}, around one", remedy
    if getattr(config, "kv_lora_rank", None):
        expected = "keys and values that are projected from the hidden state"
        return ", with multi-head latent attention", expected, _DECODER
    if getattr(config, "is_decoder", None) is False:
        return ", an encoder", "a decoder", _DECODER
    return None


_IMAGES = "that runs on no text without an image"
_NOT_TAKEN = {
    **dict.fromkeys(("blip-2", "instructblip", "instructblipvideo"), _IMAGES),
    **dict.fromkeys(("fast_vlm", "perception_lm"), "whose images are read by a model of the package timm"),
    "llama4": "whose class in transformers 5.24 runs on no text without an image",
    "shieldgemma2": "that classifies images and writes no text",
}
"""Multimodal models around a decoder of a supported layout, and what keeps them from being taken."""
_DECODER = "Use a decoder that transformers loads as a causal language model, such as Llama."


_LINKS = {
    "num_kv_shared_layers": "keys and values of other layers",
    "hidden_size_per_layer_input": "embeddings of their own",
}


def _linked(config: Any) -> str:
    named = (f"{what} ({name} {size})" for name, what in _LINKS.items() if (size := getattr(config, name, None)))
    return " and ".join(named)
