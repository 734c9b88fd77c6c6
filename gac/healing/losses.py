"""The distillation loss: divergence from the dense model's next-token distributions, and the text's own tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import fsum
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gac.core.distributed.ranks import ALONE, Ranks
from gac.models.families import text_config
from gac.models.modules import input_device, run_on
from gac.runtime.kernels.gpu import kernels_run_on
from gac.runtime.storage.modules import count_parameters

LOGITS = 2**28  # logits that are computed at a time: 1 GB in float32; more on a large GPU, to keep it busy
BYTES_PER_LOGIT, BYTES_PER_LOGIT_LARGE = 80, 240  # bytes of GPU memory for each logit at a time, by size of model
LARGE = 1_000_000_000  # models with this many parameters or more are large: they recompute activations
FLOAT32_LOGITS = 2**25  # logits that the plain path holds in float32 at a time


def windows_per_pass(model: Any, length: int, ranks: Ranks = ALONE) -> int:
    """The number of windows in one forward pass: the same on all GPUs of a kind, for the same bits."""
    logits, device = LOGITS, input_device(model)
    if device.type == "cuda":
        share = BYTES_PER_LOGIT if count_parameters(model) < LARGE else BYTES_PER_LOGIT_LARGE
        logits = max(logits, torch.cuda.get_device_properties(device).total_memory // share)
    return min(ranks.gathered(max(1, logits // (int(text_config(model.config).vocab_size) * length))))


def summed_loss(model: Any, dense: Any, ids: Tensor, label_weights: Tensor | None = None) -> Tensor:
    """KL(dense || model) summed over the tokens of ``ids (windows, tokens)``, nats; gradients reach ``model`` alone.

    ``label_weights``, float32 ``(windows,)``, are weights of the cross-entropy with the text's own next tokens (arXiv
    1503.02531, section 2, at temperature 1), except at the last token of a window.
    """
    with torch.no_grad():
        teacher_logits = run_on(dense, ids).logits.flatten(0, 1)
    logits = run_on(model, ids).logits.flatten(0, 1)
    kl_weight = torch.ones(ids.shape, dtype=torch.float32, device=logits.device)
    if label_weights is not None:
        kl_weight[:, :-1] -= label_weights.to(logits.device)[:, None]
    labels = ids.to(logits.device).roll(-1, 1)
    return distillation_loss(logits, teacher_logits.to(logits.device), kl_weight.flatten(), labels.flatten())


@torch.no_grad()
def mean_loss(
    model: Any, dense: Any, windows: Tensor, batch: int, label_weights: Tensor | None = None, ranks: Ranks = ALONE
) -> float:
    """The mean of ``summed_loss`` over windows ``(windows, tokens)``, nats a token, the same in every process."""
    label_weights = torch.zeros(len(windows), dtype=torch.float32) if label_weights is None else label_weights
    batches = [*zip(torch.split(windows, batch), torch.split(label_weights, batch), strict=True)]
    # All processes run equally many batches, as sharded models require.
    local = [batches[(turn + ranks.rank) % len(batches)] for turn in range(0, len(batches), ranks.count)]
    losses = torch.stack([summed_loss(model, dense, *inputs) for inputs in local]).tolist()
    in_order = [loss for turn in zip(*ranks.gathered(losses), strict=True) for loss in turn]
    return fsum(in_order[: len(batches)]) / windows.numel()


@contextmanager
def gradient_checkpointing(model: Any, layers: list[nn.Module]) -> Iterator[None]:
    """Recompute activations of large models layer by layer in the backward pass (arXiv 1604.06174)."""
    if count_parameters(model) < LARGE or not model.supports_gradient_checkpointing:
        yield
        return
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in layers:
        layer.training = True  # the layer's own flag alone, so that no dropout begins
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False
        model.gradient_checkpointing_disable()


def distillation_loss(logits: Tensor, teacher_logits: Tensor, kl_weight: Tensor, labels: Tensor) -> Tensor:
    """Sum over tokens of ``kl_weight * KL(teacher || model) - (1 - kl_weight) * log p(label)``, nats, float32.

    Logits are ``(tokens, vocabulary)``, ``kl_weight`` (float32) and ``labels`` (ids) ``(tokens,)``; gradients reach
    ``logits`` alone.
    """
    summed: Tensor = _DistillationLoss.apply(logits, teacher_logits, kl_weight, labels)  # type: ignore[no-untyped-call]
    return summed


def kl_divergence(logits: Tensor, teacher_logits: Tensor) -> tuple[Tensor, Tensor]:
    """KL(teacher || model), float32 ``(tokens,)``, and both log-sum-exps, float32 ``(tokens, 2)``."""
    if kernels_run_on(logits.device):
        from gac.healing import triton_kernels

        return triton_kernels.kl_divergence(logits, teacher_logits)
    rows = len(logits)
    kl, log_sums = (logits.new_empty(shape, dtype=torch.float32) for shape in ((rows,), (rows, 2)))
    for part in _row_slices(logits):
        model, teacher = logits[part].float(), teacher_logits[part].float()
        log_sums[part] = torch.stack((model.logsumexp(-1), teacher.logsumexp(-1)), -1)
        model, teacher = model - log_sums[part, :1], teacher - log_sums[part, 1:]
        kl[part] = (teacher - model).mul_(teacher.exp_()).sum(-1)
    return kl, log_sums


def kl_gradient(
    logits: Tensor, teacher_logits: Tensor, log_sums: Tensor, kl_weight: Tensor, labels: Tensor, scale: Tensor
) -> Tensor:
    """The gradient of ``distillation_loss`` by ``logits``, times the float32 scalar ``scale``, in their dtype."""
    if kernels_run_on(logits.device):
        from gac.healing import triton_kernels

        return triton_kernels.kl_gradient(logits, teacher_logits, log_sums, kl_weight, labels, scale)
    gradient = torch.empty_like(logits)
    for part in _row_slices(logits):
        model = logits[part].float() - log_sums[part, :1]
        target = (teacher_logits[part].float() - log_sums[part, 1:]).exp_().mul_(kl_weight[part, None])
        target[torch.arange(len(target), device=target.device), labels[part]] += 1 - kl_weight[part]
        gradient[part] = model.exp_().sub_(target).mul_(scale)
    return gradient


def _row_slices(logits: Tensor) -> Iterator[slice]:
    rows = max(1, FLOAT32_LOGITS // logits.shape[-1])
    return (slice(start, start + rows) for start in range(0, len(logits), rows))


class _DistillationLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, teacher_logits: Tensor, kl_weight: Tensor, labels: Tensor) -> Tensor:
        kl, log_sums = kl_divergence(logits, teacher_logits)
        cross_entropy = log_sums[:, 0] - logits.gather(1, labels[:, None])[:, 0].float()
        ctx.save_for_backward(logits, teacher_logits, log_sums, kl_weight, labels)
        summed: Tensor = torch.where(kl_weight == 1, kl, torch.lerp(cross_entropy, kl, kl_weight)).sum()
        return summed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        logits, teacher_logits, log_sums, kl_weight, labels = ctx.saved_tensors
        gradient = kl_gradient(logits, teacher_logits, log_sums, kl_weight, labels, gradients[0])
        return gradient, None, None, None
