"""An MLP with fewer neurons: which go, and what makes up for them."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gac.forms.narrow.elimination import compensated, eliminate, last_to_go
from gac.forms.tensors import Fit, SiteWork, Statistics, TensorForm, bias_of
from gac.models.weights import Weight


class NarrowTensors(TensorForm):
    """The order in which neurons go is kept, and the moments of what reads them."""

    def measure(self, statistics: Statistics, weights: Sequence[Weight]) -> Iterator[Fit]:
        for down in (weight for weight in weights if weight.neurons == "in"):
            found = eliminate(statistics.matrix(down), statistics.metric(down))
            yield Fit(down, found.curve.loss, {"order": found.order}, [down])

    def parameters(self, work: SiteWork, weight: Weight, dim: int) -> dict[str, Tensor]:
        linear, kept = work.linear(weight), self._neurons(work, dim)
        if weight.neurons == "in":
            return {"weight": compensated(linear.weight, kept, work.statistics.metric(weight))} | bias_of(linear)
        blocks = range(0, weight.out_features, weight.out_features // weight.blocks)
        rows = torch.cat([start + kept for start in blocks])
        bias = {} if linear.bias is None else {"bias": linear.bias[rows]}
        return {"weight": linear.weight[rows]} | bias

    def _neurons(self, work: SiteWork, dim: int) -> Tensor:
        """Indices of those that stay, ascending, the same for all weights of the site."""
        if "neurons" not in work.shared:
            down = next(weight for weight in work.weights if weight.neurons == "in")
            work.shared["neurons"] = last_to_go(work.kept.of(self.form, "order", down), dim)
        found: Tensor = work.shared["neurons"]
        return found
