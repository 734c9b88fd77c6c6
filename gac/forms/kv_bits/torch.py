"""Grids of keys and values, and what rounding to them costs by runs of the model.

The grid of a channel is the one of least square error among some, on tokens of text: from the middle of the range of
its numbers, their mean or their median, as wide as the range or less. A few large numbers are cut off where that makes
the steps of all others fine enough.

The model is run with one weight rounded at a time, in 2, 3 and 4 bits. With more bits the loss falls as the square of
the step does: by a factor of about 4 for each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from gac.core.arrays import Floats
from gac.forms.artifacts import LayerArtifacts
from gac.forms.kv_bits import LEAST, MOST, KVBits
from gac.forms.latent.torch import anchored
from gac.forms.refit import Refits, WeightRefit
from gac.forms.tensors import Fit, SiteBuild, Statistics, TensorForm, bias_of
from gac.models.sites import Weight

MEASURED = (2, 3, 4)
"""Bits with which the model is run."""
LEAST_LOSS = 1e-9
"""Nats a token: no run of a model tells less from nothing."""
WIDTHS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.42, 0.36, 0.3, 0.25)
"""Widths of grids, as shares of the range of a channel's numbers."""


def best_grid(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Offset and step of each channel of values ``(tokens, channels)``, each float32, shape ``(channels,)``."""
    low, high = values.aminmax(dim=0)
    least = torch.full_like(low, torch.inf)
    offset, step = torch.zeros_like(low), torch.ones_like(low)
    tiny = torch.finfo(torch.float16).tiny
    for middle in ((low + high) / 2, values.mean(0), values.median(0).values):
        for width in WIDTHS:
            size = ((high - low) * width / (2**bits - 1)).clamp_min(tiny)
            start = middle - size * (2**bits - 1) / 2
            numbers = ((values - start) / size).round_().clamp_(0, 2**bits - 1)
            error = (numbers.mul_(size).add_(start).sub_(values)).square_().sum(0)
            better = error < least
            least, offset, step = (
                torch.where(better, new, old) for new, old in ((error, least), (start, offset), (size, step))
            )
    return offset, step


def price_of(loss: float) -> Floats:
    """What 0 to ``MOST`` bits lose if ``LEAST`` lose so much: as the square of the step."""
    steps = 1 / np.maximum(2.0 ** np.arange(MOST + 1) - 1, 0.5)
    prices: Floats = loss * (steps / steps[LEAST]) ** 2
    return prices


def _refit_first(refit: WeightRefit, module: nn.Module) -> None:
    first = module.get_parameter("first.weight")
    first.copy_(refit.matrix(first))


class KVBitsTensors(TensorForm):
    """Keeps the grids of all bits."""

    form: KVBits
    refits: ClassVar[Refits] = {"residual": _refit_first}

    def measure(self, statistics: Statistics, weights: Sequence[Weight]) -> Iterator[Fit]:
        for weight in filter(self.form.applies_to, weights):
            assert statistics.runs is not None, f"{self.form.name} is measured by running the model"
            values = statistics.runs.outputs(weight)
            grids = [best_grid(values, bits) for bits in range(LEAST, MOST + 1)]
            offset, step = (torch.stack(each) for each in zip(*grids, strict=True))
            tensors = {"offset": offset, "step": step}
            yield Fit(weight, self._measured(statistics, weight, tensors), tensors)

    def _measured(self, statistics: Statistics, weight: Weight, tensors: dict[str, Tensor]) -> Floats:
        named = {f"{self.form.name}.{name}/{weight.name}": tensor for name, tensor in tensors.items()}
        build, runs = SiteBuild([weight], replace(statistics, artifacts=LayerArtifacts(named))), statistics.runs
        assert runs is not None

        def lost(bits: int) -> float:
            return runs.divergence({weight.name: self.module(build, weight, bits)})

        coarse = torch.finfo(statistics.matrix(weight).dtype).bits < 32
        noise = lost(MOST) if coarse else 0.0  # of a model in 16 bits, which is in every run
        measured = {bits: lost(bits) - noise for bits in MEASURED}
        losses: Floats = np.minimum.accumulate(anchored(price_of(max(measured[LEAST], LEAST_LOSS)), measured))
        return losses

    def parameters(self, build: SiteBuild, weight: Weight, dim: int) -> dict[str, Tensor]:
        linear = build.linear(weight)
        grid = {f"second.{name}": build.artifacts.of(self.form, name, weight)[dim - LEAST] for name in ("offset", "step")}
        return {"first.weight": linear.weight} | bias_of(linear, "first.bias") | grid

    def merge(self, weight: Weight, dim: int, parameters: dict[str, Tensor]) -> dict[str, Tensor]:  # type: ignore[override]
        """The dense weight as it is: without rounding."""
        first = {name.removeprefix("first."): value for name, value in parameters.items() if name.startswith("first.")}
        return first
