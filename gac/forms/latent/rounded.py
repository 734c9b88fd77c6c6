"""Latents in few bits: what their rounding costs at every rank, and the basis in which it costs least.

With c = diag(B^T G B) and v = diag(A M A^T) of a group's pair as it is decomposed, latent i has variance v_i, and an
error of it costs c_i times its square; the product is the square of the singular value s_i. All latents of a token are
rounded by one step, ``max |z| / largest``. So they are

- **balanced**: latent i is multiplied by (c_i / v_i)^(1/4), and its column of B divided by it. Variance and cost of an
  error are s_i both. Of all such factors these lose least, by Cauchy and Schwarz: (sum s)^2 in place of sum v sum c.
- **rotated**, by the fixed orthogonal matrix of ``gac.forms.decomposition``: all r have the mean variance, none is much
  larger than the others (PaLU, arXiv 2407.21118, turns latents by a Hadamard matrix for that), and a product of the
  factors stays what it was.

Then they are taken for normal numbers, of which the largest square is E[max z^2] (``largest_squares``), and rounding
costs, beside ``tr(G E A E^T)`` of what is cut off:

    E[max z^2] / (12 largest^2) (sum s)^2 / r
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from gac.forms.curvature.metric import FACTOR, Metric
from gac.forms.decomposition import with_rotated_latents
from gac.forms.latent.torch import LatentTensors
from gac.forms.low_rank.rounding import largest_squares
from gac.forms.tensors import Fit, SiteWork, Statistics
from gac.models.sites import Weight
from gac.runtime.limits import LARGEST


def moments_of_latents(second: Tensor, first: Tensor, metric: Metric) -> tuple[Tensor, Tensor]:
    """v and c of every group, float64, shape ``(groups, full)`` both.

    Args:
        second: B of every group, ``(groups, rows, full)``.
        first: A of all groups, one above the other, ``(groups * full, in)``.
    """
    groups, rows, full = second.shape
    wide, parts = first.double(), second.double()
    variances = torch.linalg.vecdot(wide @ metric.inputs, wide).view(groups, full)
    blocks = [metric.gradients[at : at + rows, at : at + rows] for at in range(0, groups * rows, rows)]
    gains = [(part * (block @ part)).sum(0) for part, block in zip(parts, blocks, strict=True)]
    return variances.clamp_min(0), torch.stack(gains).clamp_min(0)


def balance(variances: Tensor, gains: Tensor) -> Tensor:
    """By what each latent is multiplied, shape as theirs; by 1 where nothing was seen of it."""
    least = torch.finfo(torch.float32).tiny
    seen = (variances > least) & (gains > least)
    return torch.where(seen, (gains / variances.clamp_min(least)) ** 0.25, 1.0).clamp(1e-6, 1e6)


def rounding_cost(variances: Tensor, gains: Tensor, bits: int) -> Tensor:
    """What rounding balanced and rotated latents costs at ranks 1 to the full one, in the metric, shape ``(full,)``.

    Args:
        variances, gains: ``(groups, full)``.
    """
    sums = (variances * gains).sqrt().cumsum(1)
    ranks = torch.arange(1, sums.shape[1] + 1, device=sums.device)
    error = (largest_squares(ranks) / (12 * LARGEST[bits] ** 2)).clamp_max(1)
    cost: Tensor = (error * sums.square() / ranks).sum(0)
    return cost


class RoundedLatentTensors(LatentTensors):
    """The factors that the plain form keeps, and by what their latents are multiplied before they are rotated."""

    def measure(self, statistics: Statistics, weights: Sequence[Weight]) -> Iterator[Fit]:
        plain, bits = self.form.upon, self.form.bits
        assert plain is not None, f"{self.form.name} rests upon no other form"
        assert bits is not None, f"{self.form.name} rounds nothing"
        for weight in weights:
            if (exact := statistics.losses.get(f"{plain.name}/{weight.name}")) is None:
                continue
            second, first = (statistics.kept.of(plain, name, weight) for name in ("second", "first"))
            variances, gains = moments_of_latents(second, first, statistics.cached_metric(weight))
            lost = FACTOR * rounding_cost(variances, gains, bits).cpu().numpy()
            kept = {"balance": balance(variances, gains).float()}
            yield Fit(weight, exact + np.concatenate([[0.0], lost]), kept)

    def parameters(self, work: SiteWork, weight: Weight, dim: int) -> dict[str, Tensor]:
        assert self.form.upon is not None, f"{self.form.name} rests upon no other form"
        pair = self.form.upon.tensors.parameters(work, weight, dim)
        assert pair is not None, f"{self.form.upon.name} leaves {weight.name} as it is"
        by = work.kept.of(self.form, "balance", weight)[:, :dim].double()
        firsts = pair["first.weight"].view(len(by), dim, -1).double() * by[:, :, None]
        seconds = pair["second.weight"].double() / by[:, None]
        turned = [with_rotated_latents(second, first) for second, first in zip(seconds, firsts, strict=True)]
        dtype = pair["first.weight"].dtype
        first = torch.cat([first for _, first in turned]).to(dtype)
        return pair | {"first.weight": first, "second.weight": torch.stack([one for one, _ in turned]).to(dtype)}
