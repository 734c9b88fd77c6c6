"""A weight as two factors: truncated in the metric, and truncated again for the inputs of the compressed model."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from gac.core.arrays import Floats
from gac.core.linalg import cholesky, damped, eigh
from gac.forms import form_named
from gac.forms.curvature.metric import FACTOR
from gac.forms.decomposition import balanced, decompose
from gac.forms.low_rank.rounding import rounding_by_rank
from gac.forms.refit import Refits, WeightRefit
from gac.forms.tensors import Fit, Kept, SiteWork, Statistics, TensorForm, bias_of
from gac.models.sites import Weight

if TYPE_CHECKING:
    from gac.schemes import Scheme
    from gac.schemes.inputs import Inputs


def every_rank(kept: Kept, weight: Weight) -> tuple[Tensor, Tensor]:
    """``(second (out, full), first (full, in))``, the largest singular value first, in the model's dtype."""
    form = form_named("low_rank")
    return kept.of(form, "second", weight), kept.of(form, "first", weight)


def merged_pair(weight: Weight, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """W = B A of a pair, or of a pair for each group of rows, multiplied in double precision."""
    first, second = own["first.weight"].double(), own["second.weight"].double()
    if second.dim() == 3:
        first = first.reshape(len(second), -1, weight.in_features)
    product = (second @ first).reshape(weight.out_features, weight.in_features).to(own["first.weight"].dtype)
    return {"weight": product} | ({"bias": own["second.bias"]} if "second.bias" in own else {})


def fill_pair(module: nn.Module, factors: tuple[Tensor, Tensor]) -> None:
    """Put ``(second (out, rank), first (rank, in))`` into the module of a pair."""
    for name, factor in zip(("second.weight", "first.weight"), factors, strict=True):
        module.get_parameter(name).copy_(factor)


def written_again(refit: WeightRefit, whole: Tensor) -> tuple[Tensor, Tensor]:
    """``(second, first)`` of a weight whose gradients are kept, fitted again and truncated for its new inputs.

    Args:
        whole: what the pair is made of, shape ``(out, in)``, as the dense model has it.
    """
    moments = refit.means.moments(refit.method, refit.kept.gradients(refit.weight))
    return decompose(refit.matrix(whole), refit.method.metric(moments)).factors(refit.dim)


def second_again(refit: WeightRefit, module: nn.Module, whole: Tensor) -> None:
    """SVD-LLM's closed-form update (arXiv 2403.07378, section 3.2) of the second factor: ``W S A^T (A S A^T)^-1``.

    Args:
        whole: W, as for ``written_again``.
    """
    first, second = (module.get_parameter(f"{name}.weight") for name in ("first", "second"))
    square = refit.means.square
    gram = damped(first.double() @ square @ first.double().T, 1e-9)
    right = first.double() @ square @ whole.double().T
    second.copy_(torch.cholesky_solve(right, cholesky(gram)).T)


def _both_again(refit: WeightRefit, module: nn.Module) -> None:
    fill_pair(module, _truncated_again(refit))


def _second_only(refit: WeightRefit, module: nn.Module) -> None:
    second_again(refit, module, refit.dense)


def _truncated_again(refit: WeightRefit) -> tuple[Tensor, Tensor]:
    """``(second (out, rank), first (rank, in))``.

    Of a weight inside a layer W T is known by its factors B A T, and the metric of its outputs by the gains
    c = diag(B^T G B): with F = diag(c)^1/2 A T and U the leading eigenvectors of F S F^T the best rank-r weight is
    B diag(c)^-1/2 U U^T F. So G itself, which for gate and up is the largest statistic, is not needed. B A is W as
    precisely as the factors are kept, in the model's dtype.
    """
    weight, rank, kept = refit.weight, refit.dim, refit.kept
    if weight.writes:
        return written_again(refit, refit.dense)
    second, first = (factor.double() for factor in every_rank(kept, weight))
    gains = kept.of(form_named("low_rank"), "gains", weight)
    least = gains.max() * 1e-24
    roots = gains.clamp_min(torch.where(least > 0, least, torch.ones_like(least))).sqrt()
    turned = roots[:, None] * (first @ refit.turn)
    inputs = refit.method.inputs(refit.means.moments(refit.method, refit.dense))
    _, vectors = eigh(turned @ inputs @ turned.T)
    return balanced(second @ (vectors[:, :rank] / roots[:, None]), vectors[:, :rank].T @ turned)


class LowRankTensors(TensorForm):
    """Factors of all ranks are kept, balanced, so that those of a rank are their first columns and rows."""

    refits: ClassVar[Refits] = {"residual": _both_again, "update": _second_only}

    def measure(self, statistics: Statistics, weights: Sequence[Weight]) -> Iterator[Fit]:
        for weight in weights:
            yield self._fit(statistics, weight)

    def _fit(self, statistics: Statistics, weight: Weight) -> Fit:
        """By itself, so that what it needs in double precision is let go before the next weight."""
        matrix = statistics.matrix(weight)
        found = decompose(matrix, statistics.metric(weight))
        second, first = found.factors(found.curve.full)
        kept = {"second": second.to(matrix.dtype), "first": first.to(matrix.dtype), "gains": found.gains}
        return Fit(weight, found.curve.loss, kept)

    def rounding(self, statistics: Statistics, weight: Weight, scheme: "Scheme", inputs: "Inputs") -> Floats:
        gains = statistics.kept.of(self.form, "gains", weight)
        by_rank = rounding_by_rank(statistics, weight, scheme, inputs, every_rank(statistics.kept, weight), gains)
        lost: Floats = FACTOR * np.concatenate([[0.0], by_rank.cpu().numpy()])
        return lost

    def parameters(self, work: SiteWork, weight: Weight, dim: int) -> dict[str, Tensor]:
        second, first = every_rank(work.kept, weight)
        pair = {"first.weight": first[:dim], "second.weight": second[:, :dim]}
        return pair | bias_of(work.linear(weight), "second.bias")

    def merge(self, weight: Weight, dim: int, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return merged_pair(weight, own)
