"""The header of a GGUF file: the sizes of an architecture, and a byte-level BPE tokenizer."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gac.core.errors import CheckpointError
from gac_extensions.deci import LayerSizes

ELSEWHERE = "Export the model without --gguf (gac.export), and convert the directory with llama.cpp's own script."
"""The remedy where llama.cpp may support what GAC does not write."""


@dataclass(frozen=True)
class Architecture:
    """An architecture of transformers in llama.cpp."""

    name: str  # in llama.cpp
    paired: bool  # rotary embeddings rotate neighbouring numbers of a head: rows of queries and keys are reordered
    fixed: Mapping[str, Any]  # required values of a config, for which llama.cpp has no key


_FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
_ARCHITECTURES = {
    "llama": Architecture("llama", True, _FIXED),
    "mistral": Architecture("llama", True, _FIXED | {"sliding_window": None}),
    "qwen2": Architecture("qwen2", False, _FIXED | {"use_sliding_window": False}),
    "qwen3": Architecture("qwen3", False, _FIXED | {"use_sliding_window": False}),
}
"""By the ``model_type`` of transformers. Each was read back and compared, by transformers and by llama.cpp."""


def architecture_of(config: Any) -> Architecture:
    """The architecture of a stock config.

    Raises:
        CheckpointError: the architecture was not tried, or llama.cpp has no key for a value of the config.
    """
    if config.model_type not in _ARCHITECTURES:
        expected = f"one that has been tried in llama.cpp ({', '.join(_ARCHITECTURES)})"
        raise CheckpointError(f"a model of the architecture {config.model_type}", expected, ELSEWHERE)
    architecture = _ARCHITECTURES[config.model_type]
    check_values(config, architecture)
    return architecture


def check_values(config: Any, architecture: Architecture) -> None:
    """Refuse with a CheckpointError a value of the config for which llama.cpp has no key."""
    rope = getattr(config, "rope_parameters", None) or {}
    for name, required in (*architecture.fixed.items(), ("rope_type", "default"), ("partial_rotary_factor", 1)):
        value = rope.get(name, getattr(config, name, required))
        if value != required:
            raise CheckpointError(
                f"a {config.model_type} config with {name} {value!r}",
                f"{required!r}, which llama.cpp takes for granted or GAC has not tried otherwise",
                ELSEWHERE,
            )


def head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def add_sizes(writer: Any, config: Any, layers: Sequence[LayerSizes] = ()) -> None:
    """Write the sizes of a stock config into the header of a ``gguf.GGUFWriter``; ``layers``: those of each layer."""
    size = head_dim(config)
    neurons, heads, groups = config.intermediate_size, config.num_attention_heads, config.num_key_value_heads
    if layers:
        neurons, groups = ([getattr(layer, name) for layer in layers] for name in ("neurons", "groups"))
        heads = [heads if layer.groups else 0 for layer in layers]
    writer.add_context_length(config.max_position_embeddings)
    writer.add_vocab_size(config.vocab_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(neurons)
    writer.add_head_count(heads)
    writer.add_head_count_kv(groups)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


# --- the tokenizer --------------------------------------------------------------------------------------------------

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: Mapping[tuple[tuple[Any, ...], ...], str] = {
    (("ByteLevel", True),): "gpt-2",
    (("Digits", True), ("ByteLevel", True)): "smollm",
    (("Split", _WORDS.format(digits=r"\p{N}"), "Isolated"), ("ByteLevel", False)): "qwen2",
    (("Split", _WORDS.format(digits=r"\p{N}{1,3}"), "Isolated"), ("ByteLevel", False)): "llama-bpe",
}
"""llama.cpp's names of pre-tokenizers."""
_IGNORE_MERGES = "llama-bpe"  # the one with which llama.cpp keeps a word that is a token, without merging


def add_vocabulary(writer: Any, tokenizer: Any, size: int) -> None:
    """Write tokens, merges, special tokens and chat template into the header of a ``gguf.GGUFWriter``.

    Of the ``size`` rows of the embedding, those without a token get names that occur in no text.
    """
    backend, split = _backend(tokenizer)
    tokens, types = _tokens(tokenizer, size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in backend["merges"]])
    for kind in ("bos", "eos", "unk", "pad"):
        if (token := getattr(tokenizer, f"{kind}_token_id", None)) is not None:
            getattr(writer, f"add_{kind}_token_id")(token)
    bos, eos = _added_tokens(tokenizer)
    writer.add_add_bos_token(bos)
    writer.add_add_eos_token(eos)
    writer.add_add_space_prefix(False)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def _backend(tokenizer: Any) -> tuple[dict[str, Any], str]:
    """The model of a byte-level BPE tokenizer, from its JSON, and llama.cpp's name of its pre-tokenizer."""
    if not getattr(tokenizer, "is_fast", False):
        raise _refused(tokenizer, "which has no tokenizer.json")
    document = json.loads(tokenizer.backend_tokenizer.to_str())
    model = document["model"]
    plain = not any(model.get(key) for key in ("byte_fallback", "continuing_subword_prefix", "end_of_word_suffix"))
    if model["type"] != "BPE" or not plain or (document.get("decoder") or {}).get("type") != "ByteLevel":
        raise _refused(tokenizer, f"whose model is {model['type']}" + ("" if plain else " and not byte-level"))
    if not model["merges"]:
        raise _refused(tokenizer, "which has no merges")
    if (document.get("normalizer") or {"type": "NFC"})["type"] != "NFC":
        raise _refused(tokenizer, f"whose normalizer is {document['normalizer']['type']}")
    split = document.get("pre_tokenizer") or {}
    steps = split["pretokenizers"] if split.get("type") == "Sequence" else [split]
    name = _SPLITS.get(tuple(map(_step, steps)))
    if name is None or bool(model.get("ignore_merges")) != (name == _IGNORE_MERGES):
        raise _refused(tokenizer, f"which splits text otherwise: {json.dumps(split)[:120]}")
    return model, name


def _step(step: Mapping[str, Any]) -> tuple[Any, ...]:
    kind = step.get("type")
    if kind == "ByteLevel" and not step["add_prefix_space"]:
        return kind, step["use_regex"]
    if kind == "Digits":
        return kind, step["individual_digits"]
    if kind == "Split" and not step["invert"]:
        return kind, step["pattern"].get("Regex"), step["behavior"]
    return (kind, None)


def _tokens(tokenizer: Any, size: int) -> tuple[list[str], list[int]]:
    """The text and the type of each row of the embedding."""
    names = {index: token for token, index in tokenizer.get_vocab().items()}
    if names and max(names) >= size:
        raise CheckpointError(
            f"a tokenizer with the token {max(names)}, {names[max(names)]!r}",
            f"tokens from 0 to {size - 1}, as many as the model's embedding has rows",
            "Give the model's own tokenizer.",
        )
    added = tokenizer.added_tokens_decoder
    types = {index: _CONTROL if token.special else _USER_DEFINED for index, token in added.items()}
    return (
        [names.get(index, f"[PAD{index}]") for index in range(size)],
        [types.get(index, _NORMAL) if index in names else _UNUSED for index in range(size)],
    )


def _added_tokens(tokenizer: Any) -> tuple[bool, bool]:
    """True if BOS is added before a text, and if EOS is added behind it."""
    bare = tokenizer("x", add_special_tokens=False)["input_ids"]
    ids = tokenizer("x")["input_ids"]
    bos = ids[:1] == [tokenizer.bos_token_id] and ids != bare
    eos = len(ids) > len(bare) + bos
    due = [*([tokenizer.bos_token_id] if bos else []), *bare, *([tokenizer.eos_token_id] if eos else [])]
    if ids != due:
        raise _refused(tokenizer, "which puts other tokens around a text than BOS and EOS")
    return bos, eos


def _refused(tokenizer: Any, reason: str) -> CheckpointError:
    return CheckpointError(
        f"a {type(tokenizer).__name__} {reason}",
        f"byte-level BPE that splits text as one of {', '.join(_SPLITS.values())} in llama.cpp",
        ELSEWHERE,
    )
