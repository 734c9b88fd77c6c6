"""KL(due || found) and its gradient in plain PyTorch, a few rows at a time: what the kernels find, on every device."""

from collections.abc import Iterator

import torch
from torch import Tensor

IN_FLOAT32 = 2**25
"""Logits that are in float32 at a time."""


def divergences(found: Tensor, due: Tensor) -> tuple[Tensor, Tensor]:
    """As the kernel's."""
    sums, logs = (found.new_empty(shape, dtype=torch.float32) for shape in ((len(found),), (len(found), 2)))
    for part in _parts(found):
        own, other = found[part].float(), due[part].float()
        logs[part] = torch.stack((own.logsumexp(-1), other.logsumexp(-1)), -1)
        own, other = own - logs[part, :1], other - logs[part, 1:]
        sums[part] = (other - own).mul_(other.exp_()).sum(-1)
    return sums, logs


def gradient(found: Tensor, due: Tensor, logs: Tensor, kept: Tensor, labels: Tensor, by: Tensor) -> Tensor:
    """As the kernel's."""
    made = torch.empty_like(found)
    for part in _parts(found):
        own, other = found[part].float() - logs[part, :1], due[part].float() - logs[part, 1:]
        wanted, rest = other.exp_().mul_(kept[part, None]), 1 - kept[part, None]
        wanted[torch.arange(len(wanted), device=wanted.device), labels[part]] += rest[:, 0]
        made[part] = own.exp_().sub_(wanted).mul_(by)
    return made


def _parts(logits: Tensor) -> Iterator[slice]:
    """Rows, as many at a time as are in memory at once."""
    rows = max(1, IN_FLOAT32 // logits.shape[-1])
    return (slice(at, at + rows) for at in range(0, len(logits), rows))
