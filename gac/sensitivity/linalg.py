"""Roots and solves that do not fail on rank-deficient statistics; float64 throughout."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from gac.errors import ModelError


def damped(moment: Tensor, mean: float, own: float = 0.0) -> Tensor:
    """A second moment in float64 with ``mean`` times its mean diagonal and ``own`` times its diagonal added.

    The first keeps directions that the text never showed from counting as free, the second is Levenberg-Marquardt's
    scale-free damping. A moment that is all zero becomes the identity: nothing was seen, so nothing is preferred.
    """
    matrix = moment.double()
    matrix = (matrix + matrix.T) / 2
    diagonal = matrix.diagonal()
    level = diagonal.mean()
    if level == 0:
        return torch.eye(len(matrix), dtype=torch.float64, device=matrix.device)
    return matrix + torch.diag(own * diagonal + mean * level)


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues in descending order, none negative, and their eigenvectors as columns.

    Raises:
        ModelError: the matrix is not finite.
    """
    if not torch.isfinite(matrix).all():
        raise ModelError(
            f"a {tuple(matrix.shape)} statistic is not finite",
            "finite activations, gradients and weights",
            "Load the model in bfloat16 or float32, and check its weights.",
        )
    values, vectors = torch.linalg.eigh(matrix)
    return values.flip(0).clamp_min(0), vectors.flip(1)


def cholesky(matrix: Tensor) -> Tensor:
    """Lower Cholesky factor; where rounding has made the matrix indefinite, its diagonal is raised until it is not."""
    factor: Tensor
    factor, failed = torch.linalg.cholesky_ex(matrix)
    jitter = 1e-12 * matrix.diagonal().mean()
    while failed.item():
        raised = matrix.clone()
        raised.diagonal().add_(jitter)
        factor, failed = torch.linalg.cholesky_ex(raised)
        jitter *= 10
    return factor


@contextmanager
def one_thread() -> Iterator[None]:
    """Run CPU work on one thread: for many small operations, waiting for a second one costs more than it saves."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
