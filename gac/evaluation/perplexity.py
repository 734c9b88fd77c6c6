"""Perplexity, and how far a compressed model's distributions are from the dense model's, by one protocol."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from math import exp, isfinite

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gac.core.arguments import Count, checked
from gac.core.arrays import Floats
from gac.core.errors import ModelError
from gac.core.progress import progress_bar
from gac.evaluation.protocol import Sample, dtype_of, take_sample
from gac.evaluation.results import Divergence, Perplexity
from gac.measurement.documents import Text
from gac.models.modules import frozen
from gac.models.threads import one_call_at_a_time

POSITIONS = 512
"""Float32 logits are made for this many positions at a time: 256 MB at 128k words."""
CPU_POSITIONS = 32
"""On a CPU few, so that they stay in its cache."""


@checked
@one_call_at_a_time
def perplexity(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: Text = "wiki-sample",
    *,
    windows: Count | None = None,
    length: Count | None = None,
    bos: bool | None = None,
    batch: Count = 1,
    progress: bool = True,
) -> Perplexity:
    """Perplexity over windows of text that no calibration uses and that do not overlap.

    All but the first token of each window are predicted: all of its text, where BOS is that first token. The model
    runs where it is and as it is; its logits are taken to float32, and the sum to float64. ``wikitext2`` and ``c4``
    are measured as published figures are: GPTQ's and SVD-LLM's protocols.

    Args:
        text: a named source (its evaluation part), a path to a UTF-8 file, the text itself, or documents.
        windows: how many, in even steps through the text; None takes every whole window.
        length: tokens of a window; None takes 2048 for ``wikitext2`` and ``c4``, as published figures do, else 1024.
        bos: whether every window begins with the tokenizer's BOS, in the place of one token of text. None has it where
            the tokenizer puts BOS first by itself; ``wikitext2`` and ``c4`` then have it at the head of the text alone,
            as published figures do.
        batch: windows that run at once; logits take ``batch * length * vocabulary`` elements.
        progress: show a bar on a terminal.

    Raises:
        TextError: unknown or too short a text, a document that the model's plan was calibrated on, a tokenizer of
            another model, or one without the BOS that is asked for.
        ModelError: the loss of a window is NaN or infinite, or windows are longer than the model has positions.
    """
    return perplexity_on(model, take_sample(tokenizer, text, windows, length, bos), batch, progress)


@checked
@one_call_at_a_time
def divergence(
    model: PreTrainedModel,
    reference: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: Text = "wiki-sample",
    *,
    windows: Count | None = None,
    length: Count | None = None,
    bos: bool | None = None,
    batch: Count = 1,
    progress: bool = True,
) -> Divergence:
    """KL divergence and top-1 agreement of two models' next-token distributions, on the tokens of ``perplexity``.

    Both models run side by side, a batch of windows at a time, and nothing is kept of a batch but sums: memory does
    not grow with the text. Log-probabilities are taken in float32, sums in float64.

    Args:
        model: the compressed model.
        reference: the dense one, with the same vocabulary.
        tokenizer, text, windows, length, bos, batch, progress: as for ``perplexity``.

    Raises:
        TextError: as for ``perplexity``.
        ModelError: the vocabularies differ, or what is measured on a window is NaN or infinite.
    """
    sample = take_sample(tokenizer, text, windows, length, bos)
    return compare_models(model, reference, sample, batch, progress)[2]


def perplexity_on(model: PreTrainedModel, sample: Sample, batch: int = 1, progress: bool = True) -> Perplexity:
    """As ``perplexity``, on a sample that is cut already.

    Raises:
        GacError: as for ``perplexity``.
    """

    def measure(targets: Tensor, logits: Tensor) -> Sequence[Tensor]:
        return [window_losses(logits, targets)]

    [loss] = _sums([model], sample, batch, progress, "perplexity", measure)
    return _perplexity_of(loss, sample, model)


def compare_models(
    model: PreTrainedModel, reference: PreTrainedModel, sample: Sample, batch: int = 1, progress: bool = True
) -> tuple[Perplexity, Perplexity, Divergence]:
    """Perplexity of the model, that of the reference, and the divergence between them, out of one pass.

    Raises:
        GacError: as for ``divergence``.
    """

    def measure(targets: Tensor, logits: Tensor, wanted: Tensor) -> Sequence[Tensor]:
        _check_vocabularies(logits, wanted)
        wanted = wanted.to(logits.device)
        losses = [window_losses(found, targets) for found in (logits, wanted)]
        return *losses, window_divergences(logits, wanted), (logits.argmax(-1) == wanted.argmax(-1)).sum(1)

    loss, wanted, kl, agreed = _sums([model, reference], sample, batch, progress, "divergence", measure)
    count = sample.tokens
    found = Divergence(kl / count, agreed / count, count, sample.protocol, dtype_of(model), dtype_of(reference))
    return _perplexity_of(loss, sample, model), _perplexity_of(wanted, sample, reference), found


def _sums(
    models: Sequence[PreTrainedModel],
    sample: Sample,
    batch: int,
    progress: bool,
    doing: str,
    measure: Callable[..., Sequence[Tensor]],
) -> list[float]:
    """What ``measure`` finds in each window of a batch, summed over all windows, under a bar on a terminal.

    Args:
        doing: what the bar says.
        measure: from the tokens that come next, ``(batch, length - 1)``, and each model's logits for them,
            ``(batch, length - 1, vocabulary)``.
    """
    for model in models:
        sample.check(model)
    windows = len(sample.cut)
    total: Floats = np.zeros(())
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(frozen(model))
        stack.enter_context(torch.no_grad())
        bar = stack.enter_context(progress_bar(doing, "window", windows, shown=progress, leave=False))
        for first in range(0, windows, batch):
            ids = sample.cut.ids[first : first + batch]
            runs = (model(input_ids=ids.to(model.device), use_cache=False) for model in models)
            losses = measure(ids[:, 1:], *(run.logits[:, :-1] for run in runs))
            total = total + np.array([sum(_finite(one, first)) for one in losses])
            bar.update(len(ids))
    found: list[float] = total.tolist()
    return found


def _perplexity_of(total: float, sample: Sample, model: PreTrainedModel) -> Perplexity:
    """The perplexity of a summed negative log-likelihood, nats."""
    mean = total / sample.tokens
    try:
        return Perplexity(exp(mean), sample.tokens, sample.protocol, dtype_of(model), sample.cut.name)
    except OverflowError as failure:
        raise _not_finite(f"a mean loss of {mean:.0f} nats a token", "a finite perplexity") from failure


def window_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Summed negative log-likelihood of each window, float64, shape ``(batch,)``.

    Args:
        logits: ``(batch, positions, vocabulary)``.
        targets: the tokens that came next, ``(batch, positions)``.
    """
    targets = targets.to(logits.device)
    total = torch.zeros(len(targets), dtype=torch.float64, device=logits.device)
    for part in _parts(logits):
        # As rows: over the middle dimension of three, cross_entropy takes tens of times as long on a GPU.
        losses = cross_entropy(logits[:, part].float().flatten(0, 1), targets[:, part].flatten(), reduction="none")
        total += losses.double().view(len(targets), -1).sum(dim=1)
    return total


def window_divergences(logits: Tensor, wanted: Tensor) -> Tensor:
    """Summed KL(wanted || logits) of each window, nats, float64, shape ``(batch,)``.

    Args:
        logits, wanted: ``(batch, positions, vocabulary)``.
    """
    total = torch.zeros(len(logits), dtype=torch.float64, device=logits.device)
    for part in _parts(logits):
        log_q, log_p = (found[:, part].float().log_softmax(-1) for found in (logits, wanted))
        total += kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1).double().sum(1)
    return total


def _parts(logits: Tensor) -> Sequence[slice]:
    """Slices of few positions, of logits ``(batch, positions, vocabulary)``."""
    step = CPU_POSITIONS if logits.device.type == "cpu" else POSITIONS
    return [slice(start, start + step) for start in range(0, logits.shape[1], step)]


def _finite(windows: Tensor, first: int) -> list[float]:
    """A number for each window, the first of which is number ``first``."""
    found: list[float] = windows.tolist()
    for offset, loss in enumerate(found):
        if not isfinite(loss):
            raise _not_finite(f"the loss of window {first + offset} is {loss}", "a finite loss")
    return found


def _check_vocabularies(logits: Tensor, wanted: Tensor) -> None:
    """Refuse distributions that are not over the same tokens."""
    if logits.shape[-1] != wanted.shape[-1]:
        raise ModelError(
            f"a model of {logits.shape[-1]:,} tokens beside one of {wanted.shape[-1]:,}",
            "two models of one vocabulary",
            "Compare a compressed model with the one it was made of.",
        )


def _not_finite(given: str, expected: str) -> ModelError:
    return ModelError(given, expected, "Check the weights, or run the model in bfloat16 or float32.")
