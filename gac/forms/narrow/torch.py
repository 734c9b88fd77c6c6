"""An MLP with fewer neurons: order of removal, and compensation of down_proj."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from gac.forms.curvature.metric import Metric
from gac.forms.narrow.elimination import compensated, eliminate, last_to_go
from gac.forms.tensors import Fit, SiteBuild, Statistics, TensorForm, bias_of
from gac.models.sites import Weight


class NarrowTensors(TensorForm):
    """Keeps the order in which neurons are removed, and the moments of down_proj."""

    def measure(self, statistics: Statistics, weights: Sequence[Weight]) -> Iterator[Fit]:
        for down in (weight for weight in weights if weight.neurons == "in"):
            elimination = eliminate(statistics.matrix(down), statistics.metric(down))
            yield Fit(down, elimination.curve.loss, {"order": elimination.order}, [down])

    def parameters(self, build: SiteBuild, weight: Weight, dim: int) -> dict[str, Tensor]:
        linear = build.linear(weight)
        down = next(other for other in build.weights if other.neurons == "in")
        neurons = last_to_go(build.artifacts.of(self.form, "order", down), dim)
        matrix = {"weight": narrowed(weight, linear.weight, neurons, build.statistics.metric)}
        if weight is down:
            return matrix | bias_of(linear)
        return matrix | {name: bias[rows_of(weight, neurons)] for name, bias in bias_of(linear).items()}


def rows_of(weight: Weight, neurons: Tensor) -> Tensor:
    """The rows of these neurons in gate or up, block after block."""
    blocks = range(0, weight.out_features, weight.out_features // weight.blocks)
    return torch.cat([start + neurons for start in blocks])


def narrowed(weight: Weight, matrix: Tensor, neurons: Tensor, metric: Callable[[Weight], Metric]) -> Tensor:
    """A weight ``(out, in)`` with some ``neurons (width,)``: their rows, or their columns compensated for the rest."""
    if weight.neurons == "in":
        return compensated(matrix, neurons, metric(weight))
    return matrix[rows_of(weight, neurons)]
