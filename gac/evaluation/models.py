"""Open the models to evaluate: dense ones and compressed checkpoints alike."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from gac.checkpoint.load import load
from gac.core.errors import ModelError
from gac.models.loading import Loaded, is_checkpoint, load_model, load_tokenizer

ModelOrName = PreTrainedModel | str | Path
"""A loaded model, or the name of one: a directory (a compressed one too), a hub id, ``smollm2``."""


def open_model(
    model: ModelOrName, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> Loaded:
    """Load a dense model, or a compressed one with its plan as ``gac_plan``; a loaded model is not changed."""
    if isinstance(model, str | Path) and is_checkpoint(model):
        return Loaded(load(str(model), device, dtype), str(model), str(model))
    return load_model(model, device=device, dtype=dtype)


def shared_tokenizer(models: Sequence[ModelOrName]) -> Any:
    """The tokenizer of the first model, if all models have the same vocabulary.

    Raises:
        ModelError: a model has no tokenizer, or two vocabularies differ.
    """
    (first, shared), *others = map(_name_and_tokenizer, models)
    for name, tokenizer in others:
        if tokenizer.get_vocab() != shared.get_vocab():
            raise ModelError(
                f"{first} and {name} have different vocabularies",
                "models of one vocabulary: perplexity per token compares nothing else",
                "Evaluate each on its own.",
            )
    return shared


def _name_and_tokenizer(model: ModelOrName) -> tuple[str, Any]:
    if isinstance(model, str | Path):
        return str(model), load_tokenizer(str(model))
    loaded = load_model(model)
    return loaded.name, loaded.tokenizer
