"""Models and tokenizers to evaluate, whether GAC compressed them or not."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from gac.checkpoint.load import load
from gac.errors import ModelError
from gac.models.loading import Loaded, is_checkpoint, load_model, load_tokenizer

Given = PreTrainedModel | str | Path
"""A loaded model, or the name of one: a directory (a compressed one too), a hub id, ``smollm2``."""


def open_model(given: Given, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Loaded:
    """A dense model, or a compressed one with its plan as ``gac_plan``; a loaded one is taken as it is.

    Raises:
        GacError: it cannot be read.
    """
    if isinstance(given, str | Path) and is_checkpoint(given):
        name = str(given)
        return Loaded(load(name, device, dtype), name, lambda: load_tokenizer(name))
    return load_model(given, device=device, dtype=dtype)


def shared_tokenizer(models: Sequence[Given]) -> Any:
    """The first model's tokenizer, where all models have the same tokens.

    Raises:
        ModelError: a model without a tokenizer, or two of different vocabularies.
    """
    (first, shared), *others = map(_name_and_tokenizer, models)
    for name, tokenizer in others:
        if tokenizer.get_vocab() != shared.get_vocab():
            raise ModelError(
                f"{first} and {name} have different vocabularies",
                "models of the same tokens: perplexities by the token compare nothing else",
                "Evaluate each on its own.",
            )
    return shared


def _name_and_tokenizer(given: Given) -> tuple[str, Any]:
    if isinstance(given, str | Path):
        return str(given), load_tokenizer(str(given))
    loaded = load_model(given)
    return loaded.name, loaded.tokenizer
