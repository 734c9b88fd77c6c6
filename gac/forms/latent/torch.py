"""Latents of groups of heads: a low-rank pair for each group of one weight (PaLU, arXiv 2407.21118, section 3.2).

**Quantised latents.** With c = diag(B^T G B) and v = diag(A M A^T) of a group's pair, latent i has variance v_i, and an
error of it costs c_i times its square; the product is the square of the singular value s_i. All latents of a token are
quantised with one step, ``max |z| / largest``. So they are

- **balanced**: latent i is multiplied by (c_i / v_i)^(1/4), and its column of B divided by it. Variance and cost of an
  error are s_i both. Of all such factors these lose least, by Cauchy and Schwarz: (sum s)^2 in place of sum v sum c.
- **rotated**, by the fixed orthogonal matrix of ``gac.forms.decomposition``: all r have the mean variance, none is much
  larger than the others (PaLU rotates latents by a Hadamard matrix for that), and a product of the factors stays what
  it was.

Then they are taken for normal numbers, of which the largest square is E[max z^2] (``largest_squares``), and quantising
costs, beside ``tr(G E A E^T)`` of what is cut off:

    E[max z^2] / (12 largest^2) (sum s)^2 / r

**Anchors.** A metric prices small errors well on average, not for each weight and not at every rank. So each weight's
curve is anchored: at a few ranks the model is run with that weight alone changed, on text that its moments have not
seen (``gac.measurement.attended.held_out``). Between anchors the logarithm of the loss is linear in that of the price.
Beyond the last one the loss is in the same ratio to the price as there. The anchors of all weights together would lose
as much by their prices as the form's ``anchors`` say, so they lie where plans choose. With three of them a model of n
layers takes 6 n runs, each from the layer that changes on. In 16 bits there is one more for each weight: what its pair
of the full rank loses is rounding, which is in every run and is subtracted. What all weights lose together is in
``gac.measurement.joint_losses``.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from gac.core.arrays import Floats
from gac.forms.artifacts import LayerArtifacts
from gac.forms.curvature.metric import FACTOR, Metric
from gac.forms.decomposition import Decomposition, decompose, with_rotated_latents
from gac.forms.latent import Latent, RoundedLatent
from gac.forms.loss_curves import LossCurve
from gac.forms.low_rank.torch import PairTensors, largest_squares
from gac.forms.refit import Refits, WeightRefit
from gac.forms.tensors import Fit, SiteBuild, Statistics, bias_of
from gac.models.sites import Weight
from gac.runtime.limits import LARGEST

LARGEST_RATIO = 8.0
"""Bound on the ratio of measured loss to price, either way."""


def anchor_ranks(price: Floats, prices: Sequence[float]) -> list[int]:
    """The ranks at which a curve is anchored, the largest first: of each price the largest that costs as much.

    ``price`` is at ranks 0 to the full one, and never rises.
    """
    dear = [int((price[1:] >= limit).sum()) for limit in prices]
    return sorted({rank for rank in dear if rank}, reverse=True)


def denoised(measured: Floats, price: Floats) -> Floats:
    """Measured losses by rising price, as a running maximum: a higher price never loses less."""
    ratios = np.clip(measured / price, 1 / LARGEST_RATIO, LARGEST_RATIO)
    losses: Floats = np.maximum.accumulate(ratios * price)
    return losses


def anchored(price: Floats, measured: Mapping[int, float]) -> Floats:
    """The curve through measured losses by rank; it never rises, as the price does not."""
    if not measured:
        return price
    ranks = sorted(measured, reverse=True)
    known = price[ranks]
    losses = np.log(denoised(np.array([measured[rank] for rank in ranks]), known))
    known = np.log(known)
    logs = np.log(np.maximum(price, np.finfo(float).tiny))
    inside = np.clip(logs, known[0], known[-1])
    return np.where(price > 0, np.exp(np.interp(inside, known, losses) + logs - inside), 0.0)


def decompose_groups(weight: Tensor, metric: Metric, groups: int) -> tuple[list[Decomposition], LossCurve]:
    """Truncate each group's neighbouring rows of a weight ``(out, in)`` by themselves, in their part of the metric.

    The curve is the loss of each rank in all groups. An error of two groups is taken for the sum of their
    errors: gradients that they share count as independent.
    """
    rows = weight.shape[0] // groups
    parts = [slice(start, start + rows) for start in range(0, groups * rows, rows)]
    decomposed = [decompose(weight[part], Metric(metric.inputs, metric.gradients[part, part])) for part in parts]
    return decomposed, LossCurve(np.sum([group.curve.loss for group in decomposed], axis=0))


def _refit_first(refit: WeightRefit, module: nn.Module) -> None:
    first = module.get_parameter("first.weight")
    first.copy_(first.double() @ refit.turn)


class LatentTensors(PairTensors):
    form: Latent
    refits: ClassVar[Refits] = {"residual": _refit_first}

    def measure(self, statistics: Statistics, weights: Sequence[Weight]) -> Iterator[Fit]:
        for weight in weights:
            folded = statistics.method.folds and weight.values == "out"
            if self.form.applies_to(weight) and not folded:
                matrix = statistics.matrix(weight)
                groups, curve = decompose_groups(matrix, statistics.cached_metric(weight), self.form.groups(weight))
                seconds, firsts = zip(*(group.factors(curve.full) for group in groups), strict=True)
                factors = {"second": torch.stack(seconds).to(matrix.dtype), "first": torch.cat(firsts).to(matrix.dtype)}
                yield Fit(weight, self._anchored(statistics, weight, curve.loss, factors), factors)

    def parameters(self, build: SiteBuild, weight: Weight, dim: int) -> dict[str, Tensor]:
        second, first = (build.artifacts.of(self.form, name, weight) for name in ("second", "first"))
        rows = first.view(len(second), -1, weight.in_features)[:, :dim].flatten(0, 1)
        pair = {"first.weight": rows, "second.weight": second[:, :, :dim]}
        return pair | bias_of(build.linear(weight), "second.bias")

    def _anchored(self, statistics: Statistics, weight: Weight, price: Floats, factors: Mapping[str, Tensor]) -> Floats:
        if (runs := statistics.runs) is None:
            return price
        named = {f"{self.form.name}.{name}/{weight.name}": factor for name, factor in factors.items()}
        build = SiteBuild([weight], replace(statistics, artifacts=LayerArtifacts(named)))

        def lost(rank: int) -> float:
            return runs.divergence({weight.name: self.module(build, weight, rank)})

        ranks = anchor_ranks(price, [total / (2 * runs.layers) for total in self.form.loss.anchors])
        coarse = torch.finfo(statistics.matrix(weight).dtype).bits < 32
        rounding = lost(len(price) - 1) if ranks and coarse else 0.0
        return anchored(price, {rank: lost(rank) - rounding for rank in ranks})


def moments_of_latents(second: Tensor, first: Tensor, metric: Metric) -> tuple[Tensor, Tensor]:
    """v and c of groups, float64 ``(groups, full)``, from B ``(groups, rows, full)`` and A ``(groups * full, in)``."""
    groups, rows, full = second.shape
    wide, parts = first.double(), second.double()
    variances = torch.linalg.vecdot(wide @ metric.inputs, wide).view(groups, full)
    blocks = [metric.gradients[start : start + rows, start : start + rows] for start in range(0, groups * rows, rows)]
    gains = [(part * (block @ part)).sum(0) for part, block in zip(parts, blocks, strict=True)]
    return variances.clamp_min(0), torch.stack(gains).clamp_min(0)


def balance_of(variances: Tensor, gains: Tensor) -> Tensor:
    """Factor of each latent, of the shape of its variance; 1 where no token was seen."""
    least = torch.finfo(torch.float32).tiny
    seen = (variances > least) & (gains > least)
    return torch.where(seen, (gains / variances.clamp_min(least)) ** 0.25, 1.0).clamp(1e-6, 1e6)


def rounding_cost(variances: Tensor, gains: Tensor, bits: int) -> Tensor:
    """Cost of quantising balanced and rotated latents at ranks 1 to the full one, in the metric, shape ``(full,)``."""
    sums = (variances * gains).sqrt().cumsum(1)
    ranks = torch.arange(1, sums.shape[1] + 1, device=sums.device)
    error = (largest_squares(ranks) / (12 * LARGEST[bits] ** 2)).clamp_max(1)
    cost: Tensor = (error * sums.square() / ranks).sum(0)
    return cost


class RoundedLatentTensors(LatentTensors):
    """Keeps the factors by which latents are multiplied before they are rotated; the pairs are the base form's."""

    form: RoundedLatent

    def measure(self, statistics: Statistics, weights: Sequence[Weight]) -> Iterator[Fit]:
        plain = self.form.base_form
        for weight in weights:
            if (exact := statistics.losses.get(f"{plain.name}/{weight.name}")) is None:
                continue
            second, first = (statistics.artifacts.of(plain, name, weight) for name in ("second", "first"))
            variances, gains = moments_of_latents(second, first, statistics.cached_metric(weight))
            lost = FACTOR * rounding_cost(variances, gains, self.form.bits).cpu().numpy()
            balance = {"balance": balance_of(variances, gains).float()}
            yield Fit(weight, exact + np.concatenate([[0.0], lost]), balance)

    def parameters(self, build: SiteBuild, weight: Weight, dim: int) -> dict[str, Tensor]:
        pair = LatentTensors(self.form.base_form).parameters(build, weight, dim)
        balance = build.artifacts.of(self.form, "balance", weight)[:, :dim].double()
        firsts = pair["first.weight"].view(len(balance), dim, -1).double() * balance[:, :, None]
        seconds = pair["second.weight"].double() / balance[:, None]
        rotated = [with_rotated_latents(second, first) for second, first in zip(seconds, firsts, strict=True)]
        dtype = pair["first.weight"].dtype
        first = torch.cat([first for _, first in rotated]).to(dtype)
        return pair | {"first.weight": first, "second.weight": torch.stack([second for second, _ in rotated]).to(dtype)}
