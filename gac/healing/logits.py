"""Distillation of the whole model: the divergence of its next-token distributions from the dense model's."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gac.models.modules import input_device
from gac.runtime.gpu import HAS_TRITON
from gac.runtime.stored import count_parameters

LOGITS = 2**28
"""Logits that are made at a time: 1 GB in float32; of small models on a GPU more."""
SHARE = 80
"""Bytes of a GPU's memory for each logit that a small model makes at a time: in float32 they take 5 % of it."""
CHECKPOINTED = 1_000_000_000
"""Parameters from which on a model is not small: activations are computed again and not kept."""


def in_training(model: Any) -> torch.autocast:
    """The dtype in which a model is trained: bfloat16 on a GPU, and of models that have 16 bits; else its own."""
    kind = input_device(model).type
    narrow = kind == "cuda" or model.dtype != torch.float32
    return torch.autocast(kind, torch.bfloat16, enabled=narrow, cache_enabled=False)  # a cache would miss steps


def windows_at_once(model: Any, length: int) -> int:
    """Windows whose logits are made at a time: the same on every GPU of a kind, so that the same bits result."""
    most, device = LOGITS, input_device(model)
    if device.type == "cuda" and count_parameters(model) < CHECKPOINTED:
        most = max(most, torch.cuda.get_device_properties(device).total_memory // SHARE)
    return max(1, most // (int(model.config.vocab_size) * length))


class _Divergence(torch.autograd.Function):
    """KL(due || found) of logits ``(tokens, vocabulary)``, summed."""

    @staticmethod
    def forward(ctx: Any, found: Tensor, due: Tensor) -> Tensor:
        sums, logs = _kernels(found).divergences(found, due)
        ctx.save_for_backward(found, due, logs)
        summed: Tensor = sums.sum()
        return summed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *by: Any) -> Any:
        found, due, logs = ctx.saved_tensors
        made: Tensor = _kernels(found).gradient(found, due, logs, by[0])
        return made, None


def _kernels(logits: Tensor) -> Any:
    """The module of the two functions: in Triton where that runs, else in PyTorch."""
    if logits.is_cuda and HAS_TRITON and torch.cuda.get_device_capability(logits.device) >= (8, 0):
        from gac.healing import divergence_kernel

        return divergence_kernel
    from gac.healing import plain_divergence

    return plain_divergence


def summed_divergence(model: Any, dense: Any, ids: Tensor) -> Tensor:
    """KL(dense || model) over the tokens of windows, summed, nats, float32; gradients reach the model alone.

    Args:
        ids: shape ``(windows, tokens)``.
    """
    with torch.no_grad():
        due = _logits(dense, ids)
    found = _logits(model, ids)
    summed: Tensor = _Divergence.apply(found, due.to(found.device))  # type: ignore[no-untyped-call]
    return summed


def _logits(model: Any, ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids.to(input_device(model)), use_cache=False).logits
    return logits.flatten(0, 1)


@torch.no_grad()
def mean_divergence(model: Any, dense: Any, windows: Tensor, at_once: int) -> float:
    """KL(dense || model), nats a token, over windows ``(windows, tokens)``."""
    parts = torch.split(windows, at_once)
    total = torch.stack([summed_divergence(model, dense, ids).double().cpu() for ids in parts]).sum()
    return float(total) / windows.numel()


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
