"""Second moments of what each routed expert reads, which rounding its matrices with feedback needs.

With w the router's weight of a token and c its count, gate and up read x with ``E[c w^2 x x^T]``, and down reads the
neurons h with ``E[c w^2 h h^T]``. An expert that few tokens reach takes more of the mean over the layer's experts.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gac.forms.curvature.metric import FACTOR, RoutedTokens
from gac.forms.experts.compensation import Layer
from gac.forms.experts.elimination import Routing
from gac.runtime.storage.base import Tensors
from gac.runtime.storage.experts import StoredExperts, rounded
from gac.schemes import Scheme
from gac.schemes.base import storage_of
from gac.schemes.feedback.order import Inputs

PRIOR = 1.0
"""Tokens, times the columns of a matrix, that the mean of the layer counts as."""


@dataclass(frozen=True, eq=False)
class ExpertMoments:
    """Moments of all experts, ``(experts, hidden, hidden)`` and ``(experts, I, I)``, and the tokens that reach each."""

    inputs: Tensor
    neurons: Tensor
    reached: Tensor


@torch.no_grad()
def expert_moments(experts: Any, routing: Routing, tokens: RoutedTokens) -> ExpertMoments:
    """Return the moments of the tokens that the router gives to each expert, shrunk towards their mean."""
    inputs, neurons, reached = list[Tensor](), list[Tensor](), list[int]()
    for share in Layer(experts, routing, tokens).shares():
        counts = tokens.counts[share.tokens, None].double() / len(tokens.inputs)
        x = tokens.inputs[share.tokens].double() * share.weights[:, None]
        for moments, read in ((inputs, x), (neurons, share.neurons)):
            moments.append((read * counts).T @ read)
        reached.append(len(share.tokens))
    count = torch.tensor(reached, device=tokens.inputs.device)
    return ExpertMoments(_shrunk(torch.stack(inputs), count), _shrunk(torch.stack(neurons), count), count)


@torch.no_grad()
def rounded_to(
    scheme: Scheme, experts: Any, routing: Routing, tokens: RoutedTokens, thorough: bool = True
) -> StoredExperts:
    """Return routed experts in a scheme with a storage, rounded with feedback for the tokens that reach each."""
    moments, storage = expert_moments(experts, routing, tokens), storage_of(scheme)
    assert storage is not None, f"scheme {scheme.name} holds no experts"

    def round_(name: str, expert: int, matrix: Tensor) -> Tensors:
        reads = moments.neurons if name == "down_proj" else moments.inputs
        return scheme.stored(matrix, Inputs(reads[expert], thorough))

    return rounded(storage, experts, round_)


@torch.no_grad()
def loss_of_rounded(scheme: Scheme, experts: Any, router: Any, tokens: RoutedTokens) -> float:
    """Return what storing a layer's experts in a scheme loses, nats a token.

    It is ``E[c d^T G d]`` with d what the layer then writes less, on every other part of the tokens; the experts are
    rounded for the rest of them.
    """
    held_out = Layer(experts, Routing(router, tokens.inputs), tokens).held_out
    seen, unseen = (
        RoutedTokens(tokens.inputs[of], tokens.counts[of], tokens.gradients) for of in (~held_out, held_out)
    )
    stored = rounded_to(scheme, experts, Routing(router, seen.inputs), seen, thorough=False)
    layer = Layer(experts, Routing(router, unseen.inputs), unseen)
    lost = (layer.wrote - layer.written_by(stored)).double()
    return FACTOR * float((layer.counts * ((lost @ layer.gradients) * lost).sum(1)).mean())


def _shrunk(moments: Tensor, reached: Tensor) -> Tensor:
    prior = PRIOR * moments.shape[-1]
    share = (reached / (reached + prior))[:, None, None].to(moments.dtype)
    return share * moments + (1 - share) * moments.mean(0)
