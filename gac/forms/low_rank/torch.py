"""A weight as two factors: truncated in the metric, and truncated again for the inputs of the compressed model.

**Quantised pairs** are priced at every rank, from quantising them at one rank. A pair is stored with its latents
rotated (``with_rotated_latents``). Before that, B^T G B and A M A^T are diagonal, with c and d on the diagonals; M is
the moment of the inputs. Rotated, all rows of A are alike. Their errors cost ``|A|^2 sum(c) / r``. The second factor is
solved for the quantised A, which leaves ``1 - r / in`` of that. The errors of B cost ``|B|^2`` times the geometric mean
of d, for feedback makes up for the rest. The page results/precision.md compares this with pairs that were stored.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from gac.core.arrays import Floats
from gac.core.linalg import cholesky, damped, eigh
from gac.forms.artifacts import LayerArtifacts
from gac.forms.curvature.metric import FACTOR, Metric, Moments
from gac.forms.decomposition import balanced, decompose, with_rotated_latents
from gac.forms.low_rank import LowRank
from gac.forms.refit import Refits, WeightRefit
from gac.forms.tensors import Fit, SiteBuild, Statistics, TensorForm, bias_of
from gac.models.sites import Weight
from gac.schemes import Scheme
from gac.schemes.feedback.order import DAMPING, Inputs

STEP = 64
"""Step of the rank at which pairs are quantised: an orthogonal matrix of an odd size takes long."""
POINTS, REACH = 256, 64.0
"""Of the integral over the largest square: points, and how far it goes."""
_LOW_RANK = LowRank()


def _rotated_pair(
    second: Tensor, first: Tensor, inputs: Inputs, gradients: Tensor
) -> tuple[Tensor, Tensor, Inputs, Metric, Metric]:
    """A pair as it is stored, float64; the inputs of its second factor; the metrics of errors of either."""
    second, first = with_rotated_latents(second, first)
    latents = first @ inputs.moment @ first.T
    of_first = Metric(inputs.moment, second.T @ gradients @ second)
    return second, first, Inputs(latents, inputs.thorough), Metric(latents, gradients), of_first


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

    ``factors`` are of all ranks, ``(second (out, full), first (full, in))``; ``gains`` are c, shape ``(full,)``.
    """
    gradients, rank = statistics.metric(weight).gradients, even_rank(weight)
    second, first = (factor.double() for factor in factors)
    variances = inputs.once(("variances", weight.name), lambda moment: torch.linalg.vecdot(first @ moment, first))
    rotated_second, rotated_first, latents, metric_of_second, metric_of_first = inputs.once(
        (_rotated_pair, weight.name), lambda _: _rotated_pair(second[:, :rank], first[:rank], inputs, gradients)
    )
    for factor in (rotated_first, rotated_second):
        scheme.check_range(factor, f"a factor of {weight.name}")
    of_first = metric_of_first.cost(scheme.quantised(rotated_first, inputs) - rotated_first)
    rows = gradients if weight.scores else None
    of_second = metric_of_second.cost(scheme.quantised(rotated_second, latents, rows) - rotated_second)
    unsolved = 1 - _counts(gains).float() / weight.in_features
    by_rank = of_first * unsolved * _relative(_means(first.square().sum(1)) * gains.cumsum(0), rank)
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


def every_rank(artifacts: LayerArtifacts, weight: Weight) -> tuple[Tensor, Tensor]:
    """``(second (out, full), first (full, in))``, the largest singular value first, in the model's dtype."""
    return artifacts.of(_LOW_RANK, "second", weight), artifacts.of(_LOW_RANK, "first", weight)


def fill_pair(module: nn.Module, factors: tuple[Tensor, Tensor]) -> None:
    for name, factor in zip(("second.weight", "first.weight"), factors, strict=True):
        module.get_parameter(name).copy_(factor)


def refit_and_truncate(refit: WeightRefit, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """``(second, first)`` of a dense weight ``(out, in)`` with kept gradients, for its new inputs."""
    moments = refit.means.moments(refit.method, refit.artifacts.gradients(refit.weight))
    return decompose(refit.matrix(matrix), refit.method.metric(moments)).factors(refit.dim)


def update_second(refit: WeightRefit, module: nn.Module, matrix: Tensor) -> None:
    """SVD-LLM's closed-form update (arXiv 2403.07378, section 3.2) of the second factor: ``W S A^T (A S A^T)^-1``."""
    first, second = (module.get_parameter(f"{name}.weight") for name in ("first", "second"))
    square = refit.means.square
    gram = damped(first.double() @ square @ first.double().T, 1e-9)
    right = first.double() @ square @ matrix.double().T
    second.copy_(torch.cholesky_solve(right, cholesky(gram)).T)


def _refit_second(refit: WeightRefit, module: nn.Module) -> None:
    update_second(refit, module, refit.dense)


def _refit_both(refit: WeightRefit, module: nn.Module) -> None:
    """Truncate again for the new inputs.

    Of a weight inside a layer W T is known by its factors B A T, and the metric of its outputs by the gains
    c = diag(B^T G B): with F = diag(c)^1/2 A T and U the leading eigenvectors of F S F^T the best rank-r weight is
    B diag(c)^-1/2 U U^T F. So G itself, which for gate and up is the largest statistic, is not needed. B A is W as
    precisely as the factors are kept, in the model's dtype.
    """
    weight, rank, artifacts = refit.weight, refit.dim, refit.artifacts
    if weight.to_residual:
        fill_pair(module, refit_and_truncate(refit, refit.dense))
        return
    second, first = (factor.double() for factor in every_rank(artifacts, weight))
    gains = artifacts.of(_LOW_RANK, "gains", weight)
    least = gains.max() * 1e-24
    roots = gains.clamp_min(torch.where(least > 0, least, torch.ones_like(least))).sqrt()
    turned = roots[:, None] * (first @ refit.turn)
    inputs = refit.method.inputs(refit.means.moments(refit.method, refit.dense))
    _, vectors = eigh(turned @ inputs @ turned.T)
    fill_pair(module, balanced(second @ (vectors[:, :rank] / roots[:, None]), vectors[:, :rank].T @ turned))


class PairTensors(TensorForm):
    """A form whose module has two factors: ``first.weight``, and ``second.weight`` with the bias."""

    def merge(self, weight: Weight, dim: int, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """W = B A of a pair, or of a pair for each group of rows, multiplied in double precision."""
        first, second = parameters["first.weight"].double(), parameters["second.weight"].double()
        if second.dim() == 3:
            first = first.reshape(len(second), -1, first.shape[-1])
        merged = {"weight": (second @ first).flatten(0, -2).to(parameters["first.weight"].dtype)}
        return merged | ({"bias": parameters["second.bias"]} if "second.bias" in parameters else {})


class LowRankTensors(PairTensors):
    """Keeps balanced factors of all ranks; those of a rank are their first columns and rows."""

    refits: ClassVar[Refits] = {"residual": _refit_both, "update": _refit_second}

    def measure(self, statistics: Statistics, weights: Sequence[Weight]) -> Iterator[Fit]:
        for weight in weights:
            yield self._fit(statistics, weight)

    def _fit(self, statistics: Statistics, weight: Weight) -> Fit:
        # A function of its own frees its double-precision tensors before the next weight.
        matrix = statistics.matrix(weight)
        decomposition = decompose(matrix, statistics.metric(weight))
        second, first = decomposition.factors(decomposition.curve.full)
        tensors = {"second": second.to(matrix.dtype), "first": first.to(matrix.dtype), "gains": decomposition.gains}
        return Fit(weight, decomposition.curve.loss, tensors)

    def rounding(self, statistics: Statistics, weight: Weight, scheme: Scheme, inputs: Inputs) -> Floats:
        gains = statistics.artifacts.of(self.form, "gains", weight)
        by_rank = rounding_by_rank(statistics, weight, scheme, inputs, every_rank(statistics.artifacts, weight), gains)
        lost: Floats = FACTOR * np.concatenate([[0.0], by_rank.cpu().numpy()])
        return lost

    def parameters(self, build: SiteBuild, weight: Weight, dim: int) -> dict[str, Tensor]:
        second, first = every_rank(build.artifacts, weight)
        pair = {"first.weight": first[:dim], "second.weight": second[:, :dim]}
        return pair | bias_of(build.linear(weight), "second.bias")
