"""What the whole model is trained towards: the dense model's next-token distributions, and the text's own tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import fsum
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gac.core.distributed.ranks import ALONE, Ranks
from gac.models.modules import input_device, run_on
from gac.runtime.kernels.gpu import kernels_run_on
from gac.runtime.storage.modules import count_parameters

LOGITS = 2**28
"""Logits that are made at a time: 1 GB in float32; on a GPU with much memory more, which keeps it busy."""
SHARE, LARGE_SHARE = 80, 240
"""Bytes of a GPU's memory for each logit that is made at a time, of a small model, whose logits then take 5 % of it in
float32, and of a large one."""
CHECKPOINTED = 1_000_000_000
"""Parameters from which on a model is not small: activations are computed again and not kept."""


def in_training(model: Any) -> torch.autocast:
    """The dtype in which a model is trained: bfloat16 on a GPU, and of models that have 16 bits; else its own."""
    kind = input_device(model).type
    narrow = kind == "cuda" or model.dtype != torch.float32
    return torch.autocast(kind, torch.bfloat16, enabled=narrow, cache_enabled=False)  # a cache would miss steps


def windows_at_once(model: Any, length: int, ranks: Ranks = ALONE) -> int:
    """Windows whose logits are made at a time: the same on every GPU of a kind, so that the same bits result."""
    most, device = LOGITS, input_device(model)
    if device.type == "cuda":
        share = SHARE if count_parameters(model) < CHECKPOINTED else LARGE_SHARE
        most = max(most, torch.cuda.get_device_properties(device).total_memory // share)
    return min(ranks.gathered(max(1, most // (int(model.config.vocab_size) * length))))


class _Loss(torch.autograd.Function):
    """Of logits ``(tokens, vocabulary)``, summed: kept * KL(due || found) - (1 - kept) * ln found[label]."""

    @staticmethod
    def forward(ctx: Any, found: Tensor, due: Tensor, kept: Tensor, labels: Tensor) -> Tensor:
        losses, logs = _kernels(found).divergences(found, due)
        missed = logs[:, 0] - found.gather(1, labels[:, None])[:, 0].float()
        ctx.save_for_backward(found, due, logs, kept, labels)
        summed: Tensor = torch.where(kept == 1, losses, torch.lerp(missed, losses, kept)).sum()
        return summed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *by: Any) -> Any:
        found, due, logs, kept, labels = ctx.saved_tensors
        return _kernels(found).gradient(found, due, logs, kept, labels, by[0]), None, None, None


def _kernels(logits: Tensor) -> Any:
    """The module of the two functions: in Triton where that runs, else in PyTorch."""
    if kernels_run_on(logits.device):
        from gac.healing import divergence_kernel

        return divergence_kernel
    from gac.healing import plain_divergence

    return plain_divergence


def summed_loss(model: Any, dense: Any, ids: Tensor, labels: Tensor | None = None) -> Tensor:
    """KL(dense || model) over the tokens of windows, summed, nats, float32; gradients reach the model alone.

    Args:
        ids: shape ``(windows, tokens)``.
        labels: float32 ``(windows,)``, the part of each one's loss that is -ln of the text's own next token's
            probability (arXiv 1503.02531, section 2, at temperature 1); not of its last token, whose next is not known.
            None where there is no such part.
    """
    with torch.no_grad():
        due = _logits(dense, ids)
    found = _logits(model, ids)
    kept = torch.ones(ids.shape, dtype=torch.float32, device=found.device)
    if labels is not None:
        kept[:, :-1] -= labels.to(found.device)[:, None]
    following = ids.to(found.device).roll(-1, 1)
    summed: Tensor = _Loss.apply(found, due.to(found.device), kept.flatten(), following.flatten())  # type: ignore[no-untyped-call]
    return summed


def _logits(model: Any, ids: Tensor) -> Tensor:
    logits: Tensor = run_on(model, ids).logits
    return logits.flatten(0, 1)


@torch.no_grad()
def mean_loss(
    model: Any, dense: Any, windows: Tensor, at_once: int, labels: Tensor | None = None, ranks: Ranks = ALONE
) -> float:
    """The mean of that loss over windows ``(windows, tokens)``, nats a token, in every process.

    Args:
        ranks: the processes that share the windows; all run their models equally often, as parts of models have to.
    """
    labels = torch.zeros(len(windows), dtype=torch.float32) if labels is None else labels
    parts = [*zip(torch.split(windows, at_once), torch.split(labels, at_once), strict=True)]
    own = [parts[(turn + ranks.own) % len(parts)] for turn in range(0, len(parts), ranks.count)]
    losses = torch.stack([summed_loss(model, dense, *part) for part in own]).tolist()
    in_turn = [loss for turn in zip(*ranks.gathered(losses), strict=True) for loss in turn]
    return fsum(in_turn[: len(parts)]) / windows.numel()


@contextmanager
def recomputing(model: Any, layers: list[nn.Module], params: int) -> Iterator[None]:
    """With activations of large models computed again in the backward pass (arXiv 1604.06174), layer by layer.

    Args:
        layers: its decoder layers; their own flag alone says that they are trained, so that no dropout begins.
        params: of the model.
    """
    if params < CHECKPOINTED or not model.supports_gradient_checkpointing:
        yield
        return
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False
        model.gradient_checkpointing_disable()
