"""Small random multimodal models: a decoder of two layers, and vision and projectors as small as they can be."""

import re
from inspect import signature
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedModel

from gac.models.families import family_of, text_config
from gac.runtime.architectures import generating_class
from gac.runtime.contract import COMPRESSED
from tests.models.small import LATENTS, NEURONS, ODD, SMALL, routed

IMAGE_TOKEN = 255
"""Stands for a feature of an image in the ids of the small models."""
_TEXT = SMALL | {"head_dim": 16, "intermediate_size": NEURONS}
_TOKENS = ("image_token_id", "image_token_index", "media_placeholder_token_id")
_OTHERS = {
    **dict.fromkeys(("hidden_size", "embed_dim", "d_model"), 32),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "depth", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "num_key_value_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("out_hidden_size", "projection_dim", "text_hidden_size"), SMALL["hidden_size"]),
    **dict.fromkeys(("base_channels", "num_filters", "codebook_dim", "encoder_hidden_size", "mlp_dim"), 32),
    **dict.fromkeys(("codebook_size", "num_embeddings"), 100),
    "head_dim": 8,
    "image_size": 28,
    "patch_size": 14,
    "mlp_ratio": 2,
    "num_res_blocks": 1,
    "num_residual_layers": 1,
}
"""Sizes of all that is not the decoder, where a config has them."""
_MROPE = re.compile("(cosmos3_edge|glm|hunyuan|paddleocr|qwen2|qwen3_omni|qwen3_vl).*_text$")
_DELTA_NETS = ODD["qwen3_5_text"] | {"layer_types": ["linear_attention", "full_attention"]}
_GEMMA_4 = {
    "layer_types": ["sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
}
_MORE: dict[str, dict[str, Any]] = {
    "apertus1p5": {
        "text_config": {"vocab_size": 1024},
        "image_token_offset": 300,
        "audio_token_offset": 400,
    },
    "emu3": {"vocabulary_map": {"<|extra_200|>": 250, "<image>": IMAGE_TOKEN, "<|visual token 000000|>": 200}},
    "cohere2_vision": {"alignment_intermediate_size": 64},
    "ovis2": {"vision_config": {"vocab_size": 100}},
    "gemma3": {"mm_tokens_per_image": 1},
    "qwen2_vl": {"vision_config": {"hidden_size": SMALL["hidden_size"]}},
    "granite4_vision": {
        "deepstack_layer_map": [[-1, 0]],
        "spatial_target_layers": [1],
        "downsample_rate": "1/2",
        "vision_config": {"hidden_size": 64},
    },
    "gemma4": {
        "text_config": _GEMMA_4,
        "vision_config": _OTHERS | {"head_dim": 8, "position_embedding_size": 64},
    },
    "gemma4_unified": {"text_config": _GEMMA_4, "vision_config": {"mm_embed_dim": 32, "mm_posemb_size": 16}},
    "lfm2_vl": {
        "text_config": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 16},
        "vision_config": {"num_patches": 16},
    },
    "idefics2": {"perceiver_config": {"hidden_size": SMALL["hidden_size"]}},
    "internvl": {"vision_config": {"image_size": [28, 28], "patch_size": [14, 14]}},
    "paligemma": {"projection_dim": SMALL["hidden_size"]},
    **{key: {"vision_start_token_id": 252} for key in ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")},
    **{
        key: {"text_config": _DELTA_NETS}
        for key in ("minicpm_ocr", "minicpmv4_6", "minicpmv4_7", "qwen3_5", "qwen3_5_moe")
    },
    "qianfan_ocr": {"vision_config": {"image_size": [28, 28], "patch_size": [14, 14]}},
}
"""What some need besides."""


_PLAIN = ("aya_vision", "cohere2_vision", "gemma3", "internvl", "llava", "paligemma", "qianfan_ocr", "video_llava")
_TILES = ("idefics2", "idefics3", "smolvlm")
_PATCHES = ("lfm2_vl",)
_SIZED = ("lighton_ocr", "mistral3")
_GRIDS = (
    *("cosmos3_omni", "exaone4_5", "glm46v", "glm4v", "glm_ocr", "glmga", "qwen2_5_omni_thinker", "qwen2_5_vl"),
    *("qwen2_vl", "qwen3_5", "qwen3_vl"),
)
WITH_IMAGES = (*_PLAIN, *_TILES, *_PATCHES, *_SIZED, *_GRIDS)
"""Those of which ``image_inputs`` knows how they take an image."""


def wrapper_config(model_type: str, **changed: Any) -> Any:
    """A decoder of two layers and a hidden size of 64, and other parts of at most two layers and 32.

    ``changed`` are fields, or those of a part as an object.
    """
    kind = CONFIG_MAPPING[model_type]
    default, fields = kind(), _MORE.get(model_type, {}) | changed
    text = text_config(default)
    if text is default:
        fields = _TEXT | fields
    for name, part in vars(default).items():
        if hasattr(part, "to_dict"):
            sizes = _text_sizes(default, part) if part is text else _OTHERS
            fields[name] = _resized(part, sizes | fields.get(name, {}))
    tokens = {name: IMAGE_TOKEN for name in _TOKENS if name in vars(default)}
    return kind(**tokens | fields)


def _text_sizes(default: Any, text: Any) -> dict[str, Any]:
    for name in {"num_kv_shared_layers", "hidden_size_per_layer_input"} & {*vars(text)}:
        setattr(text, name, 0)  # of Gemma 4 E2B, which the default is, and which is refused
    latents = LATENTS if getattr(text, "kv_lora_rank", None) else {}
    return _TEXT | routed(family_of(default), vars(text), _TEXT) | latents


def _resized(part: Any, sizes: dict[str, Any]) -> Any:
    rope, known = getattr(part, "rope_parameters", None) or {}, vars(part)
    named = {part.attribute_map.get(name, name): value for name, value in sizes.items()}
    named = {name: type(known[name] or value)(value) for name, value in named.items() if name in known}
    if _MROPE.match(part.model_type):
        length = named["head_dim"] if "head_dim" in known else named["hidden_size"] // named["num_attention_heads"]
        length = int(length * rope.get("partial_rotary_factor", 1))
        named["rope_parameters"] = rope | {
            "mrope_section": [length // 2 - 2 * (section := 3 * length // 16), section, section]
        }
    return type(part)(**named)


def wrapper_model(config: Any) -> PreTrainedModel:
    """Random weights, the same every time, none of which is zero throughout."""
    torch.manual_seed(0)
    model: PreTrainedModel = generating_class(type(config))._from_config(config).eval()
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def image_inputs(model: Any) -> dict[str, Any]:
    """A random image among eight tokens of text, as the model takes them: ids, pixels, and what describes them."""
    torch.manual_seed(1)
    model_type, inputs = model.config.model_type.removeprefix(COMPRESSED), dict[str, Any]()
    side = 56 if model_type in _SIZED else 28
    inputs["pixel_values"] = torch.randn((1, 1, 3, side, side) if model_type in _TILES else (1, 3, side, side))
    if model_type in _SIZED:
        inputs["image_sizes"] = torch.tensor([[side, side]])
    if model_type in _PATCHES:
        size = model.config.vision_config.patch_size
        inputs = {
            "pixel_values": torch.randn(1, 16, 3 * size * size),
            "spatial_shapes": torch.tensor([[4, 4]]),
            "pixel_attention_mask": torch.ones(1, 16, dtype=torch.long),
        }
    if model_type in _GRIDS:
        inputs = {"pixel_values": torch.randn(16, 3 * 2 * 14 * 14), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    with torch.no_grad():
        features = model.get_image_features(**inputs).pooler_output
    count = sum(part.shape[:-1].numel() for part in ([features] if isinstance(features, torch.Tensor) else features))
    ids = torch.tensor([[*range(5), *[IMAGE_TOKEN] * count, *range(10, 13)]])
    if "mm_token_type_ids" in signature(model.forward).parameters:
        inputs["mm_token_type_ids"] = (ids == IMAGE_TOKEN).long()
    if "token_type_ids" in signature(model.forward).parameters:
        inputs["token_type_ids"] = (ids == IMAGE_TOKEN).long()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **inputs}
