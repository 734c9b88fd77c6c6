"""Loss curves for a model of known shapes and no weights: those of a small model's same weights, at the same depth.

What a weight loses is taken as a function of the fraction of its parameters that it keeps. So plans for shapes alone
are as uneven as real ones: they say which dims such a choice runs with, not what the model would lose.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from scipy.interpolate import PchipInterpolator

from gac.core.arrays import Floats
from gac.core.errors import ModelError
from gac.forms import DEFAULT_FORMS, Form, form_named
from gac.forms.loss_curves import LossCurve, LossCurves
from gac.models.shapes import Shapes
from gac.models.sites import Site, Weight
from gac.plan.evidence import RoundedHead
from gac.plan.plan import Calibration, CalibrationPart
from gac.schemes import DEFAULT_SCHEME, scheme_named

LATENTS = ("latent:1", "latent:1:int8")
LIBRARY_FORMS = (*DEFAULT_FORMS, "heads", "skip", *LATENTS)
"""Forms whose curves a library holds."""

PRICE = "price/"
"""The beginning of the names of arrays of prices in a file."""
HEAD = "head/"
"""Likewise of what rounding embedding and head costs."""
_SHIPPED = "smollm2_curves.npz"


@dataclass(frozen=True, eq=False)
class CurveLibrary:
    """The curves of a measured model, by form and short weight name.

    Attributes:
        model: whose curves they are.
        method: how errors were measured.
        calibration: the text, and the dense model's loss on it.
        curves: by ``low_rank/q_proj`` and the like, losses in nats a token at dims in even steps from 0 to the full
            one, shape ``(layers, 257)``, or fewer dims.
        fractions: likewise, the kept fraction of the weight's parameters at the full dim (over 1 for a low-rank pair);
            those of latents have none: their dims are shares of the full rank.
        prices: what rounding costs, of the model off its grid, by ``w4a16/q_proj`` and ``w4a16/low_rank/q_proj``:
            nats a token of the dense weight, shape ``(layers, 1)``, and of a form at dims in even steps.
        heads: what rounding embedding and head costs, nats a token, by scheme.
    """

    model: str
    method: str
    calibration: Calibration
    curves: Mapping[str, Floats]
    fractions: Mapping[str, float]
    prices: Mapping[str, Floats] = field(default_factory=dict)
    heads: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def load(cls, path: str | Path | None = None) -> "CurveLibrary":
        """Read a library that was measured; None reads the shipped one, of SmolLM2-135M-Instruct."""
        with np.load(path or Path(__file__).with_name(_SHIPPED)) as read:
            about = json.loads(str(read["about"]))
            arrays = {key: read[key].astype(np.float64) for key in read.files if key != "about"}
        text = about["calibration"]
        parts = tuple(CalibrationPart(**part) for part in text.get("parts", ()))
        calibration = Calibration(**text | {"documents": tuple(text["documents"]), "parts": parts})
        prices = {key.removeprefix(PRICE): arrays.pop(key) for key in list(arrays) if key.startswith(PRICE)}
        heads = {key.removeprefix(HEAD): float(arrays.pop(key)) for key in list(arrays) if key.startswith(HEAD)}
        return cls(about["model"], about["method"], calibration, arrays, about["fractions"], prices, heads)

    def __str__(self) -> str:
        return (
            f"loss curves of {self.model}'s same weights at the same relative depth, by the kept fraction of their "
            f"parameters ({self.method}, {self.calibration})"
        )

    def curves_of(self, sites: Sequence[Site], schemes: Sequence[str] = ()) -> LossCurves:
        """Curves for the sites of another model, in these schemes too; forms that the library has nothing of have none.

        ModelError if a weight is called as none in the library, or if there is no price of rounding to a scheme.
        """
        layers, stored = max(site.layer for site in sites) + 1, {key.rpartition("/")[0] for key in self.curves}
        curves = LossCurves(
            {
                (form.name, DEFAULT_SCHEME, weight.name): self._curve(form, weight, site.layer / max(layers - 1, 1))
                for site in sites
                for form in map(form_named, LIBRARY_FORMS)
                if form.name in stored
                for weight in site.weights
                if form.shortens(weight) != "out" and form.applies_to(weight)
            }
        )
        forms = list(map(form_named, ("dense", *LIBRARY_FORMS)))
        for scheme in (scheme for scheme in map(scheme_named, schemes) if scheme.lossy):
            for layer in range(layers):
                weights = [weight for site in sites if site.layer == layer for weight in site.weights]
                prices = self._prices(scheme.name, weights, layer / max(layers - 1, 1))
                curves = curves.with_scheme(scheme, weights, forms, prices)
        return curves

    def head_of(self, shapes: Shapes, scheme: str) -> RoundedHead | None:
        """Embedding and head of these shapes, untied, in a scheme, and their loss; None where it does not round."""
        if not scheme_named(scheme).lossy:
            return None
        if scheme not in self.heads:
            expected = f"one of {', '.join(self.heads)}"
            raise ModelError(f"no price of rounding a head to {scheme} is known", expected, "Leave the head as it is.")
        return RoundedHead(scheme, 2 * ((shapes.vocab_size, shapes.hidden_size),), self.heads[scheme])

    def _prices(self, scheme: str, weights: Sequence[Weight], depth: float) -> dict[str, Floats]:
        prices: dict[str, Floats] = {}
        for weight in weights:
            called = weight.name.rpartition(".")[2]
            if f"{scheme}/{called}" not in self.prices:
                known = sorted({key.partition("/")[0] for key in self.prices})
                raise ModelError(
                    f"no price of rounding {called} to {scheme} is known",
                    f"one of the schemes {', '.join(known)}",
                    "Leave the scheme out, or give weights instead of shapes.",
                )
            prices[weight.name] = _at_depth(self.prices[f"{scheme}/{called}"], depth)[0]
            for form in (form for form in map(form_named, LIBRARY_FORMS) if form.applies_to(weight)):
                if (by_dim := self.prices.get(f"{scheme}/{form.name}/{called}")) is not None:
                    of_form = _at_depth(by_dim, depth)
                    fractions = np.linspace(0, self.fractions[f"{form.name}/{called}"], len(of_form))
                    prices[f"{form.name}/{weight.name}"] = np.interp(_kept_fractions(form, weight), fractions, of_form)
        return prices

    def _curve(self, form: Form, weight: Weight, depth: float) -> LossCurve:
        called = weight.name.rpartition(".")[2]
        key = f"{form.name}/{called}"
        if key not in self.curves:
            known = sorted({key.rpartition("/")[2] for key in self.curves})
            raise ModelError(
                f"no loss curve is known for {called}",
                f"weights called as those of {self.model}: {', '.join(known)}",
                "Give weights instead of shapes.",
            )
        losses = _at_depth(self.curves[key], depth)
        # A monotone cubic has no corners at the measured dims, which a choice between all integers would fall on.
        fractions = np.linspace(0, self.fractions.get(key, 1.0), len(losses))
        at_fractions = np.minimum(_kept_fractions(form, weight), fractions[-1])
        at_dims = np.minimum.accumulate(np.maximum(PchipInterpolator(fractions, losses)(at_fractions), 0.0))
        if form.cache.bits is None:
            at_dims[-1] = 0.0
        return LossCurve(at_dims)


def _at_depth(rows: Floats, depth: float) -> Floats:
    row: Floats = rows[round(depth * (len(rows) - 1))]
    return row


def _kept_fractions(form: Form, weight: Weight) -> Floats:
    """At every dim the kept fraction of what the form shortens, of the full rank of latents, or of the parameters."""
    full = form.full(weight)
    if form.shortens(weight) or form.cache.axis(weight) is not None:
        return np.linspace(0, 1, full + 1)
    return np.arange(full + 1) * np.float64(form.params(weight, 1) / weight.params)
