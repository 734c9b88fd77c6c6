"""Roots, solves, packing of statistics and orthogonal matrices; float64, and none fails where they lack rank."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from gac.core.errors import ModelError


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


def identity_like(moment: Tensor) -> Tensor:
    """The float64 identity of a moment's shape, on its device."""
    return torch.eye(len(moment), dtype=torch.float64, device=moment.device)


def orthogonal(size: int, generator: torch.Generator, device: torch.device | str = "cpu") -> Tensor:
    """A random orthogonal matrix in float64: a Hadamard matrix as far as the size allows, with random signs of rows.

    The Hadamard matrix is that of the largest power of two that divides the size. What is left of the size is odd, and
    has a random orthogonal matrix; the whole is their Kronecker product.

    Args:
        generator: of the host, so that the matrix is the same on every device.

    Returns:
        Shape ``(size, size)``.
    """
    odd = size // (size & -size)
    matrix = torch.linalg.qr(torch.randn(odd, odd, generator=generator, dtype=torch.float64)).Q.contiguous().to(device)
    step = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64, device=device) / 2**0.5
    while len(matrix) < size:
        matrix = torch.kron(step, matrix)
    signs = 1 - 2 * torch.randint(2, (size, 1), generator=generator)
    turned: Tensor = signs.to(device) * matrix
    return turned


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


BAND = 128
GPU_BAND = 2048
"""With fewer rows a GPU has too little to multiply at once."""


def add_square(total: Tensor, rows: Tensor) -> None:
    """Add ``rows^T rows`` to a sum; ``mirrored`` makes it whole once the last is added.

    What lies above the diagonal is left out, in bands of ``BAND`` rows (``GPU_BAND`` on a GPU): up to half of the
    products. Where the sum is as precise as the rows, the product is never written by itself.
    """
    # Hopper's TF32 instructions want what is summed over to be contiguous.
    columns = rows.T.contiguous() if rows.is_cuda else rows.T
    for band in _bands(total):
        part, left, right = total[band, : band.stop], columns[band], columns[: band.stop].T
        if total.dtype == rows.dtype:
            part.addmm_(left, right)
        else:
            part += left @ right


def mirrored(total: Tensor) -> Tensor:
    """What ``add_square`` summed, with what it left out above the diagonal; the same tensor."""
    for band in _bands(total):
        total[: band.start, band] = total[band, : band.start].T
    return total


def _bands(total: Tensor) -> list[slice]:
    """Rows of a sum that are multiplied at once."""
    height = GPU_BAND if total.is_cuda else BAND
    return [slice(start, min(start + height, len(total))) for start in range(0, len(total), height)]


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


def fits_tf32(values: Tensor) -> bool:
    """Whether they are 16-bit numbers on a GPU, which TF32 holds."""
    return values.is_cuda and values.element_size() == 2


@contextmanager
def tf32_products(allowed: bool) -> Iterator[None]:
    """Multiply float32 matrices on a GPU in TF32, which has as many bits as float16; only where that is allowed."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if allowed else before)
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
