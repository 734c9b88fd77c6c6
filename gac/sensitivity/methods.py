"""Methods: which metric measures a weight's error, and the low-rank factors and loss curve that follow.

Replacing W by W - E costs about ``1/2 tr(G E A E^T)`` nats a token. With A = R_a R_a^T and G = R_g R_g^T the best
rank-r weight is R_g^-T [R_g^T W R_a]_r R_a^-1 (generalised Fisher-weighted SVD, arXiv 2505.17974, section 3), and its
cost is the sum of the squared singular values cut off. Methods differ in A and G.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from gac.curves import LossCurve
from gac.sensitivity.calibration import Moments
from gac.sensitivity.linalg import cholesky, damped, eigh

if TYPE_CHECKING:
    from gac.sensitivity.values import ShortenedValues

# Between the curvature's sum and the measured loss: theory says 1/2 for small errors; fitted once on
# SmolLM2-135M at kept 0.9 to 0.6 (tests/benchmarks/quality.py prints the fit).
FACTOR = 0.64


@dataclass(frozen=True, eq=False)
class Metric:
    """What an error of a weight is measured in, float64: ``inputs`` ``(in, in)`` and ``gradients`` ``(out, out)``."""

    inputs: Tensor
    gradients: Tensor


@dataclass(frozen=True, eq=False)
class Measured:
    """A weight ``(out, in)`` and its metric."""

    weight: Tensor
    metric: Metric


class Method(ABC):
    """How errors of weights are measured; ``gac.testing.check_method`` checks one of your own.

    What was measured is kept on disk under the method's name: a method that measures differently needs another name.

    Attributes:
        name: as users give it, with its parameter where it has one.
        power: p of the activation statistics, see ``gac.sensitivity.calibration``.
        forms: the forms that it is made for; empty: any but those that other methods are made for.
        folds: whether v_proj is truncated by itself for the form ``head_dim``, by ``fold``.
        refits: whether its plans are refitted where nothing else is asked for.
        two_sided: whether errors of outputs are weighed by the gradients of each output, not by their mean.
    """

    name: str
    power: ClassVar[float] = 0.0
    forms: tuple[str, ...] = ()
    folds: ClassVar[bool] = False
    refits: ClassVar[bool] = False
    two_sided: ClassVar[bool] = False

    @abstractmethod
    def inputs(self, moments: Moments) -> Tensor:
        """What the inputs' side of an error is measured in, float64 ``(in, in)``."""

    def gradients(self, moments: Moments) -> Tensor:
        """The outputs' side, float64 ``(out, out)``: the mean squared gradient, the same for all outputs."""
        return identity_like(moments.gradients) * moments.gradients.diagonal().double().mean()

    def metric(self, moments: Moments) -> Metric:
        """The metric of a weight with these moments."""
        return Metric(self.inputs(moments), self.gradients(moments))

    def fold(self, values: Measured, output: Tensor, heads: int, groups: int) -> "ShortenedValues":
        """Value vectors at every length, from v_proj alone; asked of methods that ``folds``.

        Args:
            values: v_proj.
            output: o_proj's weight, shape ``(out, heads * head_dim)``.
            heads: query heads.
            groups: key-value heads.
        """
        raise NotImplementedError


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


def identity_like(moment: Tensor) -> Tensor:
    """The float64 identity of a moment's shape, on its device."""
    return torch.eye(len(moment), dtype=torch.float64, device=moment.device)
