"""Head pruning: order of removal, loss, and compensation of o_proj.

Optimal brain surgeon on the input of o_proj, one group of heads at a time (LLM Surgeon, arXiv 2312.17244, section
3.3): with H = A^-1 and C = W^T G W, removing the columns S and solving o_proj again for the rest loses
``tr(C_SS (H_SS)^-1)``. The cheapest group goes first, then the group that is cheapest with it, and so on.

A group of heads is much to lose at once, and adds much where its gradients are large: so the order is chosen in the
metric, and the loss of each number of groups is measured by running the model without the others. A refit recovers
less of it than of the loss of other forms, so the price is ``AFTER_REFIT`` times that.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from gac.core.linalg import cholesky
from gac.forms.artifacts import LayerArtifacts
from gac.forms.curvature.metric import Metric
from gac.forms.narrow.elimination import compensated, last_to_go
from gac.forms.tensors import Fit, SiteBuild, Statistics, TensorForm, bias_of, joint_weights
from gac.models.sites import Weight

AFTER_REFIT = 1.4
"""Near the mean of four plans of SmolLM2, which lie between 1.2 and 1.6 (results/structures.md)."""


def eliminate_groups(output: Tensor, metric: Metric, groups: int) -> Tensor:
    """The order in which groups are removed, the cheapest first; ``output`` is o_proj's weight, ``(out, in)``."""
    weight = output.detach().double()
    inverse = torch.cholesky_inverse(cholesky(metric.inputs))
    gram = weight.T @ metric.gradients @ weight
    columns = torch.arange(weight.shape[1], device=weight.device).view(groups, -1)
    order: list[int] = []
    for _ in range(groups):
        remaining = [group for group in range(groups) if group not in order]
        order.append(min(remaining, key=lambda group: _cost(inverse, gram, columns[[*order, group]].flatten())))
    return torch.tensor(order, device=weight.device)


def _cost(inverse: Tensor, gram: Tensor, removed: Tensor) -> float:
    """tr(C_SS (H_SS)^-1) of the columns S."""
    solved = torch.cholesky_solve(gram[removed][:, removed], cholesky(inverse[removed][:, removed]))
    return float(solved.trace())


class HeadGroupsTensors(TensorForm):
    """Keeps the order in which groups are removed, and o_proj's moments."""

    def measure(self, statistics: Statistics, weights: Sequence[Weight]) -> Iterator[Fit]:
        assert statistics.runs is not None, f"{self.form.name} is measured by running the model"
        for group in joint_weights(self.form, weights):
            output = group[-1]
            order = eliminate_groups(statistics.matrix(output), statistics.metric(output), output.groups)
            artifacts = LayerArtifacts({f"{self.form.name}.order/{output.name}": order})
            build = SiteBuild(group, replace(statistics, artifacts=artifacts))
            lost = [
                statistics.runs.divergence({weight.name: self.module(build, weight, dim) for weight in group})
                for dim in range(output.groups - 1, 0, -1)
            ]
            # Losses are noisy: with fewer heads they never fall here. No attention has 0 heads.
            loss = AFTER_REFIT * np.maximum.accumulate([0.0, *lost, lost[-1]])[::-1]
            yield Fit(output, loss, {"order": order}, [output])

    def parameters(self, build: SiteBuild, weight: Weight, dim: int) -> dict[str, Tensor]:
        linear = build.linear(weight)
        output = next(other for other in build.weights if self.form.shortens(other) == "in")
        groups = last_to_go(build.artifacts.of(self.form, "order", output), dim)
        length = self.form.size(weight, 1)
        columns = (groups[:, None] * length + torch.arange(length, device=groups.device)).flatten()
        if weight is output:
            return {"weight": compensated(linear.weight, columns, build.statistics.metric(weight))} | bias_of(linear)
        return {name: values[columns] for name, values in linear.named_parameters()}
