"""Perplexity, and divergence of a compressed model from the dense one, by one protocol."""

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

POSITIONS = 512  # float32 logits are made for this many positions at a time: 256 MB at 128k words
CPU_POSITIONS = 32  # few on a CPU, so that they stay in its cache


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
    """Measure perplexity on windows of text that do not overlap, and that calibration does not use.

    All tokens of a window but the first, which is BOS if windows begin with it, are predicted. The model runs on its
    device in its dtype; logits are converted to float32, and summed in float64. ``wikitext2`` and ``c4`` are measured
    by the protocols of published figures (GPTQ, SVD-LLM).

    Args:
        text: a named source (its evaluation part), a path to a UTF-8 file, the text itself, or documents.
        windows: their number, evenly spaced in the text; None takes every full window.
        length: tokens of a window; None takes 2048 for ``wikitext2`` and ``c4``, as published figures do, else 1024.
        bos: begin every window with BOS in place of one token of text. None does if the tokenizer adds BOS by itself;
            ``wikitext2`` and ``c4`` then have it at the head of the text alone, as published figures do.
        batch: windows in one pass; logits take ``batch * length * vocabulary`` elements.
        progress: show a bar on a terminal.

    Raises:
        TextError: the text is unknown or too short, the model's plan was calibrated on a document, or the tokenizer is
            another model's or has no BOS.
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

    Both models run on a batch of windows at a time, and only sums are kept, so that memory does not grow with the text.
    Log-probabilities are in float32, sums in float64.

    Args:
        model: the compressed model.
        reference: the dense one, with the same vocabulary.
        tokenizer, text, windows, length, bos, batch, progress: as for ``perplexity``.

    Raises:
        TextError: as for ``perplexity``.
        ModelError: the vocabularies differ, or a result is NaN or infinite.
    """
    sample = take_sample(tokenizer, text, windows, length, bos)
    return compare_models(model, reference, sample, batch, progress)[2]


def perplexity_on(model: PreTrainedModel, sample: Sample, batch: int = 1, progress: bool = True) -> Perplexity:
    """As ``perplexity``, on a sample."""

    def measure(targets: Tensor, logits: Tensor) -> Sequence[Tensor]:
        return [window_losses(logits, targets)]

    [loss] = _sums([model], sample, batch, progress, "perplexity", measure)
    return _perplexity_of(loss, sample, model)


def compare_models(
    model: PreTrainedModel, reference: PreTrainedModel, sample: Sample, batch: int = 1, progress: bool = True
) -> tuple[Perplexity, Perplexity, Divergence]:
    """Perplexities of both models and the divergence between them, in one pass; errors as for ``divergence``."""

    def measure(targets: Tensor, logits: Tensor, reference_logits: Tensor) -> Sequence[Tensor]:
        if logits.shape[-1] != reference_logits.shape[-1]:
            raise ModelError(
                f"models of {logits.shape[-1]:,} and {reference_logits.shape[-1]:,} tokens",
                "two models of one vocabulary",
                "Compare a compressed model with the one it was made from.",
            )
        reference_logits = reference_logits.to(logits.device)
        losses = [window_losses(each, targets) for each in (logits, reference_logits)]
        agree = (logits.argmax(-1) == reference_logits.argmax(-1)).sum(1)
        return *losses, window_divergences(logits, reference_logits), agree

    loss, reference_loss, kl, agreed = _sums([model, reference], sample, batch, progress, "divergence", measure)
    n, protocol = sample.tokens, sample.protocol
    divergence = Divergence(kl / n, agreed / n, n, protocol, dtype_of(model), dtype_of(reference))
    return _perplexity_of(loss, sample, model), _perplexity_of(reference_loss, sample, reference), divergence


def _sums(
    models: Sequence[PreTrainedModel],
    sample: Sample,
    batch: int,
    progress: bool,
    title: str,
    measure: Callable[..., Sequence[Tensor]],
) -> list[float]:
    """Sum the results of ``measure`` over all windows.

    It gives tensors ``(batch,)`` for targets ``(batch, length - 1)`` and each model's logits of these positions.
    """
    for model in models:
        sample.check(model)
    windows = len(sample.cut)
    total: Floats = np.zeros(())
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(frozen(model))
        stack.enter_context(torch.no_grad())
        bar = stack.enter_context(progress_bar(title, "window", windows, shown=progress, leave=False))
        for first in range(0, windows, batch):
            ids = sample.cut.ids[first : first + batch]
            outputs = (model(input_ids=ids.to(model.device), use_cache=False) for model in models)
            values = [each.tolist() for each in measure(ids[:, 1:], *(out.logits[:, :-1] for out in outputs))]
            for offset, loss in ((offset, loss) for window in values for offset, loss in enumerate(window)):
                if not isfinite(loss):
                    raise _not_finite(f"the loss of window {first + offset} is {loss}", "a finite loss")
            total = total + np.array([sum(window) for window in values])
            bar.update(len(ids))
    sums: list[float] = total.tolist()
    return sums


def _perplexity_of(loss: float, sample: Sample, model: PreTrainedModel) -> Perplexity:
    mean = loss / sample.tokens
    try:
        return Perplexity(exp(mean), sample.tokens, sample.protocol, dtype_of(model), sample.cut.name)
    except OverflowError as failure:
        raise _not_finite(f"a mean loss of {mean:.0f} nats a token", "a finite perplexity") from failure


def _not_finite(problem: str, expected: str) -> ModelError:
    return ModelError(problem, expected, "Check the weights, or run the model in bfloat16 or float32.")


def window_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Summed negative log-likelihood of each window, float64 ``(batch,)``.

    Args:
        logits: ``(batch, positions, vocabulary)``.
        targets: the next tokens, ``(batch, positions)``.
    """
    targets = targets.to(logits.device)
    total = torch.zeros(len(targets), dtype=torch.float64, device=logits.device)
    for part in _position_slices(logits):
        # Flattened, because cross_entropy over the middle dimension of three is tens of times slower on a GPU.
        losses = cross_entropy(logits[:, part].float().flatten(0, 1), targets[:, part].flatten(), reduction="none")
        total += losses.double().view(len(targets), -1).sum(dim=1)
    return total


def window_divergences(logits: Tensor, reference_logits: Tensor) -> Tensor:
    """Summed KL(reference || model) of each window, nats, float64 ``(batch,)``; logits as for ``window_losses``."""
    total = torch.zeros(len(logits), dtype=torch.float64, device=logits.device)
    for part in _position_slices(logits):
        log_q, log_p = (each[:, part].float().log_softmax(-1) for each in (logits, reference_logits))
        total += kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1).double().sum(1)
    return total


def _position_slices(logits: Tensor) -> Sequence[slice]:
    step = CPU_POSITIONS if logits.device.type == "cpu" else POSITIONS
    return [slice(start, start + step) for start in range(0, logits.shape[1], step)]
