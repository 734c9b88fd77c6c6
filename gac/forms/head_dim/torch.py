"""Attention with shorter value vectors: the directions they keep, and what o_proj becomes."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from gac.forms.curvature.metric import Measured
from gac.forms.shortened_values import ShortenedValues, shorten_values
from gac.forms.tensors import Fit, SiteWork, Statistics, TensorForm, bias_of
from gac.models.sites import Weight


class HeadDimTensors(TensorForm):
    """The moments are kept that the method reads: o_proj's, or v_proj's too where it folds."""

    def measure(self, statistics: Statistics, weights: Sequence[Weight]) -> Iterator[Fit]:
        for output in (weight for weight in weights if weight.values == "in"):
            values = _writing(weights)
            kept = [values, output] if statistics.method.folds else [output]
            yield Fit(output, _shortened(statistics, values, output).curve.loss, moments=kept)

    def parameters(self, work: SiteWork, weight: Weight, dim: int) -> dict[str, Tensor]:
        linear = work.linear(weight)
        output = next(one for one in work.weights if one.values == "in")
        if "values" not in work.shared:
            work.shared["values"] = _shortened(work.statistics, _writing(work.weights), output)
        values: ShortenedValues = work.shared["values"]
        if weight is output:
            return {"weight": values.outputs(dim, work.statistics.metric(weight))} | bias_of(linear)
        return {name: values.values(rows, dim) for name, rows in linear.named_parameters()}


def _writing(weights: Sequence[Weight]) -> Weight:
    """v_proj."""
    return next(weight for weight in weights if weight.values == "out")


def _shortened(statistics: Statistics, values: Weight, output: Weight) -> ShortenedValues:
    """The value vectors of one layer at every length, as the method makes them."""
    read = statistics.matrix(output)
    if statistics.method.folds:
        written = Measured(statistics.matrix(values), statistics.metric(values))
        return statistics.method.fold(written, read, output.heads, values.heads)
    return shorten_values(read, statistics.metric(output), output.heads, values.heads)
