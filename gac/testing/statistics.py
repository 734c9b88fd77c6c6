"""Statistics that are hard to measure errors with, of a weight 24 x 16."""

import torch
from torch import Tensor

from gac.forms.metric import Moments

KINDS = (
    *("plain", "ill-conditioned", "one token", "rank 3", "dead inputs"),
    *("nothing seen", "tiny", "huge", "one huge feature"),
)
OUT, INSIDE = 24, 16


def moments_of(inputs: Tensor, gradients: Tensor) -> Moments:
    """Of activations ``(tokens, in)`` and gradients ``(tokens, out)``."""
    return Moments(
        (inputs.T @ inputs / len(inputs)).float(),
        (gradients.T @ gradients / len(gradients)).float(),
        inputs.abs().mean(0).float(),
    )


def statistics(kind: str, outs: int = OUT, ins: int = INSIDE) -> Moments:
    """One of ``KINDS``; the same every time."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(512, ins, generator=draw, dtype=torch.float64)
    g = torch.randn(512, outs, generator=draw, dtype=torch.float64)
    if kind == "ill-conditioned":
        x, g = x * torch.logspace(0, -12, ins), g * torch.logspace(-9, 0, outs)
    elif kind == "one token":
        x, g = x[:1], g[:1]
    elif kind == "rank 3":
        x = x[:, :3] @ torch.randn(3, ins, generator=draw, dtype=torch.float64)
    elif kind == "dead inputs":
        x[:, ::2] = 0
    elif kind == "one huge feature":
        x[:, 5] *= 1e6
    scale = {"nothing seen": 0.0, "tiny": 1e-8, "huge": 1e8}.get(kind, 1.0)
    return moments_of(scale * x, scale * g)
