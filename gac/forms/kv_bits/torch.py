"""Losses of keys and values of few bits, by runs of the model.

The model is run with one weight's outputs rounded at a time, in 2, 3 and 4 bits. With more bits the loss falls as the
square of the step does: by a factor of about 4 for each.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from gac.core.arrays import Floats
from gac.core.errors import TextError
from gac.forms.kv_bits import LEAST, MOST, KVBits
from gac.forms.latent.torch import anchored
from gac.forms.tensors import Fit, ModelRuns, SiteBuild, Statistics, TensorForm
from gac.models.sites import Weight

MEASURED = (2, 3, 4)
"""Bits with which the model is run."""
LEAST_LOSS = 1e-9
"""Nats a token: no run of a model tells less from nothing."""


def price_of(loss: float) -> Floats:
    """Losses of 0 to ``MOST`` bits if ``LEAST`` lose so much: as the square of the step."""
    steps = 1 / np.maximum(2.0 ** np.arange(MOST + 1) - 1, 0.5)
    prices: Floats = loss * (steps / steps[LEAST]) ** 2
    return prices


class KVBitsTensors(TensorForm):
    form: KVBits

    def measure(self, statistics: Statistics, weights: Sequence[Weight]) -> Iterator[Fit]:
        runs = statistics.runs
        assert runs is not None, f"{self.form.name} is measured by running the model"
        if runs.length <= (exact := self.form.cache.exact_tokens):
            problem = f"form {self.form.name} with calibration text of at most {runs.length} tokens at a time"
            remedy = f"Ask for longer windows, such as wiki-sample:64x1024; the last {exact} tokens are not rounded."
            raise TextError(problem, f"windows of more than {exact} tokens", remedy)
        for weight in filter(self.form.applies_to, weights):
            yield Fit(weight, self._measured(statistics, runs, weight))

    def _measured(self, statistics: Statistics, runs: ModelRuns, weight: Weight) -> Floats:
        build = SiteBuild([weight], statistics)

        def lost(bits: int) -> float:
            return runs.divergence({weight.name: self.module(build, weight, bits)})

        coarse = torch.finfo(statistics.matrix(weight).dtype).bits < 32
        noise = lost(MOST) if coarse else 0.0  # of a model in 16 bits, which is in every run
        measured = {bits: lost(bits) - noise for bits in MEASURED}
        losses: Floats = np.minimum.accumulate(anchored(price_of(max(measured[LEAST], LEAST_LOSS)), measured))
        return losses

    def parameters(self, build: SiteBuild, weight: Weight, dim: int) -> dict[str, Tensor]:
        return dict(build.linear(weight).named_parameters())

    def merge(self, weight: Weight, dim: int, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The dense weight, without rounding."""
        return dict(parameters)
