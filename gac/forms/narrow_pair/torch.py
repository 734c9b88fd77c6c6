"""A weight of a narrower MLP as two factors: truncated in the metric over the neurons that stay.

The rows of gate and up that stay are truncated in the metric of their outputs; the columns of down that stay, re-solved
for those that go, in the metric of their inputs. With W' these columns, E the error that narrowing makes of W and F one
of W', the normal equations of W' say that E A F^T = 0: so what narrowing loses and what truncation loses add up.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from torch import Tensor, nn

from gac.core.linalg import packed, unpacked
from gac.forms import form_named
from gac.forms.curvature.metric import Measured, Metric
from gac.forms.decomposition import decompose, decompose_as_seen
from gac.forms.low_rank.torch import fill_pair, merged_pair, second_again, written_again
from gac.forms.narrow.elimination import last_to_go
from gac.forms.narrow.torch import narrowed, rows_of
from gac.forms.narrow_pair.spec import NarrowPair
from gac.forms.refit import Refits, WeightRefit
from gac.forms.tensors import Fit, SiteWork, Statistics, TensorForm
from gac.models.sites import Weight


def among(weight: Weight, whole: Measured, stay: Tensor) -> Measured:
    """A weight with the neurons that stay alone, and its metric among them.

    Args:
        stay: these neurons, shape ``(width,)``.
    """
    matrix, metric = narrowed(weight, whole.weight, stay, lambda _: whole.metric), whole.metric
    if weight.neurons == "in":
        return Measured(matrix, Metric(metric.inputs[stay][:, stay], metric.gradients))
    rows = rows_of(weight, stay)
    return Measured(matrix, Metric(metric.inputs, metric.gradients[rows][:, rows]))


def _both_again(refit: WeightRefit, module: nn.Module) -> None:
    fill_pair(module, _truncated_again(refit))


def _truncated_again(refit: WeightRefit) -> tuple[Tensor, Tensor]:
    """``(second (out, rank), first (rank, in))``; of gate and up, W T is seen by the new inputs as T^T W^T G W T."""
    if refit.weight.neurons == "in":
        return written_again(refit, _whole(refit))
    inputs = refit.method.inputs(refit.means.moments(refit.method, refit.dense))
    seen = refit.turn.T @ _seen(refit.kept.of(refit.form, "seen", refit.weight), refit.weight) @ refit.turn
    return decompose_as_seen(refit.matrix(_whole(refit)), inputs, seen).factors(refit.dim)


def _second_only(refit: WeightRefit, module: nn.Module) -> None:
    second_again(refit, module, _whole(refit))


def _whole(refit: WeightRefit) -> Tensor:
    """What the pair is made of: the dense weight with the neurons that stay alone."""
    stay = refit.kept.of(refit.form, "stay", refit.weight)
    return narrowed(refit.weight, refit.dense, stay, lambda weight: refit.method.metric(refit.kept.moments(weight)))


def _seen(kept: Tensor, weight: Weight) -> Tensor:
    return unpacked(kept, weight.in_features).double()


class NarrowPairTensors(TensorForm):
    """Which neurons stay is kept; of gate and up also the moment of their inputs, and W^T G W over those neurons.

    So what is kept of a width is no larger than the square of the hidden size, whatever the number of neurons. The
    order in which neurons go is what ``narrow`` found, and the moments of down are those that it keeps.
    """

    refits: ClassVar[Refits] = {"residual": _both_again, "update": _second_only}

    def measure(self, statistics: Statistics, weights: Sequence[Weight]) -> Iterator[Fit]:
        for down in (weight for weight in weights if weight.neurons == "in"):
            order = statistics.kept.of(form_named("narrow"), "order", down)
            for weight in filter(self.form.takes, weights):
                yield from self._fits(statistics, weight, order)

    def _fits(self, statistics: Statistics, weight: Weight, order: Tensor) -> Iterator[Fit]:
        """Of one weight at every width, so that what it needs in double precision is let go before the next weight."""
        whole = Measured(statistics.matrix(weight).detach().double(), statistics.metric(weight))
        for form in self.form.variants(weight):
            _, width = form.shortening(1)
            stay = last_to_go(order, width)
            own = among(weight, whole, stay)
            curve, kept = decompose(own.weight, own.metric).curve, {"stay": stay}
            if weight.neurons == "in":
                yield Fit(weight, curve.loss, kept, form=form)
                continue
            seen = own.weight.T @ own.metric.gradients @ own.weight
            yield Fit(weight, curve.loss, kept | {"seen": packed(seen.float())}, inputs=[weight], form=form)

    def parameters(self, work: SiteWork, weight: Weight, dim: int) -> dict[str, Tensor]:
        narrow, width = self.form.shortening(dim)
        whole, kept = narrow.tensors.parameters(work, weight, width), work.kept
        assert whole is not None, f"{narrow.name} has parameters of its own"
        if weight.neurons == "in":
            stay, metric = kept.of(self.form, "stay", weight), work.statistics.metric(weight)
            found = decompose(whole["weight"], Metric(metric.inputs[stay][:, stay], metric.gradients))
        else:
            inputs = work.statistics.method.inputs(kept.inputs(weight))
            found = decompose_as_seen(whole["weight"], inputs, _seen(kept.of(self.form, "seen", weight), weight))
        second, first = found.factors(dim)
        pair = {"first.weight": first, "second.weight": second}
        return pair | ({"second.bias": whole["bias"]} if "bias" in whole else {})

    def merge(self, weight: Weight, dim: int, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        assert isinstance(self.form, NarrowPair)
        narrow, width = self.form.shortening(dim)
        return narrow.tensors.merge(weight, width, merged_pair(self.form.narrowed(weight), own))
