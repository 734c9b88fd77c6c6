"""A weight as two factors: truncated in the metric, and truncated again for the inputs of the compressed model."""

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from gac.core.arrays import Floats
from gac.core.linalg import cholesky, damped, eigh
from gac.forms.artifacts import LayerArtifacts
from gac.forms.curvature.metric import FACTOR
from gac.forms.decomposition import balanced, decompose
from gac.forms.low_rank import LowRank
from gac.forms.low_rank.rounding import rounding_by_rank
from gac.forms.refit import Refits, WeightRefit
from gac.forms.tensors import Fit, SiteBuild, Statistics, TensorForm, bias_of
from gac.models.sites import Weight
from gac.schemes import Scheme
from gac.schemes.inputs import Inputs

_LOW_RANK = LowRank()


def every_rank(kept: LayerArtifacts, weight: Weight) -> tuple[Tensor, Tensor]:
    """``(second (out, full), first (full, in))``, the largest singular value first, in the model's dtype."""
    return kept.of(_LOW_RANK, "second", weight), kept.of(_LOW_RANK, "first", weight)


def fill_pair(module: nn.Module, factors: tuple[Tensor, Tensor]) -> None:
    """Put ``(second (out, rank), first (rank, in))`` into the module of a pair."""
    for name, factor in zip(("second.weight", "first.weight"), factors, strict=True):
        module.get_parameter(name).copy_(factor)


def refit_and_truncate(refit: WeightRefit, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """``(second, first)`` of a dense weight ``(out, in)`` with kept gradients, for its new inputs."""
    moments = refit.means.moments(refit.method, refit.kept.gradients(refit.weight))
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
    weight, rank, kept = refit.weight, refit.dim, refit.kept
    if weight.to_residual:
        fill_pair(module, refit_and_truncate(refit, refit.dense))
        return
    second, first = (factor.double() for factor in every_rank(kept, weight))
    gains = kept.of(_LOW_RANK, "gains", weight)
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
        kept = {"second": second.to(matrix.dtype), "first": first.to(matrix.dtype), "gains": decomposition.gains}
        return Fit(weight, decomposition.curve.loss, kept)

    def rounding(self, statistics: Statistics, weight: Weight, scheme: Scheme, inputs: Inputs) -> Floats:
        gains = statistics.kept.of(self.form, "gains", weight)
        by_rank = rounding_by_rank(statistics, weight, scheme, inputs, every_rank(statistics.kept, weight), gains)
        lost: Floats = FACTOR * np.concatenate([[0.0], by_rank.cpu().numpy()])
        return lost

    def parameters(self, build: SiteBuild, weight: Weight, dim: int) -> dict[str, Tensor]:
        second, first = every_rank(build.kept, weight)
        pair = {"first.weight": first[:dim], "second.weight": second[:, :dim]}
        return pair | bias_of(build.linear(weight), "second.bias")
