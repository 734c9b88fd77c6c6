"""Loss curves for a model of known shapes and no weights: those of a small model's same weights, at the same depth.

What a weight loses is taken as a function of the fraction of its parameters that it keeps. So plans for shapes alone
are as uneven as real ones: they say which dims such a choice runs with, not what the model would lose.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.interpolate import PchipInterpolator

from gac.arrays import Floats
from gac.curves import LossCurve, LossCurves
from gac.errors import ModelError
from gac.forms import DEFAULT_FORMS, Form, form_named
from gac.models.sites import Site, Weight
from gac.plan import Calibration, CalibrationPart
from gac.schemes import DEFAULT_SCHEME

LIBRARY_FORMS = (*DEFAULT_FORMS, "heads", "skip")
"""Forms whose curves a library holds."""

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
    def load(cls, path: str | Path | None = None) -> "CurveLibrary":
        """Read a library that was measured; None reads the shipped one, of SmolLM2-135M-Instruct."""
        with np.load(path or Path(__file__).with_name(_SHIPPED)) as read:
            about = json.loads(str(read["about"]))
            curves = {key: read[key].astype(np.float64) for key in read.files if key != "about"}
        text = about["calibration"]
        parts = tuple(CalibrationPart(**part) for part in text.get("parts", ()))
        calibration = Calibration(**text | {"documents": tuple(text["documents"]), "parts": parts})
        return cls(about["model"], about["method"], calibration, curves, about["fractions"])

    def __str__(self) -> str:
        return (
            f"loss curves of {self.model}'s same weights at the same relative depth, by the kept fraction of their "
            f"parameters ({self.method}, {self.calibration})"
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
                for form in map(form_named, LIBRARY_FORMS)
                for weight in site.weights
                if form.shortens(weight) != "out" and form.takes(weight)
            }
        )

    def _of(self, form: Form, weight: Weight, depth: float) -> LossCurve:
        full, called = form.full(weight), weight.name.rpartition(".")[2]
        kept: Floats = np.linspace(0, 1, full + 1)
        if not form.shortens(weight):
            kept = np.arange(full + 1) * np.float64(form.params(weight, 1) / weight.params)
        key = f"{form.name}/{called}"
        if key not in self.curves:
            known = sorted({one.rpartition("/")[2] for one in self.curves})
            raise ModelError(
                f"no loss curve is known for {called}",
                f"weights called as those of {self.model}: {', '.join(known)}",
                "Give weights instead of shapes.",
            )
        rows = self.curves[key]
        losses = rows[round(depth * (len(rows) - 1))]
        # A monotone cubic has no corners at the measured dims, which a choice between all integers would fall on.
        fractions = np.linspace(0, self.fractions[key], len(losses))
        found = PchipInterpolator(fractions, losses)(np.minimum(kept, fractions[-1]))
        found = np.minimum.accumulate(np.maximum(found, 0.0))
        found[-1] = 0.0
        return LossCurve(found)
