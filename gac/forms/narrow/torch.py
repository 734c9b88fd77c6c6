"""An MLP with fewer neurons: which go, and what makes up for them."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

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
        if weight is down:
            return {"weight": compensated(linear.weight, kept, work.statistics.metric(weight))} | bias_of(linear)
        blocks = range(0, weight.out_features, weight.out_features // weight.blocks)
        rows = torch.cat([start + kept for start in blocks])
        return {name: values[rows] for name, values in linear.named_parameters()}
