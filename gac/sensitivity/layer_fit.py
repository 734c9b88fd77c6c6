"""One layer measured: loss curves of every form, what schemes cost, and what compressing it needs.

What is kept serves every dim at once, so that statistics need not be kept or taken again: what the forms ask for, how
much every token counts, and the second moment of the gradients where a weight writes to the residual stream, which
fitting again needs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from gac.arrays import Floats
from gac.forms import Form
from gac.forms.metric import FACTOR
from gac.forms.tensors import Kept, Statistics
from gac.linalg import packed
from gac.models.sites import Site, Weight
from gac.schemes import Scheme
from gac.sensitivity.calibration import CalibrationRun, LayerMoments


@dataclass(frozen=True, eq=False)
class LayerFit:
    """One layer's measurements.

    Attributes:
        losses: loss curves by ``<form>/<weight>``; what rounding a weight costs by ``<scheme>/<weight>``, one number;
            the dense model's loss by ``loss``.
        kept: what compressing the layer needs.
    """

    losses: Mapping[str, Floats]
    kept: Kept


def fit_layer(
    run: CalibrationRun,
    sites: Sequence[Site],
    moments: LayerMoments,
    forms: Sequence[Form],
    schemes: Sequence[Scheme] = (),
) -> LayerFit:
    """Measure the weights of one layer's sites in these forms and schemes.

    Raises:
        ModelError: a statistic is not finite.
    """
    weights = [weight for site in sites for weight in site.weights]
    statistics = Statistics(run.model, moments.of, run.method)
    losses: dict[str, Floats] = {"loss": np.array(moments.loss)}
    tensors: dict[str, Tensor] = {}
    for weight in weights:
        tensors[f"tokens/{weight.name}"] = moments.tokens(weight)
        if weight.writes:
            tensors[f"gradients/{weight.name}"] = packed(moments.of(weight).gradients)
    for form in forms:
        for fit in form.tensors.measure(statistics, weights):
            losses[f"{form.name}/{fit.weight.name}"] = fit.loss
            tensors |= {f"{form.name}.{name}/{fit.weight.name}": tensor for name, tensor in fit.tensors.items()}
            for weight in fit.moments:
                own = moments.of(weight)
                tensors |= {f"{name}/{weight.name}": packed(getattr(own, name)) for name in ("inputs", "gradients")}
                tensors[f"scale/{weight.name}"] = own.scale
    for scheme in schemes:
        for weight in (weight for weight in weights if scheme.takes(weight)):
            losses[f"{scheme.name}/{weight.name}"] = np.array(rounding_loss(statistics, weight, scheme))
    return LayerFit(losses, Kept(tensors))


def rounding_loss(statistics: Statistics, weight: Weight, scheme: Scheme) -> float:
    """What storing the dense weight in a scheme costs, nats a token: ``tr(G E A E^T)`` of its rounding error E.

    To first order it adds to what a form loses. A form that keeps less of the weight loses no more by rounding.
    """
    matrix, metric = statistics.matrix(weight), statistics.metric(weight)
    error = (matrix - scheme.rounded(matrix)).detach().double()
    return FACTOR * float(((metric.gradients @ error @ metric.inputs) * error).sum())
