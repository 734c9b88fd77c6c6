"""A weight truncated at every rank at once.

With A = R_a R_a^T and G = R_g R_g^T the best rank-r weight is R_g^-T [R_g^T W R_a]_r R_a^-1 (generalised
Fisher-weighted SVD, arXiv 2505.17974, section 3), and its cost is the sum of the squared singular values cut off.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gac.core.linalg import cholesky, eigh, orthogonal
from gac.forms.curvature.metric import FACTOR, Metric
from gac.forms.loss_curves import LossCurve


@dataclass(frozen=True, eq=False)
class Decomposition:
    """All ranks of one weight: ``second[:, :r] @ first[:r]`` is the best of rank r; float64.

    ``squares (full,)`` are the squared lengths of the columns of ``second (out, full)`` in the metric of the gradients,
    in which they are orthogonal; ``first`` has shape ``(full, in)``.
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
    """Truncate ``weight`` ``(out, in)`` in a metric, at every rank; ModelError if anything is not finite.

    Only the smaller side is decomposed: the squared singular values of M = R_g^T W R_a are the eigenvalues of M M^T
    (out x out) and of M^T M (in x in), and the best rank-r weight is a projection of W on that side.
    """
    matrix = weight.detach().double()
    if matrix.shape[0] <= matrix.shape[1]:
        root = cholesky(metric.gradients)
        rotated = root.T @ matrix
        values, vectors = eigh(rotated @ metric.inputs @ rotated.T)
        second, first, squares = _solved(root, vectors), vectors.T @ rotated, torch.ones_like(values)
        return Decomposition(curve_of(values), second, first, squares)
    root = cholesky(metric.inputs)
    rotated = matrix @ root
    return _along_inputs(rotated, root, rotated.T @ metric.gradients @ rotated)


def decompose_as_seen(weight: Tensor, inputs: Tensor, seen: Tensor) -> Decomposition:
    """``decompose`` from A and ``seen`` = W^T G W in place of the metric, both ``(in, in)``, float64."""
    root = cholesky(inputs)
    return _along_inputs(weight.detach().double() @ root, root, root.T @ seen @ root)


def _along_inputs(rotated: Tensor, root: Tensor, gram: Tensor) -> Decomposition:
    values, vectors = eigh(gram)
    return Decomposition(curve_of(values), rotated @ vectors, _solved(root, vectors).T, values)


def _solved(root: Tensor, vectors: Tensor) -> Tensor:
    """R^-T V of a lower triangular root R."""
    solved: Tensor = torch.linalg.solve_triangular(root.T, vectors, upper=True)
    return solved


def curve_of(squared: Tensor) -> LossCurve:
    tail = squared.flip(0).cumsum(0).flip(0)
    return LossCurve(FACTOR * torch.cat([tail, tail.new_zeros(1)]).cpu().numpy())


def with_rotated_latents(second: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """``(second Q, Q^T first)``, float64, with a fixed orthogonal matrix Q of the latents: the same product.

    Decomposed latents are uncorrelated, so none can compensate the quantisation error of another. Rotated, all have one
    variance and are correlated: feedback then loses the geometric mean of the variances instead of the arithmetic one.
    """
    basis = orthogonal(len(first), torch.Generator().manual_seed(0), first.device)
    return second.double() @ basis, basis.T @ first.double()
