"""Fit the scale of a compressed model's logits, which its last norm holds, to the dense model's confidence.

Errors of compressed weights spread the logits, so the model is surer of its tokens than it should be. Once its weights
are fitted, its last norm is multiplied by one number: the one at which the KL divergence of its next tokens from the
dense model's is least. This is temperature scaling (arXiv 1706.04599, section 4.2), there fitted to labels.
``results/refit.md`` has what it gives.
"""

from collections.abc import Iterable
from copy import deepcopy

import torch
from torch import Tensor, nn

from gac.core.distributed.ranks import ALONE, Ranks
from gac.core.linalg import check_measured

LEAST, MOST = 0.75, 1.25
"""Logits are not scaled further than that."""


def fitted_scale(pairs: Iterable[tuple[Tensor, Tensor]], ranks: Ranks = ALONE) -> float:
    """The factor of a model's logits at which its KL divergence from another model is least: one Newton step from 1.

    ``pairs`` are the other model's logits and its own for the same tokens, ``(tokens, vocabulary)``; each process has
    pairs of its own.
    """
    slope = curvature = 0.0
    for other, logits in pairs:
        chances, wanted = (logits.float().softmax(-1) for logits in (logits, other))
        centred = logits.float() - (chances * logits.float()).sum(-1, keepdim=True)
        slope -= float((wanted * centred).sum())
        curvature += float((chances * centred.square()).sum())
    total = ranks.total(torch.tensor([slope, curvature], dtype=torch.float64))
    check_measured(total, "logits that are not finite", "finite logits")
    slope, curvature = total.tolist()
    return min(max(1 - slope / curvature, LEAST), MOST) if curvature else 1.0


def scaled_norm(norm: nn.Module, factor: float) -> nn.Module:
    """A copy of an RMS or layer norm whose outputs are multiplied; of those too whose gains are 1 plus their weight."""
    copied = deepcopy(norm)
    weight = copied.get_parameter("weight")
    signs = torch.ones_like(weight)
    signs[::2] = -1
    with torch.no_grad():
        gains = (copied(signs).float() - copied(-signs).float()) / 2 * signs
        offset = (gains - weight).mean().round()
        weight.copy_(factor * (weight.float() + offset) - offset)
        if getattr(copied, "bias", None) is not None:
            copied.get_parameter("bias").mul_(factor)
    return copied
