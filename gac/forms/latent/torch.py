"""Latents of groups of heads: a low-rank pair for each group of one weight (PaLU, arXiv 2407.21118, section 3.2)."""

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from gac.core.arrays import Floats
from gac.forms.curvature.metric import Metric
from gac.forms.decomposition import Decomposition, decompose
from gac.forms.latent.anchors import anchor_ranks, anchored
from gac.forms.latent.spec import Latent
from gac.forms.loss_curves import LossCurve
from gac.forms.low_rank.torch import merged_pair
from gac.forms.refit import Refits, WeightRefit
from gac.forms.tensors import Fit, Kept, SiteWork, Statistics, TensorForm, bias_of
from gac.models.sites import Weight


def decompose_groups(weight: Tensor, metric: Metric, groups: int) -> tuple[list[Decomposition], LossCurve]:
    """Truncate each group's rows of a weight ``(out, in)`` by themselves, in their part of the metric.

    The curve is what each rank loses in all groups together. An error of two groups is taken for the sum of their
    errors: gradients that they share count as independent.

    Args:
        groups: how many; each has ``out / groups`` neighbouring rows.

    Raises:
        ModelError: a statistic or the weight is not finite.
    """
    rows = weight.shape[0] // groups
    parts = [slice(start, start + rows) for start in range(0, groups * rows, rows)]
    found = [decompose(weight[part], Metric(metric.inputs, metric.gradients[part, part])) for part in parts]
    return found, LossCurve(np.sum([group.curve.loss for group in found], axis=0))


def _first_only(refit: WeightRefit, module: nn.Module) -> None:
    """The first factors of groups of heads; what follows them stays."""
    first = module.get_parameter("first.weight")
    first.copy_(first.double() @ refit.turn)


class LatentTensors(TensorForm):
    """Factors of all ranks of each group are kept. Where the model is run, curves pass through what that measured."""

    refits: ClassVar[Refits] = {"residual": _first_only}

    def measure(self, statistics: Statistics, weights: Sequence[Weight]) -> Iterator[Fit]:
        for weight in weights:
            folded = statistics.method.folds and weight.values == "out"
            if self.form.takes(weight) and not folded:
                matrix = statistics.matrix(weight)
                found, curve = decompose_groups(matrix, statistics.cached_metric(weight), self._groups(weight))
                seconds, firsts = zip(*(group.factors(curve.full) for group in found), strict=True)
                kept = {"second": torch.stack(seconds).to(matrix.dtype), "first": torch.cat(firsts).to(matrix.dtype)}
                yield Fit(weight, self._anchored(statistics, weight, curve.loss, kept), kept)

    def parameters(self, work: SiteWork, weight: Weight, dim: int) -> dict[str, Tensor]:
        second, first = (work.kept.of(self.form, name, weight) for name in ("second", "first"))
        rows = first.view(len(second), -1, weight.in_features)[:, :dim].flatten(0, 1)
        pair = {"first.weight": rows, "second.weight": second[:, :, :dim]}
        return pair | bias_of(work.linear(weight), "second.bias")

    def merge(self, weight: Weight, dim: int, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return merged_pair(weight, own)

    def _anchored(self, statistics: Statistics, weight: Weight, price: Floats, kept: Mapping[str, Tensor]) -> Floats:
        """The price of every rank, corrected by running the model with this weight alone changed."""
        if (runs := statistics.runs) is None:
            return price
        own = Kept({f"{self.form.name}.{name}/{weight.name}": tensor for name, tensor in kept.items()})
        work = SiteWork([weight], own, statistics)

        def lost(rank: int) -> float:
            return runs.divergence({weight.name: self.module(work, weight, rank)})

        ranks = anchor_ranks(price, [total / (2 * runs.layers) for total in self.form.anchors])
        coarse = torch.finfo(statistics.matrix(weight).dtype).bits < 32
        rounding = lost(len(price) - 1) if ranks and coarse else 0.0
        return anchored(price, {rank: lost(rank) - rounding for rank in ranks})

    def _groups(self, weight: Weight) -> int:
        assert isinstance(self.form, Latent)
        return self.form.groups(weight)
