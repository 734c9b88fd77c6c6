"""The order in which a layer's experts go, and the loss with those that are left.

For each token t, the outputs f_e(t) of all experts are known by their products K_ab = f_a^T G f_b. Where the router
gives the weights w to some experts, and v where others are gone, the token loses ``(v - w)^T K (v - w)``: exactly what
the smaller layer writes less. Experts go one at a time, always the one without which the layer loses least.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
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
    the identity. What else it has of each expert (a bias that corrects its choice) it keeps. Where it takes groups of
    experts, and some have lost one more than others, these get an expert in its place that no token takes.
    """

    def __init__(self, router: Any, inputs: Tensor) -> None:
        self._router, self._logits = router, router(inputs)[0]
        self._groups: int = getattr(router, "num_group", None) or 1

    @property
    def experts(self) -> Tensor:
        return torch.arange(self._logits.shape[1], device=self._logits.device)

    def next_to_go(self, kept: Tensor) -> list[int]:
        """The places of the experts of which one may go next: those of the largest groups."""
        groups = self._group_of(kept)
        sizes = torch.bincount(groups, minlength=self._groups)
        places: list[int] = (sizes[groups] == sizes.max()).nonzero()[:, 0].tolist()
        return places

    def weights(self, kept: Tensor) -> Weights:
        slots, empty = self._slots(kept)
        router = resized(self._router, experts=len(slots))
        router.hidden_dim = len(slots)
        for part, dense in zip(_parts(router), _parts(self._router), strict=True):
            vars(part).pop("forward", None)  # of accelerate, where weights are streamed
            for kind in ("_parameters", "_buffers"):
                tensors = {name: values for name, values in vars(dense)[kind].items() if values is not None}
                vars(part)[kind] |= {name: self._of(name, values, slots, empty) for name, values in tensors.items()}
        logits = self._logits[:, slots].masked_fill(empty, torch.finfo(self._logits.dtype).min)
        _, weights, chosen = router(logits)
        return slots[chosen], weights.to(_precise(weights))

    def _of(self, name: str, values: Tensor, slots: Tensor, empty: Tensor) -> Tensor:
        if name == "weight":
            return torch.eye(len(slots), dtype=self._logits.dtype, device=self._logits.device)
        if name == "bias":  # which the scores have already
            return values.new_zeros(len(slots))
        return of_experts(values, slots, self._logits.shape[1]).masked_fill(empty, -inf)

    def _group_of(self, kept: Tensor) -> Tensor:
        return torch.div(kept * self._groups, self._logits.shape[1], rounding_mode="floor")

    def _slots(self, kept: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts, ascending, in groups of as many, and which of them stand for none."""
        sizes = torch.bincount(self._group_of(kept), minlength=self._groups)
        filled = torch.arange(int(sizes.max()), device=kept.device) < sizes[:, None]
        slots = kept.new_zeros(filled.shape)
        slots[filled] = kept
        return slots.flatten(), ~filled.flatten()


def of_experts(values: Tensor, kept: Tensor, experts: int) -> Tensor:
    """Return what a tensor of a router has of the experts that are kept, along the axis of all of them."""
    return values.detach().index_select(list(values.shape).index(experts), kept.to(values.device))


def _parts(router: nn.Module) -> tuple[nn.Module, ...]:
    return router, *router.children()


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


def eliminate(routing: Routing, gram: Tensor, counts: Tensor, least: int) -> Elimination:
    """Remove experts one at a time until ``least`` are left; ``counts (tokens,)`` weigh the tokens."""
    kept = routing.experts
    dense = routing.weights(kept)
    losses, gone, experts = [0.0], list[int](), len(kept)
    price, unseen = _pricing(gram, counts, dense), _unseen(gram, counts, dense)
    while len(kept) > least:
        places = routing.next_to_go(kept)
        others = [torch.cat([kept[:place], kept[place + 1 :]]) for place in places]
        prices = torch.stack([price(routing.weights(other)) for other in others])
        first = int(prices.argmin())
        gone.append(int(kept[places[first]]))
        losses.append(float(prices[first]) + len(gone) * unseen)
        kept = others[first]
    losses += [losses[-1]] * least  # fewer than a token takes are no choice
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
