"""Roots, solves and packing of statistics; roots and solves in float64, and none fails where they lack rank."""

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
    matrix = (matrix + matrix.T).div_(2)
    diagonal = matrix.diagonal()
    level = diagonal.mean()
    if level == 0:
        return torch.eye(len(matrix), dtype=torch.float64, device=matrix.device)
    diagonal.add_(own * diagonal + mean * level)
    return matrix


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues in descending order, none negative, and their eigenvectors as columns.

    Raises:
        ModelError: the matrix is not finite.
    """
    _check_statistic(matrix)
    values, vectors = torch.linalg.eigh(matrix)
    return values.flip(0).clamp_min(0), vectors.flip(1)


def cholesky(matrix: Tensor) -> Tensor:
    """Lower Cholesky factor; where rounding has made the matrix indefinite, its diagonal is raised until it is not.

    Raises:
        ModelError: the matrix is not finite.
    """
    factor: Tensor
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if not failed.item():
        return factor
    _check_statistic(matrix)
    jitter = 1e-12 * float(matrix.diagonal().mean()) or 1e-12
    while failed.item():
        raised = matrix.clone()
        raised.diagonal().add_(jitter)
        factor, failed = torch.linalg.cholesky_ex(raised)
        jitter *= 10
    return factor


PACK = 512


def packed(matrix: Tensor) -> Tensor:
    """A symmetric matrix as one vector of about half its size: its lower triangle, in blocks of ``PACK`` rows."""
    return torch.cat([matrix[at : at + PACK, : at + PACK].flatten() for at in range(0, len(matrix), PACK)])


def unpacked(vector: Tensor, size: int) -> Tensor:
    """The symmetric matrix ``(size, size)`` that ``packed`` made a vector of."""
    matrix = vector.new_empty(size, size)
    for at in range(0, size, PACK):
        rows = matrix[at : at + PACK, : at + PACK]
        rows.copy_(vector[: rows.numel()].view_as(rows))
        matrix[:at, at : at + PACK] = rows[:, :at].T
        vector = vector[rows.numel() :]
    return matrix


def check_measured(found: Tensor, given: str, expected: str) -> None:
    """Refuse what was measured of a model where a number of it is not finite.

    Raises:
        ModelError: says what was given and expected.
    """
    if not torch.isfinite(found).all():
        raise ModelError(given, expected, "Load the model in bfloat16 or float32, and check its weights.")


def _check_statistic(matrix: Tensor) -> None:
    given = f"a {tuple(matrix.shape)} statistic is not finite"
    check_measured(matrix, given, "finite activations, gradients and weights")


@contextmanager
def tf32_products(like: Tensor) -> Iterator[None]:
    """Multiply float32 matrices in TF32 where they hold 16-bit numbers on a GPU: it has as many bits as float16."""
    if like.device.type != "cuda" or like.element_size() != 2:
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def one_thread() -> Iterator[None]:
    """Run CPU work on one thread: for many small operations, waiting for a second one costs more than it saves."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
