"""Rounding low-rank pairs: in which basis of the latents it loses least, and how near the price comes.

    python tests/benchmarks/rotated.py smollm2 rotated-smollm2
    python tests/benchmarks/rounding_pairs.py --model rotated-smollm2 --output rounding-pairs.json

Every figure is ``tr(G E A E^T)`` of what rounding both factors of a pair of half the rank changes of their product, the
second factor solved for the first one as it was rounded, over that of a pair whose latents are rotated, which is what
GAC stores. Latents as they were decomposed, with the singular values in the first factor, in the second, or shared out.
``price`` is what curves say that rounding the rotated pair loses, over what it loses, at a quarter of the rank at which
a pair has as many parameters as the weight, at half of it, at three quarters and at all of it.
"""

from collections.abc import Callable
from unittest.mock import patch

import torch
from torch import Tensor

from gac.compression.rounding import store
from gac.forms import form_named
from gac.forms.artifacts import LayerArtifacts
from gac.forms.curvature.methods import Kfac
from gac.forms.curvature.metric import FACTOR
from gac.forms.decomposition import with_rotated_latents
from gac.forms.low_rank.torch import even_rank
from gac.forms.tensors import Statistics, tensors_of
from gac.measurement.text import calibration_windows
from gac.models.loading import load_model
from gac.models.sites import Weight
from gac.runtime.modules import LowRankLinear
from gac.runtime.storage.modules import plain_state
from gac.schemes import Scheme, scheme_named
from gac.schemes.feedback.order import Inputs
from tests.benchmarks.harness import markdown, options, seen_of_layers, write

SCHEMES = ("w4a16:64", "w3a16:64")
QUARTERS = (1, 2, 3, 4)
Basis = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def carried(power: float) -> Basis:
    """Latents as they were decomposed, the second factor's columns as long as the singular values to a power."""

    def split(second: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        second, first = second.double(), first.double()
        own = first.norm(dim=1).log() - second.norm(dim=0).log()
        both = first.norm(dim=1).log() + second.norm(dim=0).log()
        scale = (own / 2 + (power - 0.5) * both).exp()
        return second * scale, first / scale[:, None]

    return split


BASES: dict[str, Basis] = {
    "rotated": with_rotated_latents,
    "in the first": carried(0.0),
    "shared out": carried(0.5),
    "in the second": carried(1.0),
}


def main() -> None:
    parser = options(__doc__, "--model", "--calibration", "--output")
    parser.set_defaults(calibration="wiki-sample:16x512")
    asked = parser.parse_args()
    loaded, method = load_model(asked.model), Kfac()
    windows = calibration_windows(asked.calibration, loaded.tokenizer)
    rows = []
    for weight, (moments,) in seen_of_layers(loaded.model, method, windows.ids):
        kept: dict[str, Tensor] = {}
        statistics = Statistics(loaded.model, {weight: moments}.__getitem__, method, LayerArtifacts(kept))
        (fit,) = tensors_of(form_named("low_rank")).measure(statistics, [weight])
        kept |= {f"low_rank.{name}/{weight.name}": value for name, value in fit.tensors.items()}
        for scheme in map(scheme_named, SCHEMES):
            rows.append({"weight": weight.name, "scheme": scheme.name} | Pair(statistics, weight, scheme).figures())
    write(asked.output, calibration=asked.calibration, rows=rows)
    names = [name for name in rows[0] if name not in ("weight", "scheme")]
    table = [(str(row["weight"]), str(row["scheme"]), *(f"{row[one]:.3f}" for one in names)) for row in rows]
    print(markdown(("weight", "scheme", *names), table))


class Pair:
    """One weight in one scheme."""

    def __init__(self, statistics: Statistics, weight: Weight, scheme: Scheme) -> None:
        self._statistics, self._weight, self._scheme = statistics, weight, scheme
        self._metric = statistics.metric(weight)

    def figures(self) -> dict[str, float]:
        weight, tensors = self._weight, tensors_of(form_named("low_rank"))
        half = min(weight.out_features, weight.in_features) // 2
        lost = {name: self._lost(half, basis) for name, basis in BASES.items()}
        price = tensors.rounding(self._statistics, weight, self._scheme, Inputs(self._metric.inputs, thorough=False))
        assert price is not None
        ranks = {f"price {quarter}/4": even_rank(weight) * quarter // 4 for quarter in QUARTERS}
        found = {name: own / lost["rotated"] for name, own in lost.items() if name != "rotated"}
        stored = {name: self._lost(rank, with_rotated_latents) for name, rank in ranks.items()}
        return found | {name: float(price[rank]) / FACTOR / stored[name] for name, rank in ranks.items()}

    @torch.no_grad()
    def _lost(self, rank: int, basis: Basis) -> float:
        weight, form, metric = self._weight, form_named("low_rank"), self._metric
        pair = LowRankLinear(weight.in_features, rank, weight.out_features, bias=False)
        first, second = (self._statistics.artifacts.of(form, name, weight) for name in ("first", "second"))
        pair.first.weight.copy_(first[:rank])
        pair.second.weight.copy_(second[:, :rank])
        dense = pair.second.weight.double() @ pair.first.weight.double()
        with patch("gac.compression.rounding.with_rotated_latents", basis):
            held = store(self._scheme, pair, metric.inputs, metric.gradients if weight.scores else None)
        state = plain_state(held, torch.float64)
        error = state["second.weight"] @ state["first.weight"] - dense
        return float(metric.cost(error))


if __name__ == "__main__":
    main()
