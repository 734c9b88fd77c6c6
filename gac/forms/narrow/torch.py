"""An MLP with fewer neurons: which go, and what makes up for them."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from gac.forms.curvature.metric import Metric
from gac.forms.narrow.elimination import compensated, eliminate, last_to_go
from gac.forms.tensors import Fit, SiteWork, Statistics, TensorForm, bias_of
from gac.models.sites import Weight


class NarrowTensors(TensorForm):
    """The order in which neurons go is kept, and the moments of what reads them."""

    def measure(self, statistics: Statistics, weights: Sequence[Weight]) -> Iterator[Fit]:
        for down in (weight for weight in weights if weight.neurons == "in"):
            found = eliminate(statistics.matrix(down), statistics.metric(down))
            yield Fit(down, found.curve.loss, {"order": found.order}, [down])

    def parameters(self, work: SiteWork, weight: Weight, dim: int) -> dict[str, Tensor]:
        linear = work.linear(weight)
        down = next(one for one in work.weights if one.neurons == "in")
        kept = last_to_go(work.kept.of(self.form, "order", down), dim)
        found = {"weight": narrowed(weight, linear.weight, kept, work.statistics.metric)}
        if weight is down:
            return found | bias_of(linear)
        return found | {name: bias[rows_of(weight, kept)] for name, bias in bias_of(linear).items()}


def rows_of(weight: Weight, kept: Tensor) -> Tensor:
    """The rows of these neurons in a weight that writes them, block after block."""
    blocks = range(0, weight.out_features, weight.out_features // weight.blocks)
    return torch.cat([start + kept for start in blocks])


def narrowed(weight: Weight, matrix: Tensor, kept: Tensor, metric: Callable[[Weight], Metric]) -> Tensor:
    """A weight ``(out, in)`` with these neurons alone: their rows, or their columns re-solved for those that go.

    Args:
        kept: the neurons that stay, shape ``(width,)``.
        metric: asked for that of a weight that reads neurons.
    """
    if weight.neurons == "in":
        return compensated(matrix, kept, metric(weight))
    return matrix[rows_of(weight, kept)]
