"""Methods: which metric measures a weight's error, and the low-rank factors and loss curve that follow.

Replacing W by W - E costs about ``1/2 tr(G E A E^T)`` nats a token. With A = R_a R_a^T and G = R_g R_g^T the best
rank-r weight is R_g^-T [R_g^T W R_a]_r R_a^-1 (generalised Fisher-weighted SVD, arXiv 2505.17974, section 3), and its
cost is the sum of the squared singular values cut off. Methods differ in A and G.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from gac.curves import LossCurve
from gac.errors import GacError
from gac.forms.grouped.spec import DEFAULT_GROUP, Grouped
from gac.forms.head_dim.spec import HeadDim
from gac.sensitivity.calibration import Moments
from gac.sensitivity.linalg import cholesky, damped, eigh

# Between the curvature's sum and the measured loss: theory says 1/2 for small errors; fitted once on
# SmolLM2-135M at kept 0.9 to 0.6 (tests/benchmarks/quality.py prints the fit).
FACTOR = 0.64


@dataclass(frozen=True, eq=False)
class Metric:
    """What an error of a weight is measured in, float64: ``inputs`` ``(in, in)`` and ``gradients`` ``(out, out)``."""

    inputs: Tensor
    gradients: Tensor


class Method(ABC):
    """A compressor that changes dimensions: the metric it truncates in."""

    name: str
    power: ClassVar[float] = 0.0  # p of the activation statistics, see gac.sensitivity.calibration
    forms: tuple[str, ...] = ()  # the forms that it is made for; empty: any but those of other methods
    folds: ClassVar[bool] = False  # whether v_proj is truncated by itself and folded into o_proj, for head_dim
    refits: ClassVar[bool] = False  # whether its plans are refitted where nothing else is asked for
    two_sided: ClassVar[bool] = False  # whether errors of outputs are weighed by the gradients there

    @abstractmethod
    def inputs(self, moments: Moments) -> Tensor:
        """What the inputs' side of an error is measured in, float64 ``(in, in)``."""

    def gradients(self, moments: Moments) -> Tensor:
        """The outputs' side, float64 ``(out, out)``: the mean squared gradient, the same for all outputs."""
        return _identity_like(moments.gradients) * moments.gradients.diagonal().double().mean()

    def metric(self, moments: Moments) -> Metric:
        """The metric of a weight with these moments."""
        return Metric(self.inputs(moments), self.gradients(moments))


class Svd(Method):
    """Plain truncated SVD; curves weighted by tr(G)/out so that weights can be compared."""

    name = "svd"

    def inputs(self, moments: Moments) -> Tensor:
        return _identity_like(moments.inputs)


class Asvd(Method):
    """Columns scaled by their mean absolute activation to the power ``alpha`` (S in ASVD, arXiv 2312.05821).

    A feature that never fires counts as the weakest one that does; if none does, all count the same.
    """

    def __init__(self, alpha: float = 0.5) -> None:
        self.alpha = alpha
        self.name = "asvd" if alpha == 0.5 else f"asvd:{alpha!r}"  # every digit: files are called by it

    def inputs(self, moments: Moments) -> Tensor:
        scale = moments.scale.double()
        fires = scale > 0
        scale = torch.where(fires, scale, scale[fires].min() if fires.any() else torch.ones_like(scale))
        return torch.diag(scale ** (2 * self.alpha))


class SvdLlm(Method):
    """Whitening by the activations (SVD-LLM, arXiv 2403.07378, section 3.1), with a root that cannot fail."""

    name = "svd-llm"

    def inputs(self, moments: Moments) -> Tensor:
        return damped(moments.inputs, 1e-6)


class Palu(SvdLlm):
    """PaLU: SVD-LLM's whitening, applied to groups of heads of k_proj and v_proj (arXiv 2407.21118).

    Everything else stays dense, and the budget is of the KV cache. A weight's groups have one rank.
    """

    def __init__(self, group: int = DEFAULT_GROUP) -> None:
        form = Grouped(group)
        self.forms, self.name = (form.name,), form.name.replace(form.kind, "palu")


class PaluFold(SvdLlm):
    """PaLU with groups of one head, and V's second factor folded into o_proj: the form ``head_dim`` for the values.

    Groups of several heads would be folded too if attention read one latent for all heads of a group. Here it reads
    one for each key-value head, so that folding a larger group would cache its latent once for each of its heads.
    """

    name = "palu-fold"
    forms = (Grouped(1).name, HeadDim.name)
    folds = True


class Kfac(Method):
    """Two-sided curvature: activations and gradients (K-FAC, arXiv 1503.05671), its tokens weighed by gradient.

    The damping was chosen on SmolLM2 (tests/benchmarks/README.md has the alternatives).
    """

    name = "kfac"
    power = 1.0
    refits = True
    two_sided = True

    def inputs(self, moments: Moments) -> Tensor:
        return damped(moments.inputs, 1e-2, 3e-2)

    def gradients(self, moments: Moments) -> Tensor:
        return damped(moments.gradients, 1e-2, 3e-2)


METHODS: Mapping[str, Method] = MappingProxyType(
    {method.name: method for method in (Svd(), Asvd(), SvdLlm(), Kfac(), Palu(), PaluFold())}
)


def method_named(name: str) -> Method:
    """The method of this name; ``asvd:ALPHA`` has another alpha than 0.5, ``palu:N`` groups of N heads instead of 4.

    Raises:
        GacError: there is no such method, alpha is not in (0, 1], or N is no positive integer.
    """
    kind, colon, value = name.partition(":")
    if kind == "asvd" and colon:
        return Asvd(_alpha(value))
    if kind == "palu" and colon:
        return Palu(_group(value))
    if name not in METHODS:
        raise GacError(f"method {name!r} is unknown", f"one of {', '.join(METHODS)}", "Correct the name.")
    return METHODS[name]


def _alpha(text: str) -> float:
    try:
        alpha = float(text)
    except ValueError:
        alpha = math.nan
    if not 0 < alpha <= 1:
        raise GacError(f"method asvd:{text}", "asvd:ALPHA with alpha above 0 and at most 1", "Write it like asvd:0.5.")
    return alpha


def _group(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise GacError(f"method palu:{text}", "palu:N with a number of heads of 1 or more", "Write it like palu:4.")
    return int(text)


@dataclass(frozen=True, eq=False)
class Decomposition:
    """Every rank of one weight at once: its loss curve and, for a rank, its factors.

    ``second[:, :r] @ first[:r]`` is the best rank-r weight; float64 ``second (out, full)`` and ``first (full, in)``.
    ``squares (full,)`` are the squared lengths of the columns of ``second`` in the metric of the gradients, in which
    they are orthogonal.
    """

    curve: LossCurve
    second: Tensor
    first: Tensor
    squares: Tensor

    def factors(self, rank: int) -> tuple[Tensor, Tensor]:
        """``(second (out, rank), first (rank, in))``, their columns and rows of equal norm."""
        return balanced(self.second[:, :rank], self.first[:rank])

    @property
    def gains(self) -> Tensor:
        """diag(B^T G B) of the second factor B that ``factors`` gives for the full rank, shape ``(full,)``."""
        return self.squares * _balance(self.second, self.first) ** 2


def balanced(second: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """The factors ``(out, rank)`` and ``(rank, in)`` of the same product, their columns and rows of equal norm."""
    ratio = _balance(second, first)
    return second * ratio, first / ratio[:, None]


def _balance(second: Tensor, first: Tensor) -> Tensor:
    ratio: Tensor = first.norm(dim=1) / second.norm(dim=0).clamp_min(1e-300)
    return ratio.sqrt().clamp(1e-12, 1e12)


def decompose(weight: Tensor, metric: Metric) -> Decomposition:
    """Truncate ``weight`` ``(out, in)`` in a metric, at every rank.

    Only the smaller side is decomposed: the squared singular values of M = R_g^T W R_a are the eigenvalues of M M^T
    (out x out) and of M^T M (in x in), and the best rank-r weight is a projection of W on that side.

    Raises:
        ModelError: a statistic or the weight is not finite.
    """
    matrix = weight.detach().double()
    if matrix.shape[0] <= matrix.shape[1]:
        root = cholesky(metric.gradients)
        rotated = root.T @ matrix
        values, vectors = eigh(rotated @ metric.inputs @ rotated.T)
        second, first, squares = _solved(root, vectors), vectors.T @ rotated, torch.ones_like(values)
    else:
        root = cholesky(metric.inputs)
        rotated = matrix @ root
        values, vectors = eigh(rotated.T @ metric.gradients @ rotated)
        second, first, squares = rotated @ vectors, _solved(root, vectors).T, values
    return Decomposition(curve_of(values), second, first, squares)


def _solved(root: Tensor, vectors: Tensor) -> Tensor:
    """R^-T V of a lower triangular root R."""
    solved: Tensor = torch.linalg.solve_triangular(root.T, vectors, upper=True)
    return solved


def curve_of(squared: Tensor) -> LossCurve:
    """The loss curve of squared singular values in descending order, shape ``(full,)``."""
    tail = squared.flip(0).cumsum(0).flip(0)
    return LossCurve(FACTOR * torch.cat([tail, tail.new_zeros(1)]).cpu().numpy())


def _identity_like(moment: Tensor) -> Tensor:
    return torch.eye(len(moment), dtype=torch.float64, device=moment.device)
