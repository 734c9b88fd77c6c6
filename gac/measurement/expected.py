"""Scale measured losses to those expected after compression and refit, by factors calibrated on two models.

``results/quality.md``, ``results/precision.md``, ``results/structures.md`` and ``results/cache.md``
have the comparisons.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from gac.forms import form_named
from gac.forms.curvature.methods import Method
from gac.forms.loss_curves import LossCurve, LossCurves, WholeModelLoss
from gac.models.families import Family
from gac.plan.evidence import Calibration
from gac.plan.recipe import Recipe, Refit
from gac.schemes import DEFAULT_SCHEME, scheme_named

ENOUGH_TOKENS = 2**15
"""Tokens of calibration text from which predictions are as good as they get."""
BESIDE = 1e-4
"""Nats a token that another form than the dense one counts more, where weights may be rounded instead. Where structure
was predicted to win less, it lost 5e-5 to 4e-4 for each changed weight (results/precision.md)."""


@dataclass(frozen=True)
class Shares:
    """Parts of losses, each by how the weights are fitted again.

    Attributes:
        predicted: what is measured of a loss predicted by ``kfac``.
        rounded: what is left of a price of rounding beside that: each rounding is made up for at once, and by all that
            follows.
        run: what the choice counts of a loss measured by running the model.
    """

    predicted: Mapping[str, float]
    rounded: Mapping[str, float]
    run: Mapping[str, float]

    @staticmethod
    def of(family: Family) -> "Shares":
        return PLAIN if family.norms is None else BEHIND_NORMS


def _by_refit(none: float, residual: float) -> Mapping[str, float]:
    return MappingProxyType({"none": none, "residual": residual, "update": none})


PLAIN = Shares(_by_refit(1.0, 0.86), _by_refit(1.0, 0.7), _by_refit(1.0, 1.0))
"""Fitted on SmolLM2-135M, rounding on it rotated, at 2.8 to 4.3 bits a weight."""
BEHIND_NORMS = Shares(_by_refit(1.7, 1.16), _by_refit(1.0, 0.56), _by_refit(1.0, 0.68))
"""For models with a norm before the residual stream: fitted on Gemma-3-270M, rounding on it permuted,
with the values of heads rotated."""
WHOLE = _by_refit(1.0, 0.7)
"""The share that is predicted of a loss measured with all weights of a form at once. Fitted on both models, at 0.35 to
0.7 of the KV cache, in plans that change nothing else (results/cache.md)."""


def expected_share(refit: Refit | None, method: Method, family: Family) -> float:
    """Expected fraction of the predicted loss; 1 for methods whose predictions were never compared."""
    return Shares.of(family).predicted[refit or "none"] if method.refits else 1.0


def expected_curves(curves: LossCurves, recipe: Recipe, method: Method, family: Family) -> LossCurves:
    """Scale measured losses by the expected fractions; of losses on text, by what a refit leaves."""
    share, unfitted = (expected_share(refit, method, family) for refit in (recipe.refit, None))
    shares, refit = Shares.of(family), recipe.refit or "none"
    forms = [*map(form_named, recipe.space.forms)]
    by_form = {form.name: shares.run[refit] for form in forms if form.loss.needs_forward_runs}
    by_form |= {name: WHOLE[refit] for form, whole_model in curves.wholes.items() for name in (form, whole_model.form)}
    by_form |= {form.name: 1.0 for form in forms if form.cache.exact_tokens}  # no refit makes up for that rounding
    rounds = any(scheme_named(name).lossy for name in recipe.space.schemes)
    by_key = {}
    for (form, scheme, name), curve in curves.by_key.items():
        unquantised = curves.by_key.get((form, DEFAULT_SCHEME, name))
        exact = np.zeros(1) if unquantised is None else unquantised.loss
        loss = by_form.get(form, share) * exact + share * shares.rounded[refit] * (curve.loss - exact)
        if rounds and form != "dense":
            loss = np.append(loss[:-1] + BESIDE, loss[-1])
        by_key[form, scheme, name] = LossCurve(loss)
    pairs = {pair: by_form.get(next(iter(pair))[0], share) * lost for pair, lost in curves.pairs.items()}
    on_text = {key: share / unfitted * lost for key, lost in curves.on_text.items()}
    wholes = {}
    for name, whole_model in curves.wholes.items():
        of_form = by_form.get(whole_model.form, share)
        summed, lost = (tuple(of_form * loss for loss in losses) for losses in (whole_model.summed, whole_model.lost))
        wholes[name] = WholeModelLoss(whole_model.form, summed, lost)
    return LossCurves(by_key, pairs, on_text, wholes)


def expected_error(method: Method, text: Calibration) -> float | None:
    """Expected relative error of predicted losses; None where it was never compared."""
    if not method.refits or text.little:
        return None
    return 0.15 if text.tokens >= ENOUGH_TOKENS else 0.25
