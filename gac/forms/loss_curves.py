"""Loss curves: the loss of each dim of a form in a scheme."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import exp, log

import numpy as np

from gac.core.arrays import Floats
from gac.forms.base import Form, variants_of
from gac.models.sites import Weight
from gac.schemes import DEFAULT_SCHEME, Scheme


@dataclass(frozen=True, eq=False)
class LossCurve:
    """The loss of each dim of one form: ``loss[d]`` nats a token at dim d, for d = 0 .. full.

    ``loss`` has shape ``(full + 1,)``. Where nothing is quantised it never rises, and is 0 at the full dim.
    Quantisation costs more the more numbers there are.
    """

    loss: Floats

    @property
    def full(self) -> int:
        return len(self.loss) - 1


@dataclass(frozen=True)
class WholeModelLoss:
    """The loss of the whole model in one form, against the sum of the losses of its weights.

    Attributes:
        form: the form whose curves are summed.
        summed: sums, nats a token, ascending and above 0.
        lost: measured with all weights in the form; above 0, never falling.
    """

    form: str
    summed: tuple[float, ...]
    lost: tuple[float, ...]

    def ratio(self, total: float) -> float:
        """Loss of the whole model over the sum. Its logarithm is linear in that of the sum, constant beyond its ends.

        So the loss of the whole model never falls as the sum grows.
        """
        ratios = np.log(np.array(self.lost) / np.array(self.summed))
        return exp(np.interp(log(total), np.log(self.summed), ratios)) if total > 0 else 1.0


@dataclass(frozen=True, eq=False)
class LossCurves:
    """The loss curves of a model, by form, scheme and weight.

    Weights that a form takes together have one curve, under the one that it shortens on its input. What stays dense in
    a scheme that does not quantise has none: it loses nothing.

    Attributes:
        by_key: by form, scheme and the weight's name.
        pairs: loss of two of them, each a form and a weight's name, at dim 0 beyond the sum of both, nats a token.
        on_text: loss on text with one of them at dim 0, where it was measured: their curves hold the divergence of the
            model, which is more, and which the choice counts.
        wholes: loss of the whole model, by the names of its form and of those that use it as ``base_form``.
    """

    by_key: Mapping[tuple[str, str, str], LossCurve]
    pairs: Mapping[frozenset[tuple[str, str]], float] = field(default_factory=dict)
    on_text: Mapping[tuple[str, str], float] = field(default_factory=dict)
    wholes: Mapping[str, WholeModelLoss] = field(default_factory=dict)

    def of(self, form: Form, weight: Weight, scheme: str = DEFAULT_SCHEME) -> LossCurve | None:
        return self.by_key.get((form.name, scheme, weight.name))

    def beyond_sum(self, chosen: Iterable[tuple[str, str, int]]) -> float:
        """Loss on text of choices, each a form, a weight's name and a dim, beyond their sum, nats a token.

        It is below 0 where the loss on text is less than the divergence, or that of a whole model less than the sum.
        """
        chosen = list(chosen)
        changed = {(form, name) for form, name, dim in chosen if dim == 0}
        alone = (
            lost - float(self.by_key[form, DEFAULT_SCHEME, name].loss[0])
            for (form, name), lost in self.on_text.items()
            if (form, name) in changed
        )
        # Several forms that were measured as a whole count as one. Quantisation was not measured there.
        exact = [
            (model, float(self.by_key[model.form, DEFAULT_SCHEME, name].loss[dim]))
            for form, name, dim in chosen
            if (model := self.wholes.get(form))
        ]
        total = sum(loss for _, loss in exact)
        of_wholes = sum(((model.ratio(total) - 1) * loss for model, loss in exact), 0.0)
        return sum(lost for pair, lost in self.pairs.items() if pair <= changed) + sum(alone) + of_wholes

    def with_scheme(
        self, scheme: Scheme, weights: Iterable[Weight], forms: Iterable[Form], price: Mapping[str, Floats]
    ) -> "LossCurves":
        """With the curves of a lossy scheme: the loss of quantisation is added to that of the form.

        Of weights that a form takes together it is that of their dense ones, for each remaining parameter; of routed
        experts it is all of that, as a token takes as many as before. Of a weight in a form with a parent form it is in
        the parent's curve, which counts all of its weights.

        Args:
            weights: of one layer.
            price: loss of quantisation, nats a token: each dense weight by name, one number; by ``<form>/<weight>`` a
                form that knows better, at every dim.
        """
        weights, curves = [weight for weight in weights if weight.name in price], dict(self.by_key)
        forms = list(forms)
        for weight in weights:
            for form in variants_of(forms, weight):
                group = [other for other in weights if form.shortens(other)] if form.shortens(weight) else [weight]
                dense = 0.0 if form.parent_form_name else sum(float(price[other.name]) for other in group)
                if curve := self.of(form, weight):
                    fractions = np.minimum(1, form.params(weight, 1) * np.arange(curve.full + 1) / weight.params)
                    fractions = np.ones_like(fractions) if weight.experts else fractions
                    lost = price.get(f"{form.name}/{weight.name}", dense * fractions)
                    curves[form.name, scheme.name, weight.name] = LossCurve(curve.loss + lost)
                elif form.is_dense:
                    curves[form.name, scheme.name, weight.name] = LossCurve(np.full(form.full(weight) + 1, dense))
        return replace(self, by_key=curves)
