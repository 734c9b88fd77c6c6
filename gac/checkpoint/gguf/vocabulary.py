"""A tokenizer in the header of a GGUF file: byte-level BPE, with the splits that llama.cpp has a name for."""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from gac.checkpoint.gguf.package import ELSEWHERE
from gac.core.errors import CheckpointError

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_Steps = tuple[tuple[Any, ...], ...]
_SPLITS: Mapping[_Steps, str] = MappingProxyType(
    {
        (("ByteLevel", True),): "gpt-2",
        (("Digits", True), ("ByteLevel", True)): "smollm",
        (("Split", _WORDS.format(digits=r"\p{N}"), "Isolated"), ("ByteLevel", False)): "qwen2",
        (("Split", _WORDS.format(digits=r"\p{N}{1,3}"), "Isolated"), ("ByteLevel", False)): "llama-bpe",
    }
)
"""What llama.cpp calls the ways in which text is split before it is merged."""
_WHOLE_WORDS = ("llama-bpe",)
"""Those with which llama.cpp takes a word that is a token as it is, without merging (``ignore_merges``)."""


def add_vocabulary(writer: Any, tokenizer: Any, size: int) -> None:
    """Write tokens, merges, special tokens and chat template into the header of a ``gguf.GGUFWriter``.

    Args:
        tokenizer: of transformers.
        size: rows of the embedding; rows without a token get names that no text has.

    Raises:
        CheckpointError: llama.cpp has no such tokenizer, or it has more tokens than the model.
    """
    backend = _backend(tokenizer)
    split = _split(tokenizer, backend)
    tokens, types = _tokens(tokenizer, size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in backend["merges"]])
    for kind in ("bos", "eos", "unk", "pad"):
        if (token := getattr(tokenizer, f"{kind}_token_id", None)) is not None:
            getattr(writer, f"add_{kind}_token_id")(token)
    before, behind = _around(tokenizer)
    writer.add_add_bos_token(before)
    writer.add_add_eos_token(behind)
    writer.add_add_space_prefix(False)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def _backend(tokenizer: Any) -> dict[str, Any]:
    """The model of a byte-level BPE tokenizer, as its JSON has it."""
    if not getattr(tokenizer, "is_fast", False):
        raise _refused(tokenizer, "which has no tokenizer.json")
    document = json.loads(tokenizer.backend_tokenizer.to_str())
    model = document["model"]
    plain = not (
        model.get("byte_fallback") or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
    )
    if model["type"] != "BPE" or not plain or (document.get("decoder") or {}).get("type") != "ByteLevel":
        raise _refused(tokenizer, f"whose model is {model['type']}" + ("" if plain else " and not byte-level"))
    if not model["merges"]:
        raise _refused(tokenizer, "which has no merges")
    if (document.get("normalizer") or {"type": "NFC"})["type"] != "NFC":
        raise _refused(tokenizer, f"whose normalizer is {document['normalizer']['type']}")
    return dict(model) | {"split": document.get("pre_tokenizer")}


def _split(tokenizer: Any, backend: Mapping[str, Any]) -> str:
    """What llama.cpp calls the way in which it splits text."""
    given = backend["split"] or {}
    steps = given["pretokenizers"] if given.get("type") == "Sequence" else [given]
    name = _SPLITS.get(tuple(map(_step, steps)))
    if name is None or bool(backend.get("ignore_merges")) != (name in _WHOLE_WORDS):
        told = json.dumps(given)[:120]
        raise _refused(tokenizer, f"which splits text otherwise: {told}")
    return name


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


def _around(tokenizer: Any) -> tuple[bool, bool]:
    """Whether BOS is put before a text, and EOS behind it."""
    bare = tokenizer("x", add_special_tokens=False)["input_ids"]
    whole = tokenizer("x")["input_ids"]
    before = whole[:1] == [tokenizer.bos_token_id] and whole != bare
    behind = len(whole) > len(bare) + before
    due = [*([tokenizer.bos_token_id] if before else []), *bare, *([tokenizer.eos_token_id] if behind else [])]
    if whole != due:
        raise _refused(tokenizer, "which puts other tokens around a text than BOS and EOS")
    return before, behind


def _refused(tokenizer: Any, why: str) -> CheckpointError:
    return CheckpointError(
        f"a {type(tokenizer).__name__} {why}",
        f"byte-level BPE that splits text as one of {', '.join(_SPLITS.values())} in llama.cpp",
        ELSEWHERE,
    )
