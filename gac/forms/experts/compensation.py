"""What remains takes over: down_proj of the experts that stay, fitted to what the layer no longer writes.

One expert after the other is given the step D that makes up for most of what is still lost, r. With h what its neurons
put out and w its weight, ``D = E[c w r h^T] (E[c w^2 h h^T] + damping)^-1`` over the tokens that reach it. These are
few, so half of them tell how much damping the other half needs, and whether steps help at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gac.core.linalg import cholesky
from gac.forms.curvature.metric import RoutedTokens
from gac.forms.experts.elimination import Routing

DAMPING = (0.1, 1.0, 10.0, 100.0)
"""Times the mean diagonal of the moment; one of them is taken in each layer."""


@dataclass(frozen=True, eq=False)
class _Share:
    """The tokens that reach one of the experts that stay: their numbers, and its weighted neurons ``(tokens, I)``."""

    tokens: Tensor
    neurons: Tensor


def compensated(experts: Any, routing: Routing, tokens: RoutedTokens, kept: Tensor) -> Tensor:
    """Return down_proj of the experts that stay, in the layout of the module, compensated for those that go."""
    dense, fewer = (routing.weights(some) for some in (routing.experts, kept))
    wrote = [experts(tokens.inputs, numbers, weights.to(tokens.inputs.dtype)) for numbers, weights in (dense, fewer)]
    lost, down = (wrote[0] - wrote[1]).double(), experts.down_proj.detach()[kept]
    shares = [_share(experts, tokens.inputs, *fewer, int(expert)) for expert in kept]
    counts, half = tokens.counts.double(), len(lost) // 2
    gradients = tokens.gradients.double()

    def left(damping: float) -> float:
        """Return what the second half of the tokens loses after steps that the first half asks for."""
        rest = lost.clone()
        for share, step in zip(shares, _steps(shares, lost, counts, damping, half), strict=True):
            rest[share.tokens] -= share.neurons @ step
        return float((counts[half:] * ((rest[half:] @ gradients) * rest[half:]).sum(1)).sum())

    best = min((*DAMPING, float("inf")), key=left)
    steps = torch.stack(_steps(shares, lost, counts, best, len(lost)))
    result: Tensor = (down.double() + (steps if experts.is_transposed else steps.mT)).to(down.dtype)
    return result


def _steps(shares: Sequence[_Share], lost: Tensor, counts: Tensor, damping: float, end: int) -> list[Tensor]:
    """Return a step ``(I, hidden)`` for each expert, of the tokens before ``end``; none with infinite damping."""
    rest, steps = lost.clone(), []
    for share in shares:
        seen = share.tokens < end
        tokens, neurons = share.tokens[seen], share.neurons[seen]
        step = neurons.new_zeros(neurons.shape[1], lost.shape[1])
        weighted = neurons * counts[tokens, None]
        moment = weighted.T @ neurons
        level = float(moment.diagonal().mean())
        if level > 0 and damping < float("inf"):
            moment.diagonal().add_(damping * level)
            step = torch.cholesky_solve(weighted.T @ rest[tokens], cholesky(moment))
            rest[tokens] -= neurons @ step
        steps.append(step)
    return steps


def _share(experts: Any, inputs: Tensor, numbers: Tensor, weights: Tensor, expert: int) -> _Share:
    tokens, places = (numbers == expert).nonzero(as_tuple=True)
    up = experts.gate_up_proj[expert]
    wide = inputs[tokens] @ (up if experts.is_transposed else up.T)
    if experts.has_bias:
        wide = wide + experts.gate_up_proj_bias[expert]
    return _Share(tokens, experts._apply_gate(wide).double() * weights[tokens, places, None].double())
