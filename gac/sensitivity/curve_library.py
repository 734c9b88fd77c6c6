"""Loss curves for a model of known shapes and no weights: those of a small model's same weights, at the same depth.

What a weight loses is taken as a function of the fraction of its parameters that it keeps. So plans for shapes alone
are as uneven as real ones: they say which dims such a choice runs with, not what the model would lose.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from scipy.interpolate import PchipInterpolator

from gac.arrays import Floats
from gac.curves import LossCurve, LossCurves
from gac.errors import ModelError
from gac.forms import DEFAULT_FORMS, Form, form_named
from gac.models.sites import Site
from gac.models.weights import Weight
from gac.plan import Calibration
from gac.schemes import DEFAULT_SCHEME

_POINTS = 257
_FORMS = tuple(map(form_named, DEFAULT_FORMS))
_SHIPPED = "smollm2_curves.npz"


@dataclass(frozen=True, eq=False)
class CurveLibrary:
    """The curves of a measured model, by form and short weight name.

    Attributes:
        model: whose curves they are.
        method: how errors were measured.
        calibration: the text, and the dense model's loss on it.
        curves: by ``low_rank/q_proj`` and the like, losses in nats a token at dims in even steps from 0 to the full
            one, shape ``(layers, 257)``.
        fractions: likewise, the kept fraction of the weight's parameters at the full dim (over 1 for a low-rank pair).
    """

    model: str
    method: str
    calibration: Calibration
    curves: Mapping[str, Floats]
    fractions: Mapping[str, float]

    @classmethod
    def of(
        cls, model: str, method: str, calibration: Calibration, sites: Sequence[Site], curves: LossCurves
    ) -> "CurveLibrary":
        """What was measured of a model, at 257 dims a curve.

        Args:
            sites: in model order, as their family gives them.
            curves: of the model.
        """
        found: dict[str, list[Floats]] = {}
        fractions: dict[str, float] = {}
        for form, weight in ((form, weight) for form in _FORMS for site in sites for weight in site.weights):
            if curve := curves.of(form, weight):
                key = _key(form, weight)
                fractions[key] = form.params(weight, curve.full) / weight.params
                found.setdefault(key, []).append(_resampled(curve))
        return cls(model, method, calibration, {key: np.stack(rows) for key, rows in found.items()}, fractions)

    def save(self, path: str | Path) -> None:
        """Write the library as one compressed NumPy file."""
        about = {
            "model": self.model,
            "method": self.method,
            "calibration": asdict(self.calibration),
            "fractions": dict(self.fractions),
        }
        arrays = {key: rows.astype(np.float32) for key, rows in self.curves.items()}
        np.savez_compressed(path, about=np.array(json.dumps(about)), **arrays)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: str | Path | None = None) -> "CurveLibrary":
        """Read a library; None reads the shipped one, of SmolLM2-135M-Instruct."""
        with np.load(path or Path(__file__).with_name(_SHIPPED)) as read:
            about = json.loads(str(read["about"]))
            curves = {key: read[key].astype(np.float64) for key in read.files if key != "about"}
        text = about["calibration"]
        calibration = Calibration(**text | {"documents": tuple(text["documents"])})
        return cls(about["model"], about["method"], calibration, curves, about["fractions"])

    def __str__(self) -> str:
        text = self.calibration
        return (
            f"loss curves of {self.model}'s same weights at the same relative depth, by the kept fraction of their "
            f"parameters ({self.method}, {text.windows} x {text.window_tokens} tokens of {text.text})"
        )

    def curves_of(self, sites: Sequence[Site]) -> LossCurves:
        """Curves for the sites of another model.

        Raises:
            ModelError: a weight is called as none in the library.
        """
        layers = max(site.layer for site in sites) + 1
        return LossCurves(
            {
                (form.name, DEFAULT_SCHEME, weight.name): self._of(form, weight, site.layer / max(layers - 1, 1))
                for site in sites
                for form in _FORMS
                for weight in site.weights
                if form.shortens(weight) != "out" and form.takes(weight)
            }
        )

    def _of(self, form: Form, weight: Weight, depth: float) -> LossCurve:
        full = form.full(weight)
        kept: Floats = (
            np.linspace(0, 1, full + 1)
            if form.shortens(weight)
            else np.arange(full + 1) * np.float64(form.params(weight, 1) / weight.params)
        )
        return self._at(_key(form, weight), depth, kept)

    def _at(self, key: str, depth: float, kept: Floats) -> LossCurve:
        if key not in self.curves:
            raise ModelError(
                f"no loss curve is known for {key.partition('/')[2]}",
                f"weights called as those of {self.model}: {', '.join(sorted({_short(k) for k in self.curves}))}",
                "Give weights instead of shapes.",
            )
        rows = self.curves[key]
        losses = rows[round(depth * (len(rows) - 1))]
        # A monotone cubic has no corners at the measured dims, which a choice between all integers would fall on.
        fractions = np.linspace(0, self.fractions[key], _POINTS)
        found = PchipInterpolator(fractions, losses)(np.minimum(kept, fractions[-1]))
        found = np.minimum.accumulate(np.maximum(found, 0.0))
        found[-1] = 0.0
        return LossCurve(found)


def _resampled(curve: LossCurve) -> Floats:
    dims = np.arange(curve.full + 1)
    return np.interp(np.linspace(0, curve.full, _POINTS), dims, curve.loss)


def _short(name: str) -> str:
    return name.rpartition(".")[2].rpartition("/")[2]


def _key(form: Form, weight: Weight) -> str:
    return f"{form.name}/{_short(weight.name)}"
