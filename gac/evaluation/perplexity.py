"""Perplexity, and divergence of a compressed model from the dense one, by one protocol."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import exp, isfinite
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from gac.core.arguments import Count
from gac.core.arrays import Floats
from gac.core.errors import ModelError, TextError
from gac.core.progress import progress_bar
from gac.evaluation.results import Divergence, Perplexity
from gac.measurement.documents import Documents, Text
from gac.measurement.images import check_takes_images, holds_messages
from gac.measurement.text import (
    Windows,
    check_positions,
    check_vocabulary,
    evaluation_windows,
    example_windows,
    text_names,
    window_length,
)
from gac.models.examples import Examples, TokenWindows, next_tokens, predicted_tokens
from gac.models.modules import frozen, run_on
from gac.models.processors import load_processor, tokenizer_of
from gac.models.threads import entry_point
from gac.plan.plan import Plan

POSITIONS = 512  # float32 logits are made for this many positions at a time: 256 MB at 128k words
CPU_POSITIONS = 32  # few on a CPU, so that they stay in its cache


@dataclass(frozen=True, eq=False)
class Sample:
    """Windows of a text that do not overlap, and their documents, if any."""

    cut: Windows
    documents: Documents | None = None

    @property
    def tokens(self) -> int:
        """The number of predicted tokens: all but the first of each window; of examples with images, those of text."""
        return predicted_tokens(self.cut.sequences)

    @property
    def protocol(self) -> str:
        cut = self.cut
        steps = "" if cut.complete else " in even steps"
        if cut.examples is not None:
            return f"{cut.name}, {len(cut)} examples of at most {cut.length} tokens{steps}, text given the images"
        size = f"{len(cut)} windows x {cut.length}{steps}"
        return f"{cut.name}, {size} from token {cut.start}, non-overlapping, {cut.head}"

    def check(self, model: PreTrainedModel) -> None:
        """Refuse a model whose plan was calibrated on one of the documents, or that lacks a token or positions."""
        check_positions(model, self.cut.length, "windows")
        if self.cut.examples is not None:
            check_takes_images(model.config, self.cut.name)
        plan = getattr(model, "gac_plan", None)
        if self.documents is not None and isinstance(plan, Plan):
            known, digests = set(plan.documents), self.documents.digests
            if seen := [position for position, digest in enumerate(digests) if digest in known]:
                raise TextError(
                    f"{len(seen)} of {self.documents.name}, the first at position {seen[0]}, are among the plan's "
                    "calibration text",
                    "text that the model was not calibrated on",
                    "Hold documents back for evaluation.",
                )
        check_vocabulary(self.cut, model)


def take_sample(
    reader: Any,
    text: Text,
    windows: int | None,
    length: int | None,
    bos: bool | None = None,
    most: int | None = None,
    config: Any = None,
) -> Sample:
    """Cut a text into windows; arguments and TextErrors as for ``gac.perplexity``.

    Without a number of windows, at most ``most`` are taken. A string with white space that is no path and no name is
    one document. Messages with images are read for a model of this ``config``, by a processor or one of that name.
    """
    if config is not None and isinstance(text, str) and holds_messages(text):
        check_takes_images(config, text)
        return Sample(example_windows(text, load_processor(reader), config, windows, length))
    if not isinstance(text, str):
        text = Documents.of(text)
    elif any(map(str.isspace, text)) and text not in text_names() and not os.path.isfile(text):
        text = Documents([text])
    length = window_length(text) if length is None else length
    if length < 2:
        raise TextError(f"windows of {length} tokens", "at least 2: the first is not predicted", "Ask for more.")
    documents = text if isinstance(text, Documents) else None
    return Sample(evaluation_windows(text, tokenizer_of(reader), windows, length, bos, most), documents)


def dtype_of(model: PreTrainedModel) -> str:
    return str(model.dtype).removeprefix("torch.")


@entry_point()
def perplexity(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin,
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
        tokenizer: the model's; its processor, where the text is a file of messages with images.
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
    sample = take_sample(tokenizer, text, windows, length, bos, config=model.config)
    return perplexity_on(model, sample, batch, progress)


@entry_point()
def divergence(
    model: PreTrainedModel,
    reference: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin,
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
        reference: the dense model, with the same vocabulary; other arguments as for ``perplexity``.

    Raises:
        TextError: as for ``perplexity``.
        ModelError: the vocabularies differ, or a result is NaN or infinite.
    """
    sample = take_sample(tokenizer, text, windows, length, bos, config=model.config)
    return compare_models(model, reference, sample, batch, progress)[2]


def perplexity_on(model: PreTrainedModel, sample: Sample, batch: int = 1, progress: bool = True) -> Perplexity:
    """As ``perplexity``, on a sample."""

    [loss] = _sums(
        [model], sample, batch, progress, "perplexity", lambda targets, logits: [window_losses(logits, targets)]
    )
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
        first = 0
        for targets, logits in _batches(models, sample.cut.sequences, batch):
            values = [each.tolist() for each in measure(targets, *logits)]
            for offset, loss in ((offset, loss) for window in values for offset, loss in enumerate(window)):
                if not isfinite(loss):
                    raise _not_finite(f"the loss of window {first + offset} is {loss}", "a finite loss")
            total = total + np.array([sum(window) for window in values])
            first += len(targets)
            bar.update(len(targets))
    return total.tolist()  # type: ignore[no-any-return]


def _batches(
    models: Sequence[PreTrainedModel], windows: TokenWindows, batch: int
) -> Iterator[tuple[Tensor, Iterator[Tensor]]]:
    """The next tokens of each batch, and each model's logits of their positions; examples are run one by one."""
    if isinstance(windows, Examples):
        for example in windows:
            logits = (run_on(model, example).logits[:, example.predicting] for model in models)
            yield next_tokens(example)[None], logits
        return
    for ids in torch.split(windows, batch):
        outputs = (model(input_ids=ids.to(model.device), use_cache=False) for model in models)
        yield ids[:, 1:], (output.logits[:, :-1] for output in outputs)


def _perplexity_of(loss: float, sample: Sample, model: PreTrainedModel) -> Perplexity:
    mean = loss / sample.tokens
    try:
        cut, dtype = sample.cut, dtype_of(model)
        return Perplexity(exp(mean), sample.tokens, sample.protocol, dtype, cut.name, cut.digest)
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
