"""Matrix factors, packing of statistics and orthogonal matrices; float64, without failures for low rank."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

import scipy.linalg
import torch
from torch import Tensor

from gac.core.errors import ModelError

T = TypeVar("T")
R = TypeVar("R")


def damped(moment: Tensor, mean: float, diagonal: float = 0.0) -> Tensor:
    """Add ``mean`` times its mean diagonal and ``diagonal`` times its diagonal to a second moment; float64.

    The first gives a cost to directions that the text never showed, the second is Levenberg-Marquardt's scale-free
    damping. A moment that is all zero becomes the identity.
    """
    matrix = moment.double()
    matrix = (matrix + matrix.T).div_(2)
    entries = matrix.diagonal()
    level = entries.mean()
    if level == 0:
        return identity_like(matrix)
    entries.add_(diagonal * entries + mean * level)
    return matrix


def identity_like(moment: Tensor) -> Tensor:
    return torch.eye(len(moment), dtype=torch.float64, device=moment.device)


def orthogonal(size: int, generator: torch.Generator, device: torch.device | str = "cpu") -> Tensor:
    """Return a random orthogonal matrix ``(size, size)`` in float64, with random signs of rows.

    It is the Kronecker product of the Hadamard matrix of the largest power of two that divides the size, and a random
    orthogonal matrix of the odd rest. The generator is on the CPU, so that it is the same on every device.
    """
    odd = size // (size & -size)
    matrix = torch.linalg.qr(torch.randn(odd, odd, generator=generator, dtype=torch.float64)).Q.contiguous().to(device)
    step = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64, device=device) / 2**0.5
    while len(matrix) < size:
        matrix = torch.kron(step, matrix)
    signs = 1 - 2 * torch.randint(2, (size, 1), generator=generator)
    result: Tensor = signs.to(device) * matrix
    return result


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues in descending order, none negative, and their eigenvectors as columns."""
    _check_statistic(matrix)
    # LAPACK's divide and conquer, which torch calls, has failed to converge with several threads, and has returned
    # vectors that are not finite of matrices of low rank. QR does not.
    try:
        values, vectors = torch.linalg.eigh(matrix)
        failed = not vectors.isfinite().all()
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        failed = True
    if failed:
        solved = scipy.linalg.eigh(matrix.cpu().numpy(), driver="ev")
        values, vectors = (torch.from_numpy(part).to(matrix.device) for part in solved)
    return values.flip(0).clamp_min(0), vectors.flip(1)


def cholesky(matrix: Tensor) -> Tensor:
    """Return the lower Cholesky factor; where rounding has made the matrix indefinite, its diagonal is raised first."""
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
GPU_BAND = 2048  # rows of a band; with fewer a GPU is not busy


def add_square(total: Tensor, rows: Tensor) -> None:
    """Add ``rows^T rows`` to a sum, without the blocks above the diagonal; ``mirrored`` completes the sum.

    It is computed in bands of ``BAND`` rows (``GPU_BAND`` on a GPU), which saves up to half of the products. Where the
    sum is as precise as the rows, the product is added in place.
    """
    # Hopper's TF32 instructions need a contiguous summed axis.
    columns = rows.T.contiguous() if rows.is_cuda else rows.T
    for band in _bands(total):
        part, rows_of_band, others = total[band, : band.stop], columns[band], columns[: band.stop].T
        if total.dtype == rows.dtype:
            part.addmm_(rows_of_band, others)
        else:
            part += rows_of_band @ others


def mirrored(total: Tensor) -> Tensor:
    """Complete a sum of ``add_square`` above the diagonal, in place."""
    for band in _bands(total):
        total[: band.start, band] = total[band, : band.start].T
    return total


def _bands(total: Tensor) -> list[slice]:
    height = GPU_BAND if total.is_cuda else BAND
    return [slice(start, min(start + height, len(total))) for start in range(0, len(total), height)]


PACK = 512


def packed(matrix: Tensor) -> Tensor:
    """Return a symmetric matrix as a vector of about half its size: its lower triangle, in blocks of ``PACK`` rows."""
    return torch.cat([matrix[row : row + PACK, : row + PACK].flatten() for row in range(0, len(matrix), PACK)])


def unpacked(vector: Tensor, size: int) -> Tensor:
    """Return the symmetric matrix ``(size, size)`` of a packed vector."""
    matrix = vector.new_empty(size, size)
    for row in range(0, size, PACK):
        block = matrix[row : row + PACK, : row + PACK]
        block.copy_(vector[: block.numel()].view_as(block))
        matrix[:row, row : row + PACK] = block[:, :row].T
        vector = vector[block.numel() :]
    return matrix


def check_measured(statistic: Tensor, problem: str, expected: str) -> None:
    if not torch.isfinite(statistic).all():
        raise ModelError(problem, expected, "Load the model in bfloat16 or float32, and check its weights.")


def _check_statistic(matrix: Tensor) -> None:
    expected = "finite activations, gradients and weights"
    check_measured(matrix, f"a {tuple(matrix.shape)} statistic is not finite", expected)


def fits_tf32(values: Tensor) -> bool:
    """Return True for 16-bit numbers on a GPU, which TF32 represents exactly."""
    return values.is_cuda and values.element_size() == 2


@contextmanager
def tf32_products(allowed: bool) -> Iterator[None]:
    """Multiply float32 matrices on a GPU in TF32, which has as many mantissa bits as float16, if allowed."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if allowed else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """Run each operation of CPU work on so many threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def single_thread() -> AbstractContextManager[None]:
    """Run CPU work on a single thread: for many small operations, a second one costs more than it saves."""
    return cpu_threads(1)


def at_once(work: Callable[[T], R], items: Sequence[T], tensors: Iterable[Tensor]) -> list[R]:
    """Return what a function makes of each item; called in several threads, where its ``tensors`` are all on a CPU.

    The threads share the cores: a decomposition gains little from a second one, two of them gain all of it.
    """
    threads = torch.get_num_threads()
    workers = min(threads, len(items)) if all(tensor.device.type == "cpu" for tensor in tensors) else 1
    if workers < 2:
        return [work(item) for item in items]
    each = threads // workers
    with cpu_threads(each), ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(each,)) as pool:
        return list(pool.map(work, items))
