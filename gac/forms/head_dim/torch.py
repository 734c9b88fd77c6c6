"""Attention with shorter value vectors: the directions they keep, and the compensated o_proj."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from gac.forms.curvature.metric import Measured
from gac.forms.shortened_values import ShortenedValues, shorten_values
from gac.forms.tensors import Fit, SiteBuild, Statistics, TensorForm, bias_of
from gac.models.sites import Weight


class HeadDimTensors(TensorForm):
    """Keeps the moments that the method uses: o_proj's, and v_proj's too where it folds."""

    def measure(self, statistics: Statistics, weights: Sequence[Weight]) -> Iterator[Fit]:
        for output in (weight for weight in weights if weight.values == "in"):
            values = _value_weight(weights)
            kept = [values, output] if statistics.method.folds else [output]
            yield Fit(output, _shortened(statistics, values, output).curve.loss, moments=kept)

    def parameters(self, build: SiteBuild, weight: Weight, dim: int) -> dict[str, Tensor]:
        linear = build.linear(weight)
        output = next(other for other in build.weights if other.values == "in")
        if "values" not in build.cache:
            build.cache["values"] = _shortened(build.statistics, _value_weight(build.weights), output)
        values: ShortenedValues = build.cache["values"]
        if weight is output:
            return {"weight": values.outputs(dim, build.statistics.metric(weight))} | bias_of(linear)
        return {name: values.values(rows, dim) for name, rows in linear.named_parameters()}


def _value_weight(weights: Sequence[Weight]) -> Weight:
    return next(weight for weight in weights if weight.values == "out")


def _shortened(statistics: Statistics, values: Weight, output: Weight) -> ShortenedValues:
    read = statistics.matrix(output)
    if statistics.method.folds:
        written = Measured(statistics.matrix(values), statistics.metric(values))
        return statistics.method.fold(written, read, output.heads, values.heads)
    return shorten_values(read, statistics.metric(output), output.heads, values.heads)
