"""Compensation: down_proj of the experts that stay, fitted to what the layer no longer writes.

One expert after the other is given the step D that makes up for most of what is still lost, r. With h what its neurons
put out and w its weight, ``D = E[c w r h^T] (E[c w^2 h h^T] + damping)^-1`` over the tokens that reach it. These are
few, so half of them tell how much damping the other half needs, and whether steps help at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
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


class Compensation:
    """The output that a layer loses for each token with the experts ``kept``, and the steps that make up for it."""

    def __init__(self, experts: Any, routing: Routing, tokens: RoutedTokens, kept: Tensor) -> None:
        self._experts, self._kept = experts, kept
        dense, fewer = (routing.weights(some) for some in (routing.experts, kept))
        wrote = [experts(tokens.inputs, numbers, each.to(tokens.inputs.dtype)) for numbers, each in (dense, fewer)]
        self._lost, self._half = (wrote[0] - wrote[1]).double(), len(tokens.inputs) // 2
        self._counts, self._gradients = tokens.counts.double(), tokens.gradients.double()
        self._shares = [_share(experts, tokens.inputs, *fewer, int(expert)) for expert in kept]
        left = {damping: self._left(damping) for damping in (*DAMPING, inf)}
        self._damping = min(left, key=left.__getitem__)
        self.remaining = left[self._damping] / left[inf] if left[inf] else 1.0
        """The share of the loss that the second half of the tokens still has after steps that the first asks for."""

    def down_proj(self) -> Tensor:
        """Return down_proj of the experts that stay, compensated, in the layout of the module."""
        down = self._experts.down_proj.detach()[self._kept]
        steps = torch.stack(_steps(self._shares, self._lost, self._counts, self._damping, len(self._lost)))
        result: Tensor = (down.double() + (steps if self._experts.is_transposed else steps.mT)).to(down.dtype)
        return result

    def _left(self, damping: float) -> float:
        rest, half = self._lost.clone(), self._half
        steps = _steps(self._shares, self._lost, self._counts, damping, half)
        for share, step in zip(self._shares, steps, strict=True):
            rest[share.tokens] -= share.neurons @ step
        return float((self._counts[half:] * ((rest[half:] @ self._gradients) * rest[half:]).sum(1)).sum())


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
        if level > 0 and damping < inf:
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
