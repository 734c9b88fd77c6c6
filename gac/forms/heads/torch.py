"""Attention with fewer heads: which groups go, what that loses, and what makes up for them.

Optimal brain surgeon on the input of o_proj, a whole group of heads at a time (LLM Surgeon, arXiv 2312.17244, section
3.3): with H = A^-1 and C = W^T G W, removing the columns S and solving o_proj again for the rest loses
``tr(C_SS (H_SS)^-1)``. The cheapest group goes first, then the cheapest beside it, and so on.

A group of heads is much to lose at once. The model loses about 1.3 times that price without some of them, and a refit
wins back less of it than of what other forms lose. So the price is multiplied by ``PRICE``.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from gac.arrays import Floats
from gac.forms.metric import FACTOR, Metric
from gac.forms.narrow.elimination import compensated, last_to_go
from gac.forms.tensors import Fit, SiteWork, Statistics, TensorForm, bias_of
from gac.linalg import cholesky
from gac.models.sites import Weight

PRICE = 1.5
"""The median of seven plans of SmolLM2, which lie between 0.8 and 2.6 (docs/results-structures.md)."""


def eliminate_groups(output: Tensor, metric: Metric, groups: int) -> tuple[Tensor, Floats]:
    """The order in which groups go, and what the best g of them lose, ``(groups + 1,)``, nats a token.

    Args:
        output: o_proj's weight, shape ``(out, in)``; its inputs are the groups, one after the other.
        metric: o_proj's.
    """
    weight = output.detach().double()
    inverse = torch.cholesky_inverse(cholesky(metric.inputs))
    gram = weight.T @ metric.gradients @ weight
    inside = torch.arange(weight.shape[1], device=weight.device).view(groups, -1)
    order: list[int] = []
    lost = [0.0]
    for _ in range(groups):
        costs = {
            one: _cost(inverse, gram, inside[[*order, one]].flatten()) for one in range(groups) if one not in order
        }
        order.append(min(costs, key=lambda one: costs[one]))
        lost.append(max(lost[-1], costs[order[-1]]))
    return torch.tensor(order, device=weight.device), PRICE * FACTOR * np.array(lost[::-1])


def _cost(inverse: Tensor, gram: Tensor, gone: Tensor) -> float:
    """tr(C_SS (H_SS)^-1) of the columns S."""
    solved = torch.cholesky_solve(gram[gone][:, gone], cholesky(inverse[gone][:, gone]))
    return float(solved.trace())


class HeadTensors(TensorForm):
    """The order in which groups go is kept, and o_proj's moments."""

    def measure(self, statistics: Statistics, weights: Sequence[Weight]) -> Iterator[Fit]:
        for output in (weight for weight in weights if self.form.shortens(weight) == "in"):
            metric = statistics.metric(output)
            order, loss = eliminate_groups(statistics.matrix(output), metric, output.groups)
            yield Fit(output, loss, {"order": order}, [output])

    def parameters(self, work: SiteWork, weight: Weight, dim: int) -> dict[str, Tensor]:
        linear = work.linear(weight)
        output = next(one for one in work.weights if self.form.shortens(one) == "in")
        groups = last_to_go(work.kept.of(self.form, "order", output), dim)
        length = self.form.size(weight, 1)
        kept = (groups[:, None] * length + torch.arange(length, device=groups.device)).flatten()
        if weight is output:
            return {"weight": compensated(linear.weight, kept, work.statistics.metric(weight))} | bias_of(linear)
        return {name: values[kept] for name, values in linear.named_parameters()}
