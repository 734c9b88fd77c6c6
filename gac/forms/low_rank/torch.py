"""A weight as two factors: truncated in the metric, and truncated again for the inputs of the compressed model."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from gac.arrays import Floats
from gac.forms import form_named
from gac.forms.decomposition import balanced, decompose, turned
from gac.forms.metric import FACTOR, Moments, largest_squares
from gac.forms.refit import Refits, WeightRefit
from gac.forms.tensors import Fit, Kept, SiteWork, Statistics, TensorForm, bias_of
from gac.linalg import cholesky, damped, eigh
from gac.models.sites import Weight
from gac.schemes.feedback.order import DAMPING
from gac.schemes.inputs import Inputs

if TYPE_CHECKING:
    from gac.schemes import Scheme


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


def _means(values: Tensor) -> Tensor:
    """Of the first 1, 2, ..., n, shape ``(n,)``."""
    return values.cumsum(0) / torch.arange(1, len(values) + 1, device=values.device)


def _relative(by_rank: Tensor, rank: int) -> Tensor:
    """Over what it is at a rank."""
    return by_rank / by_rank[rank - 1].clamp_min(torch.finfo(by_rank.dtype).tiny)


def _read(scheme: "Scheme", moments: Moments, first: Tensor, gains: Tensor, seen: Tensor) -> Tensor:
    """What rounding the inputs of both factors costs at every rank from 1, in the metric, shape ``(full,)``.

    An error of variance n in the inputs costs ``c a diag(n) a^T`` for the row a of A, and it was measured. The latents
    are taken for normal numbers, all of the same variance as they are turned, whose error depends on the largest of a
    token, and so on the rank.
    """
    assert scheme.reads is not None, f"{scheme.name} rounds no inputs"
    inputs = gains * (first.square() @ moments.noise[scheme.reads].double())
    peaks, each = largest_squares(len(seen), seen.device), _means(seen)
    others = each * (1 - peaks / torch.arange(1, len(seen) + 1, device=seen.device))
    noise = scheme.noise(others[:, None], (each * peaks)[:, None])[:, 0]
    return inputs.cumsum(0) + noise * gains.cumsum(0)


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
        """A pair is rounded at one rank, at which it has about as many parameters as the weight; others follow from it.

        B^T G B and A M A^T, M the moment of the inputs, are diagonal, with c and d. With the latents turned
        (``gac.forms.decomposition.turned``) all rows of A are of one length, and count alike: their errors cost
        ``|A|^2 sum(c) / r``, of which the second factor, which is solved for A as it was rounded, leaves
        ``1 - r / in``. The errors of B cost ``|B|^2`` times the geometric mean of d. Both were compared with pairs of
        SmolLM2 at a quarter of that rank and more: most are within 7 % (docs/results-precision.md). What a scheme
        rounds of inputs and latents is added.
        """
        gradients, own = statistics.metric(weight).gradients, weight.out_features * weight.in_features
        second, first = (factor.double() for factor in every_rank(statistics.kept, weight))
        gains = statistics.kept.of(self.form, "gains", weight)
        seen = torch.linalg.vecdot(first @ inputs.moment, first)
        rank = max(1, own // (weight.out_features + weight.in_features))
        b, a = turned(second[:, :rank], first[:rank])
        latents = Inputs(a @ inputs.moment @ a.T, thorough=inputs.thorough)
        rows = scheme.rounded(a, inputs) - a
        columns = scheme.rounded(b, latents, gradients if weight.scores else None) - b
        of_first = ((b.T @ gradients @ b @ rows @ inputs.moment) * rows).sum()
        of_second = ((gradients @ columns @ latents.moment) * columns).sum()
        left = 1 - torch.arange(1, len(first) + 1, device=first.device) / weight.in_features
        by_rank = of_first * left * _relative(_means(first.square().sum(1)) * gains.cumsum(0), rank)
        geometric = _means((seen + DAMPING * seen.mean()).log()).exp()
        by_rank += of_second * _relative(second.square().sum(0).cumsum(0) * geometric, rank)
        if scheme.reads is not None:
            by_rank += _read(scheme, statistics.moments(weight), first, gains, seen)
        lost: Floats = FACTOR * np.concatenate([[0.0], by_rank.cpu().numpy()])
        return lost

    def parameters(self, work: SiteWork, weight: Weight, dim: int) -> dict[str, Tensor]:
        second, first = every_rank(work.kept, weight)
        pair = {"first.weight": first[:dim], "second.weight": second[:, :dim]}
        return pair | bias_of(work.linear(weight), "second.bias")

    def merge(self, weight: Weight, dim: int, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return merged_pair(weight, own)
