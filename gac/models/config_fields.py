"""Fields of a model's config that no model can have: refused when it is opened, not when it first runs."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gac.core.errors import GacError
from gac.core.untrusted import read_model_json
from gac.models.experts import ROUTED, STEPS
from gac.models.families import MOST_LAYERS, family_of, is_supported, text_config
from gac.models.family import ALONE
from gac.models.sites import LARGEST_SIZE
from gac.runtime.contract import COMPRESSED

_LAYERS = ("num_hidden_layers", "n_layer")
_SIZES = (
    *("vocab_size", "hidden_size", "n_embd", "num_attention_heads", "n_head", "num_key_value_heads", "head_dim"),
    *("max_position_embeddings", "n_positions", "sliding_window", "word_embed_proj_dim"),
    *("intermediate_size", "ffn_dim", "n_inner", "shared_intermediate_size", "block_multiple_of", *STEPS),
)
_NONE_AT_0 = ("sliding_window", "shared_intermediate_size")
"""Sizes that are 0 where there is none: windows of Qwen 2 with experts, shared experts of Granite."""
_ROPE_TYPES = ("default", *ROPE_INIT_FUNCTIONS)
_OLD_ROPE_TYPES = ("mrope", "su", "xdrope")  # of Qwen2-VL, the first Phi-3 and HunYuan, which transformers reads
_SHARES = (
    *("attention_dropout", "dropout", "hidden_dropout", "embd_pdrop", "attn_pdrop", "resid_pdrop", "layerdrop"),
    *("partial_rotary_factor", "rotary_pct"),
)
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
_ROPE = ("rope_parameters", "rope_scaling")
_COUNTS = (
    *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "num_beams", "num_beam_groups", "top_k"),
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "max_matching_ngram_size", "num_return_sequences"),
    *("num_assistant_tokens", "prompt_lookup_num_tokens", "prefill_chunk_size", "max_cache_len"),
)
_NUMBERS = (
    *("temperature", "top_p", "top_h", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "max_time"),
    *("repetition_penalty", "encoder_repetition_penalty", "length_penalty", "diversity_penalty", "penalty_alpha"),
    *("guidance_scale", "assistant_confidence_threshold"),
)
_SWITCHES = ("do_sample", "use_cache", "renormalize_logits", "remove_invalid_values", "token_healing")
_TOKENS = ("suppress_tokens", "begin_suppress_tokens")
_FULL, _SLIDING = "full_attention", "sliding_attention"
_SHOWN = 40


def check_content(content: Mapping[str, Any]) -> None:
    """Refuse the content of a ``config.json`` before transformers makes a config of it, with as many entries as layers.

    A ValueError names the field. Of architectures that are not supported only the number of layers is looked at.
    """
    for part in (part for part in (content, content.get("text_config")) if isinstance(part, dict)):
        for name in _LAYERS:
            count = part.get(name, 1)
            if not isinstance(count, int) or not 1 <= count <= MOST_LAYERS:
                raise ValueError(f"{name} is {str(count)[:_SHOWN]}, and not from 1 to {MOST_LAYERS:,}")
        if not isinstance(part.get("quantization_config") or {}, dict):
            raise _wrong("quantization_config", part["quantization_config"], "an object")
        if is_supported(str(part.get("model_type")).removeprefix(COMPRESSED)):
            _check_fields(part)


def check_config(config: Any) -> None:
    """Refuse a transformers config whose layers have attentions that its architecture lacks, by a ValueError."""
    config = text_config(config)
    kinds = getattr(config, "layer_types", None)
    if kinds is None or not is_supported(str(config.model_type).removeprefix(COMPRESSED)):
        return
    if len(kinds) != config.num_hidden_layers:
        raise ValueError(f"layer_types has {len(kinds)} entries, and not {config.num_hidden_layers}, one a layer")
    family = family_of(config)
    known = (_FULL, family.mixer.kind if family.mixer else family.window, *((ALONE, ROUTED) if family.divided else ()))
    if wrong := [kind for kind in kinds if kind not in known]:
        raise _wrong("layer_types", wrong[0], " or ".join(known))
    if _SLIDING in kinds and not (window := getattr(config, "sliding_window", None)):
        raise _wrong("sliding_window", window, f"a number of tokens, for layer_types has {_SLIDING}")


def check_generation_config(folder: Path, error: type[GacError]) -> None:
    """Refuse a ``generation_config.json`` whose fields have types that ``generate`` cannot use; there need be none.

    An ``error`` says if the file cannot be read; a ValueError names the field.
    """
    if os.path.lexists(path := folder / "generation_config.json"):
        _check_generation(read_model_json(path, "the generation config of a model", error))


def _check_generation(content: Mapping[str, Any]) -> None:
    for name, value in ((name, value) for name, value in content.items() if value is not None):
        if name in _COUNTS and not _is_number(value, int):
            raise _wrong(name, value, "an integer")
        if name in _NUMBERS and not _is_number(value):
            raise _wrong(name, value, "a number")
        if name in _SWITCHES and not isinstance(value, bool):
            raise _wrong(name, value, "true or false")
        if (name.endswith("_token_id") or name in _TOKENS) and not all(
            _is_number(token, int) and -1 <= token <= LARGEST_SIZE  # -1 stands for none
            for token in (value if isinstance(value, list) else [value])
        ):
            raise _wrong(name, value, f"a token, or a list of tokens, each up to {LARGEST_SIZE:,}")


def _check_fields(part: Mapping[str, Any]) -> None:
    for name, value in ((name, value) for name, value in part.items() if value is not None):
        least = int(name not in _NONE_AT_0)
        if name in _SIZES and not (_is_number(value, int) and least <= value <= LARGEST_SIZE):
            raise _wrong(name, value, f"an integer from {least} to {LARGEST_SIZE:,}")
        if name == "query_pre_attn_scalar" and not (_is_number(value) and value > 0):
            raise _wrong(name, value, "a number above 0")
        if name in _SHARES and not (_is_number(value) and 0 <= value <= 1):
            raise _wrong(name, value, "a number from 0 to 1")
        if name in _ACTIVATIONS and (not isinstance(value, str) or value not in ACT2FN):
            raise _wrong(name, value, "an activation of transformers")
        if name in _ROPE:
            _check_rope(name, value)
    _check_generation(part)
    kinds = part.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)):
        raise _wrong("layer_types", kinds, "a list of names, one a layer")


def _check_rope(name: str, rope: Any) -> None:
    if not isinstance(rope, dict):
        raise _wrong(name, rope, "an object")
    for key, value in rope.items():
        if key in ("rope_type", "type"):
            if value not in _ROPE_TYPES + _OLD_ROPE_TYPES:
                raise _wrong(f"{name}.{key}", value, f"one of {', '.join(_ROPE_TYPES)}")
        elif isinstance(value, dict):
            _check_rope(f"{name}.{key}", value)
        elif not all(map(_is_number, value)) if isinstance(value, list) else isinstance(value, str):
            raise _wrong(f"{name}.{key}", value, "a number, or a list of numbers")


def _is_number(value: Any, kind: Any = int | float) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _wrong(name: str, value: Any, expected: str) -> ValueError:
    return ValueError(f"{name} is {str(value)[:_SHOWN]}, and not {expected}")
