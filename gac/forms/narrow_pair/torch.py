"""A weight of a narrower MLP as two factors: truncated in the metric over the neurons that stay.

The rows of gate and up that stay are truncated in the metric of their outputs; the columns of down that stay, re-solved
for the removed ones, in the metric of their inputs. With W' these columns, E the error of narrowing W and F one
of W', the normal equations of W' say that E A F^T = 0: so what narrowing loses and what truncation loses add up.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from torch import Tensor, nn

from gac.core.linalg import packed, unpacked
from gac.forms.artifacts import LayerArtifacts
from gac.forms.base import Form
from gac.forms.curvature.metric import MeasuredWeight, Metric
from gac.forms.decomposition import decompose, decompose_as_seen
from gac.forms.low_rank.torch import PairTensors, fill_pair, refit_and_truncate, update_second
from gac.forms.narrow.elimination import last_to_go
from gac.forms.narrow.torch import NarrowTensors, narrowed, rows_of
from gac.forms.narrow_pair import NARROW
from gac.forms.refit import Refits, WeightRefit
from gac.forms.tensors import Fit, SiteBuild, Statistics
from gac.models.sites import Weight


def restricted(weight: Weight, dense: MeasuredWeight, stay: Tensor) -> MeasuredWeight:
    """A weight with the neurons ``stay (width,)`` only, and its metric over them."""
    matrix, metric = narrowed(weight, dense.weight, stay, lambda _: dense.metric), dense.metric
    if weight.neurons == "in":
        return MeasuredWeight(matrix, Metric(metric.inputs[stay][:, stay], metric.gradients))
    rows = rows_of(weight, stay)
    return MeasuredWeight(matrix, Metric(metric.inputs, metric.gradients[rows][:, rows]))


def _refit_second(refit: WeightRefit, module: nn.Module) -> None:
    update_second(refit, module, _narrowed(refit))


def _refit_both(refit: WeightRefit, module: nn.Module) -> None:
    """Truncate again for the new inputs; of gate and up, W T is seen by them as T^T W^T G W T."""
    if refit.weight.neurons == "in":
        fill_pair(module, refit_and_truncate(refit, _narrowed(refit)))
        return
    inputs = refit.method.inputs(refit.means.moments(refit.method, refit.dense))
    seen = refit.turn.T @ _seen(refit.artifacts, refit.form, refit.weight) @ refit.turn
    fill_pair(module, decompose_as_seen(refit.matrix(_narrowed(refit)), inputs, seen).factors(refit.dim))


def _narrowed(refit: WeightRefit) -> Tensor:
    stay = refit.artifacts.of(refit.form, "stay", refit.weight)
    return narrowed(
        refit.weight, refit.dense, stay, lambda weight: refit.method.metric(refit.artifacts.moments(weight))
    )


def _seen(artifacts: LayerArtifacts, form: Form, weight: Weight) -> Tensor:
    """W^T G W, float64 ``(in, in)``."""
    return unpacked(artifacts.of(form, "seen", weight), weight.in_features).double()


class NarrowPairTensors(PairTensors):
    """Keeps the neurons that stay; of gate and up also the moment of their inputs, and W^T G W over those neurons.

    So a width takes no more than the square of the hidden size, whatever the number of neurons. The order of removal
    and the moments of down_proj are those that ``narrow`` keeps.
    """

    refits: ClassVar[Refits] = {"residual": _refit_both, "update": _refit_second}

    def measure(self, statistics: Statistics, weights: Sequence[Weight]) -> Iterator[Fit]:
        for down in (weight for weight in weights if weight.neurons == "in"):
            order = statistics.artifacts.of(NARROW, "order", down)
            for weight in filter(self.form.applies_to, weights):
                yield from self._fits(statistics, weight, order)

    def _fits(self, statistics: Statistics, weight: Weight, order: Tensor) -> Iterator[Fit]:
        # A function of its own frees its double-precision tensors before the next weight.
        dense = MeasuredWeight(statistics.matrix(weight).detach().double(), statistics.metric(weight))
        for form in self.form.variants(weight):
            _, width = form.shortening(1)
            stay = last_to_go(order, width)
            short = restricted(weight, dense, stay)
            curve, tensors = decompose(short.weight, short.metric).curve, {"stay": stay}
            if weight.neurons == "in":
                yield Fit(weight, curve.loss, tensors, form=form)
                continue
            seen = short.weight.T @ short.metric.gradients @ short.weight
            yield Fit(weight, curve.loss, tensors | {"seen": packed(seen.float())}, inputs=[weight], form=form)

    def parameters(self, build: SiteBuild, weight: Weight, dim: int) -> dict[str, Tensor]:
        _, width = self.form.shortening(dim)
        narrow, artifacts = NarrowTensors(NARROW).parameters(build, weight, width), build.artifacts
        if weight.neurons == "in":
            stay, metric = artifacts.of(self.form, "stay", weight), build.statistics.metric(weight)
            decomposition = decompose(narrow["weight"], Metric(metric.inputs[stay][:, stay], metric.gradients))
        else:
            inputs = build.statistics.method.inputs(artifacts.inputs(weight))
            decomposition = decompose_as_seen(narrow["weight"], inputs, _seen(artifacts, self.form, weight))
        second, first = decomposition.factors(dim)
        pair = {"first.weight": first, "second.weight": second}
        return pair | ({"second.bias": narrow["bias"]} if "bias" in narrow else {})

    def merge(self, weight: Weight, dim: int, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        _, width = self.form.shortening(dim)
        return NarrowTensors(NARROW).merge(weight, width, super().merge(weight, dim, parameters))
