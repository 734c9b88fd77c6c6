"""Compensation: down_proj of the experts that stay, fitted to what the layer no longer writes.

One expert after the other is given the step D that makes up for most of what is still lost, r. With h what the neurons
that stay put out and w its weight, ``D = E[c w r h^T] (E[c w^2 h h^T] + damping)^-1`` over the tokens that reach it.
These are few, so half of them tell how much damping the other half needs, and whether steps help at all.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any

import torch
from torch import Tensor

from gac.core.linalg import cholesky
from gac.forms.curvature.metric import FACTOR, RoutedTokens
from gac.forms.experts.elimination import Routing
from gac.forms.experts.neurons import parameters_at, width_of
from gac.runtime.modules import resized

DAMPING = (0.1, 1.0, 10.0, 100.0, inf)
"""Times the mean diagonal of the moment; one of them is taken in each layer."""
BLOCKS = 16
"""Parts of the sample, of which every other one is held out: tokens near each other are alike."""


@dataclass(frozen=True, eq=False)
class Share:
    """The tokens that reach an expert: their numbers, its weights of them, and its neurons times these."""

    tokens: Tensor
    weights: Tensor
    neurons: Tensor


class Layer:
    """The routed experts of a layer, and what they write for a sample of tokens."""

    def __init__(self, experts: Any, routing: Routing, tokens: RoutedTokens) -> None:
        self.experts, self.routing, self.tokens = experts, routing, tokens
        self.counts, self.gradients = tokens.counts.double(), tokens.gradients.double()
        places = torch.arange(len(tokens.inputs), device=tokens.inputs.device)
        self.held_out = places * BLOCKS // len(places) % 2 == 1

    @cached_property
    def wrote(self) -> Tensor:
        """Outputs of the dense layer, ``(tokens, hidden)``."""
        return self.written_by(self.experts)

    @property
    def every_neuron(self) -> Tensor:
        """The numbers of the neurons of each expert."""
        width = width_of(self.experts)
        return torch.arange(width, device=self.tokens.inputs.device).expand(len(self.routing.experts), -1)

    def shares(self) -> Iterator[Share]:
        """Yield what reaches each expert of the dense layer."""
        numbers, weights = self.routing.weights(self.routing.experts)
        for expert in range(len(self.routing.experts)):
            yield share_of(self.experts, self.tokens.inputs, numbers, weights, expert)

    def without(self, kept: Tensor, neurons: Tensor) -> "Remainder":
        """Return the layer with some experts, ascending, and the ``neurons (kept, width)`` of each."""
        fewer = resized(self.experts, experts=len(kept), width=neurons.shape[1])
        vars(fewer).pop("forward", None)  # of accelerate, where weights are streamed
        fewer.load_state_dict(parameters_at(self.experts, kept, neurons), assign=True)
        numbers, weights = self.routing.weights(kept)
        numbers = torch.searchsorted(kept, numbers)
        lost = self.wrote - self._written(fewer, numbers, weights)
        shares = [share_of(fewer, self.tokens.inputs, numbers, weights, expert) for expert in range(len(kept))]
        return Remainder(self, fewer, lost.double(), shares)

    def written_by(self, experts: Any) -> Tensor:
        """Return what other experts in their place would write, ``(tokens, hidden)``."""
        return self._written(experts, *self.routing.weights(self.routing.experts))

    @torch.no_grad()
    def _written(self, experts: Any, numbers: Tensor, weights: Tensor) -> Tensor:
        inputs = self.tokens.inputs
        written: Tensor = experts(inputs, numbers, weights.to(inputs.dtype))
        return written.float()


@dataclass(frozen=True, eq=False)
class Remainder:
    """A layer with fewer or narrower experts: what it lacks for each token, ``(tokens, hidden)``."""

    layer: Layer
    experts: Any
    lost: Tensor
    shares: Sequence[Share]

    @cached_property
    def damping(self) -> float:
        """The damping with which held-out tokens lose least."""
        return min(DAMPING, key=self.loss)

    def loss(self, damping: float) -> float:
        """Return the loss of held-out tokens after steps that the others ask for, nats a token."""
        rest, held_out = self.lost.clone(), self.layer.held_out
        for share, step in zip(self.shares, self._steps(damping, ~held_out), strict=True):
            rest[share.tokens] -= share.neurons @ step
        of_tokens = self.layer.counts * ((rest @ self.layer.gradients) * rest).sum(1)
        return FACTOR * float(of_tokens[held_out].mean())

    def down_proj(self, damping: float) -> Tensor:
        """Return down_proj, compensated, in the layout of the module."""
        down = self.experts.down_proj.detach()
        steps = torch.stack(self._steps(damping, torch.ones_like(self.layer.held_out)))
        result: Tensor = (down.double() + (steps if self.experts.is_transposed else steps.mT)).to(down.dtype)
        return result

    def _steps(self, damping: float, seen: Tensor) -> list[Tensor]:
        """Return a step ``(width, hidden)`` for each expert, from tokens that are ``seen``."""
        rest, steps = self.lost.clone(), []
        for share in self.shares:
            chosen = seen[share.tokens]
            tokens, neurons = share.tokens[chosen], share.neurons[chosen]
            step = neurons.new_zeros(neurons.shape[1], rest.shape[1])
            weighted = neurons * self.layer.counts[tokens, None]
            if damping < inf and len(tokens) and float(level := (weighted * neurons).sum() / neurons.shape[1]) > 0:
                moment = weighted.T @ neurons
                moment.diagonal().add_(damping * level)
                step = torch.cholesky_solve(weighted.T @ rest[tokens], cholesky(moment))
                rest[tokens] -= neurons @ step
            steps.append(step)
        return steps


@torch.no_grad()
def share_of(experts: Any, inputs: Tensor, numbers: Tensor, weights: Tensor, expert: int) -> Share:
    """Return what reaches an expert, of tokens that take the experts ``numbers`` with these weights."""
    tokens, places = (numbers == expert).nonzero(as_tuple=True)
    up = experts.gate_up_proj[expert]
    wide = inputs[tokens] @ (up if experts.is_transposed else up.T)
    if experts.has_bias:
        wide = wide + experts.gate_up_proj_bias[expert]
    weight = weights[tokens, places].double()
    return Share(tokens, weight, experts._apply_gate(wide).double() * weight[:, None])
