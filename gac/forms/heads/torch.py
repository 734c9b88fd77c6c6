"""Attention with fewer heads: which groups go, what that loses, and what makes up for them.

Optimal brain surgeon on the input of o_proj, a whole group of heads at a time (LLM Surgeon, arXiv 2312.17244, section
3.3): with H = A^-1 and C = W^T G W, removing the columns S and solving o_proj again for the rest loses
``tr(C_SS (H_SS)^-1)``. The cheapest group goes first, then the cheapest beside it, and so on.

A group of heads is much to lose at once, and what it adds is large where its gradients are: so the order is chosen in
the metric, and what each number of groups loses is measured by running the model without the others. Once the
model is fitted again, more of it is left than of what other forms lose, so the price is ``LEFT`` times that.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from gac.core.linalg import cholesky
from gac.forms.by_runs import taken_together
from gac.forms.curvature.metric import Metric
from gac.forms.narrow.elimination import compensated, last_to_go
from gac.forms.tensors import Fit, Kept, SiteWork, Statistics, TensorForm, bias_of
from gac.models.sites import Weight
from gac.runtime.modules import empty_linear

LEFT = 1.4
"""Near the mean of four plans of SmolLM2, which lie between 1.2 and 1.6 (results/structures.md)."""


def eliminate_groups(output: Tensor, metric: Metric, groups: int) -> Tensor:
    """The order in which groups go, the one whose loss is least first.

    Args:
        output: o_proj's weight, shape ``(out, in)``; its inputs are the groups, one after the other.
        metric: o_proj's.
    """
    weight = output.detach().double()
    inverse = torch.cholesky_inverse(cholesky(metric.inputs))
    gram = weight.T @ metric.gradients @ weight
    inside = torch.arange(weight.shape[1], device=weight.device).view(groups, -1)
    order: list[int] = []
    for _ in range(groups):
        costs = {
            one: _cost(inverse, gram, inside[[*order, one]].flatten()) for one in range(groups) if one not in order
        }
        order.append(min(costs, key=lambda one: costs[one]))
    return torch.tensor(order, device=weight.device)


def _cost(inverse: Tensor, gram: Tensor, gone: Tensor) -> float:
    """tr(C_SS (H_SS)^-1) of the columns S."""
    solved = torch.cholesky_solve(gram[gone][:, gone], cholesky(inverse[gone][:, gone]))
    return float(solved.trace())


class HeadTensors(TensorForm):
    """The order in which groups go is kept, and o_proj's moments."""

    def measure(self, statistics: Statistics, weights: Sequence[Weight]) -> Iterator[Fit]:
        assert statistics.runs is not None, f"{self.form.name} is measured by running the model"
        for together in taken_together(self.form, weights):
            output = together[-1]
            order = eliminate_groups(statistics.matrix(output), statistics.metric(output), output.groups)
            work = SiteWork(together, Kept({f"{self.form.name}.order/{output.name}": order}), statistics)
            lost = [statistics.runs.divergence(self._modules(work, dim)) for dim in range(output.groups - 1, 0, -1)]
            # What was measured has noise: fewer heads never lose less here. No attention has none.
            loss = LEFT * np.maximum.accumulate([0.0, *lost, lost[-1]])[::-1]
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

    def _modules(self, work: SiteWork, dim: int) -> dict[str, nn.Module]:
        """What the attention multiplies with at a dim, in the model's dtype."""
        found: dict[str, nn.Module] = {}
        for weight in work.weights:
            linear, sizes = work.linear(weight), self.form.module(weight, dim).sizes
            like = linear.weight
            module = empty_linear(**sizes, bias=linear.bias is not None, device=like.device, dtype=like.dtype)
            module.load_state_dict(self.parameters(work, weight, dim))
            found[weight.name] = module
        return found
