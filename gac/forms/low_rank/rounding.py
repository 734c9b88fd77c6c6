"""Cost of quantising the factors of a pair at every rank, from quantising them at one rank.

A pair is stored with its latents rotated (``with_rotated_latents``). Before that, B^T G B and A M A^T are diagonal,
with c and d on the diagonals; M is the moment of the inputs. Rotated, all rows of A are alike. Their errors cost
``|A|^2 sum(c) / r``. The second factor is solved for the quantised A, which leaves ``1 - r / in`` of that. The
errors of B cost ``|B|^2`` times the geometric mean of d, for feedback makes up for the rest. The page
results/precision.md compares this with pairs that were stored.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gac.forms.curvature.metric import Metric, Moments
from gac.forms.decomposition import with_rotated_latents
from gac.forms.tensors import Statistics
from gac.models.sites import Weight
from gac.schemes import Scheme
from gac.schemes.feedback.order import DAMPING
from gac.schemes.inputs import Inputs

STEP = 64
"""Step of the rank at which pairs are quantised: an orthogonal matrix of an odd size takes long."""
POINTS, REACH = 256, 64.0
"""Of the integral over the largest square: points, and how far it goes."""


@dataclass(frozen=True, eq=False)
class RotatedPair:
    """A pair as it is stored, float64, and its statistics for all schemes.

    Attributes:
        second, first: shapes ``(out, rank)`` and ``(rank, in)``.
        latents: inputs of the second.
        of_second, of_first: metrics of errors of either factor.
    """

    second: Tensor
    first: Tensor
    latents: Inputs
    of_second: Metric
    of_first: Metric

    @staticmethod
    def of(second: Tensor, first: Tensor, inputs: Inputs, gradients: Tensor) -> "RotatedPair":
        second, first = with_rotated_latents(second, first)
        latents = first @ inputs.moment @ first.T
        as_seen = Metric(inputs.moment, second.T @ gradients @ second)
        return RotatedPair(second, first, Inputs(latents, inputs.thorough), Metric(latents, gradients), as_seen)


def even_rank(weight: Weight) -> int:
    """The rank at which a pair has about as many parameters as the weight; a multiple of ``STEP`` where it can be."""
    rank = weight.out_features * weight.in_features // (weight.out_features + weight.in_features)
    return max(1, rank - rank % STEP if rank > STEP else rank)


def rounding_by_rank(
    statistics: Statistics,
    weight: Weight,
    scheme: Scheme,
    inputs: Inputs,
    factors: tuple[Tensor, Tensor],
    gains: Tensor,
) -> Tensor:
    """``tr(G E A E^T)`` of both factors' errors, and what rounding inputs and latents adds, shape ``(full,)``.

    Args:
        factors: of all ranks, ``(second (out, full), first (full, in))``, the largest singular value first.
        gains: c, shape ``(full,)``.
    """
    gradients, rank = statistics.metric(weight).gradients, even_rank(weight)
    second, first = (factor.double() for factor in factors)
    variances = inputs.once(("variances", weight.name), lambda moment: torch.linalg.vecdot(first @ moment, first))
    pair = inputs.once(
        (RotatedPair, weight.name), lambda _: RotatedPair.of(second[:, :rank], first[:rank], inputs, gradients)
    )
    for factor in (pair.first, pair.second):
        scheme.check_range(factor, f"a factor of {weight.name}")
    of_first = pair.of_first.cost(scheme.quantised(pair.first, inputs) - pair.first)
    rows = gradients if weight.scores else None
    of_second = pair.of_second.cost(scheme.quantised(pair.second, pair.latents, rows) - pair.second)
    left = 1 - _counts(gains).float() / weight.in_features
    by_rank = of_first * left * _relative(_means(first.square().sum(1)) * gains.cumsum(0), rank)
    geometric = _means((variances + DAMPING * variances.mean()).log()).exp()
    by_rank += of_second * _relative(second.square().sum(0).cumsum(0) * geometric, rank)
    if scheme.input_quantiser is not None:
        by_rank += _read(scheme, statistics.moments(weight), first, gains, variances)
    return by_rank


def _read(scheme: Scheme, moments: Moments, first: Tensor, gains: Tensor, variances: Tensor) -> Tensor:
    """Cost of quantising the inputs of both factors at every rank from 1, in the metric, shape ``(full,)``.

    An error of variance n in the inputs costs ``c a diag(n) a^T`` for the row a of A, and it was measured. The latents
    are taken for normal numbers, all of the same variance as they are rotated, whose error depends on the largest of a
    token, and so on the rank.
    """
    assert scheme.input_quantiser is not None, f"{scheme.name} quantises no inputs"
    inputs = gains * (first.square() @ moments.noise[scheme.input_quantiser].double())
    counts, each = _counts(gains), _means(variances)
    peaks = largest_squares(counts)
    others = each * (1 - peaks / counts)
    noise = scheme.noise(others[:, None], (each * peaks)[:, None])[:, 0]
    return inputs.cumsum(0) + noise * gains.cumsum(0)


def largest_squares(counts: Tensor) -> Tensor:
    """E[max z^2] over so many independent standard normal numbers z, float64, shape ``(n,)`` as the counts have.

    That is the integral of P(max z^2 > t) = 1 - erf(sqrt(t / 2))^count over t.
    """
    t = torch.linspace(0, 1, POINTS, dtype=torch.float64, device=counts.device).square()[1:, None] * REACH
    above = -torch.expm1(torch.special.erf((t / 2).sqrt()).log() * counts)
    start = torch.zeros_like(t[:1])
    return torch.trapezoid(torch.cat([torch.ones_like(above[:1]), above]), torch.cat([start, t]), dim=0)


def _counts(values: Tensor) -> Tensor:
    return torch.arange(1, len(values) + 1, device=values.device)


def _means(values: Tensor) -> Tensor:
    """Of the first 1, 2, ..., n, shape ``(n,)``."""
    return values.cumsum(0) / _counts(values)


def _relative(by_rank: Tensor, rank: int) -> Tensor:
    return by_rank / by_rank[rank - 1].clamp_min(torch.finfo(by_rank.dtype).tiny)
