"""The order in which a layer's experts go, and the loss with those that are left.

For each token t, the outputs f_e(t) of all experts are known by their products K_ab = f_a^T G f_b. Where the router
gives the weights w to some experts, and v where others are gone, the token loses ``(v - w)^T K (v - w)``: exactly what
the smaller layer writes less. Experts go one at a time, always the one without which the layer loses least.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gac.core.arrays import Floats
from gac.forms.curvature.metric import FACTOR, RoutedTokens
from gac.runtime.modules import resized

CHUNK = 2**26
"""Numbers of the experts' outputs that are computed at once."""

Weights = tuple[Tensor, Tensor]
"""The experts that each token takes, by their numbers in the dense layer, and their weights, both ``(tokens, k)``."""


@dataclass(frozen=True, eq=False)
class Elimination:
    """``order[i]`` is the i-th expert removed; ``loss[e]`` the loss with the best e experts, nats a token.

    ``reached``: the tokens of the sample that take each expert in the dense layer, shape ``(experts,)``.
    """

    order: Tensor
    loss: Floats
    reached: Tensor


class Routing:
    """The choices of a router of some tokens, with all its experts or some of them, as the model makes them.

    A router with fewer rows scores the experts that are left as before: so it is given the scores, and scores them by
    the identity.
    """

    def __init__(self, router: Any, inputs: Tensor) -> None:
        self._router, self._logits = router, router(inputs)[0]

    @property
    def experts(self) -> Tensor:
        return torch.arange(self._logits.shape[1], device=self._logits.device)

    def weights(self, kept: Tensor) -> Weights:
        count = len(kept)
        router = resized(self._router, experts=count)
        vars(router).pop("forward", None)  # of accelerate, where weights are streamed
        router.hidden_dim = count
        fixed = {name: torch.zeros_like(values) for name, values in router._parameters.items() if name != "weight"}
        eye = torch.eye(count, dtype=self._logits.dtype, device=self._logits.device)
        vars(router)["_parameters"] = {"weight": eye, **fixed}
        _, weights, chosen = router(self._logits[:, kept])
        return kept[chosen], weights.to(_precise(weights))


def products(experts: nn.Module, count: int, tokens: RoutedTokens) -> Tensor:
    """Return ``f_a^T G f_b`` of the outputs of all experts for each token, shape ``(tokens, experts, experts)``."""
    inputs, kind = tokens.inputs, _precise(tokens.inputs)
    gradients = tokens.gradients.to(kind)
    result = torch.empty(len(inputs), count, count, dtype=kind, device=inputs.device)
    size = max(1, CHUNK // (count * inputs.shape[1]))
    for part in (slice(start, start + size) for start in range(0, len(inputs), size)):
        outputs = torch.stack([written(experts, expert, inputs[part]) for expert in range(count)], dim=1).to(kind)
        result[part] = outputs @ gradients @ outputs.mT
    return result


def written(experts: nn.Module, expert: int, inputs: Tensor) -> Tensor:
    """Return what one expert writes for each of some tokens, ``(tokens, hidden)``, as the module computes it."""
    number = torch.full((len(inputs), 1), expert, device=inputs.device)
    output: Tensor = experts(inputs, number, torch.ones_like(number, dtype=inputs.dtype))
    return output


def eliminate(routing: Routing, gram: Tensor, counts: Tensor, top_k: int) -> Elimination:
    """Remove experts one at a time until ``top_k`` are left; ``counts (tokens,)`` weigh the tokens."""
    kept = routing.experts
    dense = routing.weights(kept)
    losses, gone, experts = [0.0], list[int](), len(kept)
    price, unseen = _pricing(gram, counts, dense), _unseen(gram, counts, dense)
    while len(kept) > top_k:
        others = [torch.cat([kept[:place], kept[place + 1 :]]) for place in range(len(kept))]
        prices = torch.stack([price(routing.weights(other)) for other in others])
        least = int(prices.argmin())
        gone.append(int(kept[least]))
        losses.append(float(prices[least]) + len(gone) * unseen)
        kept = others[least]
    losses += [losses[-1]] * top_k  # fewer than a token takes are no choice
    loss = np.maximum.accumulate(np.array(losses))[::-1].copy()
    order = torch.tensor([*gone, *kept.tolist()], device=kept.device)
    return Elimination(order, loss, torch.bincount(dense[0].flatten(), minlength=experts))


def _unseen(gram: Tensor, counts: Tensor, dense: Weights) -> float:
    """Return the loss of one token more that takes a removed expert, as it is on average: no expert is free."""
    numbers, weights = dense
    of_each = gram.diagonal(dim1=1, dim2=2).gather(1, numbers) * weights.to(gram.dtype).square()
    lost = (counts.to(gram.dtype)[:, None] * of_each).mean()
    return FACTOR * float(lost) / len(gram)


def _pricing(gram: Tensor, counts: Tensor, dense: Weights) -> Callable[[Weights], Tensor]:
    tokens, counts = torch.arange(len(gram), device=gram.device)[:, None, None], counts.to(gram.dtype)

    def price(changed: Weights) -> Tensor:
        numbers = torch.cat([dense[0], changed[0]], dim=1)
        more = torch.cat([-dense[1], changed[1]], dim=1).to(gram.dtype)
        of_pairs = gram[tokens, numbers[:, :, None], numbers[:, None, :]]
        lost: Tensor = (of_pairs * more[:, :, None] * more[:, None, :]).sum((1, 2))
        return FACTOR * (counts * lost).mean()

    return price


def _precise(values: Tensor) -> torch.dtype:
    return torch.float32 if values.is_cuda else torch.float64
