"""Loss curves: what each dim of a form loses in a scheme."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import exp, log
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from gac.core.arrays import Floats
from gac.models.sites import Weight
from gac.schemes import DEFAULT_SCHEME, Scheme

if TYPE_CHECKING:
    from gac.forms import Form


@dataclass(frozen=True, eq=False)
class LossCurve:
    """What each dim of one form loses: ``loss[d]`` nats a token at dim d, for d = 0 .. full.

    ``loss`` has shape ``(full + 1,)``. Where nothing is rounded it never rises, and is 0 at the full dim. Rounding
    costs more the more numbers there are.
    """

    loss: Floats

    @property
    def full(self) -> int:
        return len(self.loss) - 1


@dataclass(frozen=True)
class Whole:
    """What weights in one form lose all together, beside the sum of what each loses alone.

    Attributes:
        form: the form whose curves are summed.
        summed: sums, nats a token, ascending and above 0.
        lost: what was measured with all of them together; it is above 0 and never falls.
    """

    form: str
    summed: tuple[float, ...]
    lost: tuple[float, ...]

    def ratio(self, total: float) -> float:
        """What is lost together, over the sum. Its logarithm is linear in that of the sum, constant beyond its ends.

        So what is lost together never falls as the sum grows.
        """
        ratios = np.log(np.array(self.lost) / np.array(self.summed))
        return exp(np.interp(log(total), np.log(self.summed), ratios)) if total > 0 else 1.0

    def scaled(self, share: float) -> "Whole":
        """Where only a share of each loss is left, and of that of all together."""
        return Whole(self.form, tuple(share * one for one in self.summed), tuple(share * one for one in self.lost))


@dataclass(frozen=True, eq=False)
class LossCurves:
    """The loss curves of a model, by form, scheme and weight.

    Weights that a form takes together have one curve, under the one that it shortens on its input. What stays dense in
    a scheme that does not round has none: it loses nothing.

    Attributes:
        by_key: by form, scheme and the weight's name.
        pairs: what two of them, each a form and a weight's name, lose at dim 0 beyond the sum of both, nats a token.
        on_text: what text loses with one of them at dim 0, where that was measured too: their curves say how far the
            model diverges, which is more, and what the choice counts.
        wholes: what all weights in a form lose together, by the names of that form and of those that rest upon it.
    """

    by_key: Mapping[tuple[str, str, str], LossCurve]
    pairs: Mapping[frozenset[tuple[str, str]], float] = field(default_factory=dict)
    on_text: Mapping[tuple[str, str], float] = field(default_factory=dict)
    wholes: Mapping[str, Whole] = field(default_factory=dict)

    def of(self, form: "Form", weight: Weight, scheme: str = DEFAULT_SCHEME) -> LossCurve | None:
        """The curve of a form for a weight; None where it was not measured."""
        return self.by_key.get((form.name, scheme, weight.name))

    def scaled(
        self, share: float, rounded: float = 1.0, own: Mapping[str, float] = MappingProxyType({}), on_text: float = 1.0
    ) -> "LossCurves":
        """Where only a share of each loss is expected, and of what rounding costs only a part of that.

        Args:
            own: the shares of forms that have one of their own, by name.
            on_text: the share of what text loses.
        """
        curves = {}
        for (form, scheme, name), curve in self.by_key.items():
            whole = self.by_key.get((form, DEFAULT_SCHEME, name))
            exact = np.zeros(1) if whole is None else whole.loss
            left = own.get(form, share) * exact + share * rounded * (curve.loss - exact)
            curves[form, scheme, name] = LossCurve(left)
        pairs = {pair: own.get(next(iter(pair))[0], share) * lost for pair, lost in self.pairs.items()}
        wholes = {form: whole.scaled(own.get(whole.form, share)) for form, whole in self.wholes.items()}
        return LossCurves(curves, pairs, {one: on_text * lost for one, lost in self.on_text.items()}, wholes)

    def beyond_sum(self, chosen: Iterable[tuple[str, str, int]]) -> float:
        """What text loses with choices, each a form, a weight's name and a dim, beyond their sum, nats a token.

        It is below 0 where text loses less than the model diverges, or a whole less than its weights one by one.
        """
        chosen = list(chosen)
        changed = {(form, name) for form, name, dim in chosen if dim == 0}
        alone = (
            lost - float(self.by_key[form, DEFAULT_SCHEME, name].loss[0])
            for (form, name), lost in self.on_text.items()
            if (form, name) in changed
        )
        return sum(lost for pair, lost in self.pairs.items() if pair <= changed) + sum(alone) + self._wholes_of(chosen)

    def _wholes_of(self, chosen: Iterable[tuple[str, str, int]]) -> float:
        """What forms that were measured as a whole lose beyond their sum; several of them count as one whole.

        What rounding adds is in no whole: it was not measured there.
        """
        exact = [
            (whole, float(self.by_key[whole.form, DEFAULT_SCHEME, name].loss[dim]))
            for form, name, dim in chosen
            if (whole := self.wholes.get(form))
        ]
        total = sum(loss for _, loss in exact)
        return sum(((whole.ratio(total) - 1) * loss for whole, loss in exact), 0.0)

    def with_scheme(
        self, scheme: Scheme, weights: Iterable[Weight], forms: "Iterable[Form]", price: Mapping[str, Floats]
    ) -> "LossCurves":
        """With those of a scheme that rounds: what rounding costs is added to what the form loses.

        Of weights that a form takes together it is what their dense ones cost, for each parameter that is left. Of a
        weight in a form that lies inside another it is in the other's curve, which counts all of its weights.

        Args:
            weights: of one layer.
            price: what rounding costs, nats a token: each dense weight by name, one number; by ``<form>/<weight>`` a
                form that knows better, at every dim.
        """
        weights, found = [weight for weight in weights if weight.name in price], dict(self.by_key)
        for weight in weights:
            for form in (one for asked in forms for one in asked.variants(weight)):
                together = [one for one in weights if form.shortens(one)] if form.shortens(weight) else [weight]
                whole = 0.0 if form.inside else sum(float(price[one.name]) for one in together)
                if curve := self.of(form, weight):
                    left = np.minimum(1, form.params(weight, 1) * np.arange(curve.full + 1) / weight.params)
                    lost = price.get(f"{form.name}/{weight.name}", whole * left)
                    found[form.name, scheme.name, weight.name] = LossCurve(curve.loss + lost)
                elif form.name == "dense":
                    found[form.name, scheme.name, weight.name] = LossCurve(np.full(form.full(weight) + 1, whole))
        return replace(self, by_key=found)
