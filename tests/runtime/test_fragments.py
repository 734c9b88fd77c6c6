"""Products in tensor cores: what each thread holds of the matrices is what PTX says."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl

from gac.runtime.kernels.ptx import product
from tests.runtime.interpreted import DEVICE


@triton.jit  # type: ignore[untyped-decorator]
def _multiply(a, b, sums, out, like, COMPILED: tl.constexpr):  # type: ignore[no-untyped-def]
    """One product of each of two warps; registers lie behind each other."""
    thread = tl.arange(0, 64)
    left = (tl.load(a + thread), tl.load(a + 64 + thread), tl.load(a + 128 + thread), tl.load(a + 192 + thread))
    given = (
        tl.load(sums + thread), tl.load(sums + 64 + thread), tl.load(sums + 128 + thread), tl.load(sums + 192 + thread),
    )  # fmt: skip
    found = product(left, (tl.load(b + thread), tl.load(b + 64 + thread)), given, like.dtype.element_ty, COMPILED)
    for at in tl.static_range(4):
        tl.store(out + at * 64 + thread, found[at])


def held(matrices: Tensor, *corners: tuple[int, int]) -> Tensor:
    """Of each register what threads ``4 i + j`` hold: columns 2j and 2j + 1 of row i, from its corner on."""
    some = [matrices[:, row : row + 8, column : column + 8].reshape(-1, 2) for row, column in corners]
    return torch.stack(some).contiguous()


def multiplied(a: Tensor, b: Tensor, sums: Tensor) -> Tensor:
    """What threads hold of ``sums + a @ b.mT``, for two warps: ``(2, 64, 2)``."""
    left, right = held(a, (0, 0), (8, 0), (0, 8), (8, 8)).to(DEVICE), held(b, (0, 0), (0, 8)).to(DEVICE)
    given = held(sums, (0, 0), (8, 0)).mT.contiguous().to(DEVICE)
    out = torch.empty(2, 2, 64, device=DEVICE)
    _multiply[(1,)](left.view(torch.int32), right.view(torch.int32), given, out, left, DEVICE == "cuda", num_warps=2)
    return out.mT.cpu()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_product_is_that_of_the_matrices_that_threads_hold(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 16, 16), (2, 8, 16), (2, 16, 8)
    a, b, sums = (torch.randint(-9, 10, shape, generator=generator).float() for shape in shapes)
    found = multiplied(a.to(dtype), b.to(dtype), sums)
    assert torch.equal(found, held(sums + a @ b.mT, (0, 0), (8, 0)))


def test_whole_numbers_in_the_lowest_bits_of_float16_are_multiplied_exactly() -> None:
    """They are so many times 2^-24: less than the least normal number."""
    numbers = torch.arange(512).reshape(2, 16, 16)
    ones = torch.ones(2, 8, 16, dtype=torch.float16)
    found = multiplied(numbers.short().view(torch.float16), ones, torch.zeros(2, 16, 8))
    assert torch.equal(found * 2**24, held(numbers.sum(2, keepdim=True).expand(-1, -1, 8).float(), (0, 0), (8, 0)))
