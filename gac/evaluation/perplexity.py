"""Perplexity by one protocol, which every number carries with it."""

from collections.abc import Iterator, Sequence
from math import exp, isfinite
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import PreTrainedModel

from gac.errors import ModelError
from gac.evaluation.protocol import Sample, dtype_of, take_sample
from gac.evaluation.results import Perplexity
from gac.sensitivity.documents import Text
from gac.sensitivity.layerwise import frozen

POSITIONS = 512
"""Float32 logits are made for this many positions at a time: 256 MB at 128k words."""


def perplexity(
    model: PreTrainedModel,
    tokenizer: Any,
    text: Text = "wiki-sample",
    *,
    windows: int | None = None,
    length: int | None = None,
    batch: int = 1,
    progress: bool = True,
) -> Perplexity:
    """Perplexity over windows of text that no calibration uses and that do not overlap.

    All but the first token of each window are predicted. The model runs where it is and as it is; its logits are taken
    to float32, and the sum to float64. ``wikitext2`` and ``c4`` are measured as published figures are: GPTQ's and
    SVD-LLM's protocols.

    Args:
        text: a named source (its evaluation part), a path to a UTF-8 file, the text itself, or documents.
        windows: how many, from the first on; None takes every whole window.
        length: tokens of a window; None takes 2048 for ``wikitext2`` and ``c4``, as published figures do, else 1024.
        batch: windows that run at once; logits take ``batch * length * vocabulary`` elements.
        progress: show a bar on a terminal.

    Raises:
        TextError: unknown or too short a text, a document that the model's plan was calibrated on, or a tokenizer of
            another model.
        ModelError: the loss of a window is NaN or infinite, or windows are longer than the model has positions.
    """
    return perplexity_on(model, take_sample(tokenizer, text, windows, length), batch, progress)


def perplexity_on(model: PreTrainedModel, sample: Sample, batch: int = 1, progress: bool = True) -> Perplexity:
    """As ``perplexity``, on a sample that is cut already.

    Raises:
        GacError: as for ``perplexity``.
    """
    sample.check(model)
    total = 0.0
    with frozen(model), torch.inference_mode():
        for first, ids in batches(sample, batch, "perplexity", progress):
            total += sum(finite_losses(window_losses(next_token_logits(model, ids), ids[:, 1:]), first))
    return perplexity_of(total, sample, model)


def perplexity_of(total: float, sample: Sample, model: PreTrainedModel) -> Perplexity:
    """The perplexity of a summed negative log-likelihood, nats.

    Raises:
        ModelError: it is beyond what a float can hold.
    """
    mean = total / sample.tokens
    try:
        return Perplexity(exp(mean), sample.tokens, sample.protocol, dtype_of(model))
    except OverflowError as failure:
        raise _not_finite(f"a mean loss of {mean:.0f} nats a token", "a finite perplexity") from failure


def batches(sample: Sample, batch: int, doing: str, progress: bool) -> Iterator[tuple[int, Tensor]]:
    """The number of a batch's first window, and the batch's ids, ``(batch, length)``, under a bar on a terminal."""
    cut = sample.cut
    with tqdm(total=len(cut), desc=doing, unit="window", leave=False, disable=None if progress else True) as bar:
        for first in range(0, len(cut), batch):
            ids = cut.ids[first : first + batch]
            yield first, ids
            bar.update(len(ids))


def next_token_logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Logits of all tokens but the first of each window, ``(batch, length - 1, vocabulary)``, where the model is."""
    logits: Tensor = model(input_ids=ids.to(model.device), use_cache=False).logits[:, :-1]
    return logits


def window_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Summed negative log-likelihood of each window, float64, shape ``(batch,)``.

    Args:
        logits: ``(batch, positions, vocabulary)``.
        targets: the tokens that came next, ``(batch, positions)``.
    """
    targets = targets.to(logits.device)
    total = torch.zeros(len(targets), dtype=torch.float64, device=logits.device)
    for part in parts(targets.shape[1]):
        # As rows: over the middle dimension of three, cross_entropy takes tens of times as long on a GPU.
        losses = cross_entropy(logits[:, part].float().flatten(0, 1), targets[:, part].flatten(), reduction="none")
        total += losses.double().view(len(targets), -1).sum(dim=1)
    return total


def parts(positions: int) -> Sequence[slice]:
    """Slices of at most ``POSITIONS`` positions."""
    return [slice(start, start + POSITIONS) for start in range(0, positions, POSITIONS)]


def finite_losses(losses: Tensor, first: int) -> list[float]:
    """A number for each window, the first of which is number ``first``.

    Raises:
        ModelError: names the first window whose loss is NaN or infinite.
    """
    found: list[float] = losses.tolist()
    for offset, loss in enumerate(found):
        if not isfinite(loss):
            raise _not_finite(f"the loss of window {first + offset} is {loss}", "a finite loss")
    return found


def _not_finite(given: str, expected: str) -> ModelError:
    return ModelError(given, expected, "Check the weights, or run the model in bfloat16 or float32.")
