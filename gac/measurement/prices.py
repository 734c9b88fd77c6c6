"""Loss of storing weights in schemes, for dense weights and for forms that price themselves."""

from collections.abc import Sequence

import numpy as np

from gac.core.arrays import Floats
from gac.forms import FORMS
from gac.forms.curvature.metric import FACTOR
from gac.forms.tensors import Statistics, tensors_of
from gac.models.sites import Weight
from gac.schemes import Scheme
from gac.schemes.inputs import Inputs


def prices_of(
    statistics: Statistics, weights: Sequence[Weight], schemes: Sequence[Scheme]
) -> dict[str, dict[str, Floats]]:
    """By scheme, nats a token: one number for the dense weight by ``<weight>``, of a form by ``<form>/<weight>``.

    Args:
        statistics: with what the standard forms have kept.
    """
    prices: dict[str, dict[str, Floats]] = {scheme.name: {} for scheme in schemes}
    for weight in weights if schemes else ():
        inputs = Inputs(statistics.metric(weight).inputs, thorough=False)  # whose factors all schemes and forms share
        forms = [form for form in FORMS if form.loss.in_every_calibration and form.applies_to(weight)]
        for scheme in (scheme for scheme in schemes if scheme.applies_to(weight)):
            prices[scheme.name][weight.name] = np.array(rounding_loss(statistics, weight, scheme, inputs))
            for form in forms:
                if (by_dim := tensors_of(form).rounding(statistics, weight, scheme, inputs)) is not None:
                    prices[scheme.name][f"{form.name}/{weight.name}"] = by_dim
    return prices


def rounding_loss(statistics: Statistics, weight: Weight, scheme: Scheme, inputs: Inputs) -> float:
    """Loss of storing the dense weight W in a scheme, nats a token: ``tr(G E A E^T)`` of its quantisation error E.

    Where inputs are rounded too, by errors of variance n that follow nothing else, ``tr(W^T G W diag(n))`` more. To
    first order all of it adds to what a form loses. A form that keeps less of the weight loses no more by rounding.

    ``inputs`` holds A. ModelError if the scheme cannot store the weight's numbers.
    """
    matrix, metric = statistics.matrix(weight), statistics.metric(weight)
    scheme.check_range(matrix, weight.name)
    error = (matrix - scheme.quantised(matrix, inputs, metric.gradients if weight.scores else None)).detach().double()
    lost = float(metric.cost(error))
    if scheme.input_quantiser is not None:
        dense = matrix.detach().double()
        noise = statistics.moments(weight).noise[scheme.input_quantiser].double()
        lost += float(((metric.gradients @ dense) * dense).sum(0) @ noise)
    return FACTOR * lost
