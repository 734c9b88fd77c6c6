"""Perplexity by one protocol, which every number carries with it."""

import os
from dataclasses import dataclass
from math import exp, isfinite
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import PreTrainedModel

from gac.display import Shown
from gac.errors import ModelError, TextError
from gac.plan import Plan
from gac.sensitivity.documents import DEFAULT_LENGTH, Documents, Text
from gac.sensitivity.layerwise import frozen
from gac.sensitivity.text import (
    Windows,
    check_vocabulary,
    evaluation_windows,
    text_names,
    text_windows,
)

_POSITIONS = 512  # float32 logits are made for this many positions at a time: 256 MB at 128k words


@dataclass(frozen=True, repr=False)
class Perplexity(Shown):
    """A perplexity and how it was come by.

    Attributes:
        value: exp of the mean negative log-likelihood.
        tokens: how many tokens were predicted.
        protocol: text, windows, length, where they begin, overlap, BOS.
        dtype: of the model's weights.
    """

    value: float
    tokens: int
    protocol: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.protocol}; {self.tokens:,} tokens predicted, {self.dtype})"


def perplexity(
    model: PreTrainedModel,
    tokenizer: Any,
    text: Text = "wiki-sample",
    *,
    windows: int | None = None,
    length: int = DEFAULT_LENGTH,
    batch: int = 1,
    progress: bool = True,
) -> Perplexity:
    """Measure perplexity on windows that do not overlap; all but the first token of each are predicted.

    The model runs where it is and as it is; its logits are taken to float32, and the sum to float64.

    Args:
        text: a named source (its evaluation part), a path to a UTF-8 file, the text itself, or documents.
        windows: how many, from the first on; None takes every whole window.
        length: tokens of a window.
        batch: windows that run at once; logits take ``batch * length * vocabulary`` elements.
        progress: show a bar on a terminal.

    Raises:
        TextError: unknown or too short a text, a document that the model's plan was calibrated on, or a tokenizer of
            another model.
        ModelError: the loss of a window is NaN or infinite.
    """
    if length < 2:
        raise TextError(f"windows of {length} tokens", "at least 2: the first is not predicted", "Ask for more.")
    given = _given(text)
    if isinstance(given, Documents):
        _check_unseen(given, model)
        cut = text_windows(given.name, given.text, tokenizer, windows, length)
    else:
        cut = evaluation_windows(given, tokenizer, windows, length)
    embedding: Any = model.get_input_embeddings()
    check_vocabulary(cut, embedding.num_embeddings)
    total = 0.0
    with frozen(model), torch.inference_mode():
        bar = tqdm(total=len(cut), desc="perplexity", unit="window", leave=False, disable=None if progress else True)
        with bar:
            for first in range(0, len(cut), batch):
                losses = _window_losses(model, cut.ids[first : first + batch].to(model.device))
                _check_losses(losses, first)
                total += sum(losses)
                bar.update(len(losses))
    tokens = len(cut) * (length - 1)
    return Perplexity(exp(total / tokens), tokens, _protocol(cut), str(model.dtype).removeprefix("torch."))


def _window_losses(model: PreTrainedModel, ids: torch.Tensor) -> list[float]:
    """Summed negative log-likelihood of each window, float64; ids has shape ``(batch, length)``."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    targets = ids[:, 1:]
    total = torch.zeros(len(ids), dtype=torch.float64, device=ids.device)
    for start in range(0, targets.shape[1], _POSITIONS):
        part = slice(start, start + _POSITIONS)
        losses = cross_entropy(logits[:, part].float().transpose(1, 2), targets[:, part], reduction="none")
        total += losses.double().sum(dim=1)
    return [float(loss) for loss in total]


def _check_losses(losses: list[float], first: int) -> None:
    for offset, loss in enumerate(losses):
        if not isfinite(loss):
            raise ModelError(
                f"the loss of window {first + offset} is {loss}",
                "a finite loss",
                "Check the weights, or run the model in bfloat16 or float32.",
            )


def _given(text: Text) -> str | Documents:
    """A name or path, or else documents; a string with white space in it that is neither is one document."""
    if not isinstance(text, str):
        return Documents.of(text)
    is_text = any(character.isspace() for character in text) and not os.path.isfile(text)
    return Documents([text]) if is_text and text not in text_names() else text


def _check_unseen(documents: Documents, model: nn.Module) -> None:
    plan = getattr(model, "gac_plan", None)
    seen = set(plan.calibration.documents) if isinstance(plan, Plan) else set()
    met = [at for at, digest in enumerate(documents.digests) if digest in seen]
    if met:
        raise TextError(
            f"{len(met)} of {documents.name}, the first at position {met[0]}, are among the plan's calibration text",
            "text that the model was not calibrated on",
            "Hold documents back for evaluation.",
        )


def _protocol(cut: Windows) -> str:
    return f"{cut.name}, {len(cut)} windows x {cut.length} from token {cut.start}, non-overlapping, no BOS"
