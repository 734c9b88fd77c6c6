"""Second moments of what each routed expert reads, which rounding its matrices with feedback needs.

With w the router's weight of a token and c its count, gate and up read x with ``E[c w^2 x x^T]``, and down reads the
neurons h with ``E[c w^2 h h^T]``. An expert that few tokens reach takes more of the mean over the layer's experts.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gac.forms.curvature.metric import RoutedTokens
from gac.forms.experts.elimination import Routing

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
    numbers, weights = routing.weights(routing.experts)
    inputs, neurons, reached = list[Tensor](), list[Tensor](), list[int]()
    for expert in range(len(routing.experts)):
        of_token, places = (numbers == expert).nonzero(as_tuple=True)
        x = tokens.inputs[of_token]
        up = experts.gate_up_proj[expert]
        wide = x @ (up if experts.is_transposed else up.T)
        if experts.has_bias:
            wide = wide + experts.gate_up_proj_bias[expert]
        share = tokens.counts[of_token].double() * weights[of_token, places].double() ** 2
        for moments, read in ((inputs, x.double()), (neurons, experts._apply_gate(wide).double())):
            moments.append((read * share[:, None]).T @ read / len(tokens.inputs))
        reached.append(len(of_token))
    count = torch.tensor(reached, device=tokens.inputs.device)
    return ExpertMoments(_shrunk(torch.stack(inputs), count), _shrunk(torch.stack(neurons), count), count)


def _shrunk(moments: Tensor, reached: Tensor) -> Tensor:
    prior = PRIOR * moments.shape[-1]
    share = (reached / (reached + prior))[:, None, None].to(moments.dtype)
    return share * moments + (1 - share) * moments.mean(0)
