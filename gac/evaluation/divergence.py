"""How far a compressed model's distributions are from the dense model's; no labels are needed."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div
from transformers import PreTrainedModel

from gac.errors import ModelError
from gac.evaluation.perplexity import (
    batches,
    finite_losses,
    next_token_logits,
    parts,
    perplexity_of,
    window_losses,
)
from gac.evaluation.protocol import Sample, dtype_of, take_sample
from gac.evaluation.results import Divergence, Perplexity
from gac.sensitivity.documents import Text
from gac.sensitivity.layerwise import frozen


def divergence(
    model: PreTrainedModel,
    reference: PreTrainedModel,
    tokenizer: Any,
    text: Text = "wiki-sample",
    *,
    windows: int | None = None,
    length: int | None = None,
    batch: int = 1,
    progress: bool = True,
) -> Divergence:
    """KL divergence and top-1 agreement of two models' next-token distributions, on the tokens of ``perplexity``.

    Both models run side by side, a batch of windows at a time, and nothing is kept of a batch but sums: memory does
    not grow with the text. Log-probabilities are taken in float32, sums in float64.

    Args:
        model: the compressed model.
        reference: the dense one, with the same vocabulary.
        tokenizer, text, windows, length, batch, progress: as for ``perplexity``.

    Raises:
        TextError: as for ``perplexity``.
        ModelError: the vocabularies differ, or what is measured on a window is NaN or infinite.
    """
    sample = take_sample(tokenizer, text, windows, length)
    return compare_models(model, reference, sample, batch, progress)[2]


def compare_models(
    model: PreTrainedModel, reference: PreTrainedModel, sample: Sample, batch: int = 1, progress: bool = True
) -> tuple[Perplexity, Perplexity, Divergence]:
    """Perplexity of the model, that of the reference, and the divergence between them, out of one pass.

    Raises:
        GacError: as for ``divergence``.
    """
    for each in (model, reference):
        sample.check(each)
    _check_vocabularies(model, reference)
    loss = reference_loss = kl = 0.0
    agreed = 0
    with frozen(model), frozen(reference), torch.inference_mode():
        for first, ids in batches(sample, batch, "divergence", progress):
            logits, targets = next_token_logits(model, ids), ids[:, 1:]
            wanted = next_token_logits(reference, ids).to(logits.device)
            loss += sum(finite_losses(window_losses(logits, targets), first))
            reference_loss += sum(finite_losses(window_losses(wanted, targets), first))
            kl += sum(finite_losses(window_divergences(logits, wanted), first))
            agreed += int((logits.argmax(-1) == wanted.argmax(-1)).sum())
    count = sample.tokens
    found = Divergence(kl / count, agreed / count, count, sample.protocol, dtype_of(model), dtype_of(reference))
    return perplexity_of(loss, sample, model), perplexity_of(reference_loss, sample, reference), found


def window_divergences(logits: Tensor, wanted: Tensor) -> Tensor:
    """Summed KL(wanted || logits) of each window, nats, float64, shape ``(batch,)``.

    Args:
        logits, wanted: ``(batch, positions, vocabulary)``.
    """
    total = torch.zeros(len(logits), dtype=torch.float64, device=logits.device)
    for part in parts(logits.shape[1]):
        log_q, log_p = (found[:, part].float().log_softmax(-1) for found in (logits, wanted))
        total += kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1).double().sum(1)
    return total


def _check_vocabularies(model: PreTrainedModel, reference: PreTrainedModel) -> None:
    """Refuse models whose distributions are not over the same tokens."""
    sizes = [found.config.get_text_config().vocab_size for found in (model, reference)]
    if sizes[0] != sizes[1]:
        raise ModelError(
            f"a model of {sizes[0]:,} tokens beside one of {sizes[1]:,}",
            "two models of one vocabulary",
            "Compare a compressed model with the one it was made of.",
        )
