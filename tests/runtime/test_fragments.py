"""Products in tensor cores: what each thread holds of the matrices is what PTX says."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl

from gac.runtime.fragments import product
from tests.runtime.interpreted import DEVICE


@triton.jit  # type: ignore[untyped-decorator]
def _multiply(a, b, sums, out, COMPILED: tl.constexpr):  # type: ignore[no-untyped-def]
    """One product for each of two warps; registers lie behind each other."""
    thread = tl.arange(0, 64)
    left = (tl.load(a + thread), tl.load(a + 64 + thread), tl.load(a + 128 + thread), tl.load(a + 192 + thread))
    given = (
        tl.load(sums + thread), tl.load(sums + 64 + thread), tl.load(sums + 128 + thread), tl.load(sums + 192 + thread),
    )  # fmt: skip
    found = product(left, (tl.load(b + thread), tl.load(b + 64 + thread)), given, out.dtype.element_ty, COMPILED)
    for at in tl.static_range(4):
        tl.store(out + at * 64 + thread, found[at].to(out.dtype.element_ty))


def held(matrices: Tensor, rows: list[int], columns: list[int]) -> Tensor:
    """Of each register, at such a first row and column, what threads ``4 i + j`` hold at row i and column 2j."""
    found = [
        matrices[:, row : row + 8, column : column + 8].reshape(len(matrices), 32, 2)
        for row, column in zip(rows, columns, strict=True)
    ]
    return torch.stack(found).contiguous()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_product_is_that_of_the_matrices_that_threads_hold(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b, sums = (
        torch.randint(-4, 5, shape, generator=generator).to(dtype) for shape in ((2, 16, 16), (2, 8, 16), (2, 16, 8))
    )
    left = held(a, [0, 8, 0, 8], [0, 0, 8, 8]).to(DEVICE).view(torch.int32)
    right = held(b, [0, 0], [0, 8]).to(DEVICE).view(torch.int32)
    given = held(sums, [0, 8], [0, 0]).permute(0, 3, 1, 2).float().contiguous().to(DEVICE)
    out = torch.empty(4, 64, dtype=dtype, device=DEVICE)
    _multiply[(1,)](left, right, given, out, COMPILED=DEVICE == "cuda", num_warps=2)
    expected = held(sums + a @ b.mT, [0, 8], [0, 0]).permute(0, 3, 1, 2).reshape(4, 64)
    assert torch.equal(out.cpu(), expected)


def test_numbers_below_the_least_normal_one_are_multiplied_exactly() -> None:
    """Whole numbers in the lowest bits of float16 are so many times 2^-24."""
    numbers = torch.arange(256).short().view(torch.float16).reshape(1, 16, 16).repeat(2, 1, 1)
    ones = torch.full((2, 8, 16), 1024.0, dtype=torch.float16)
    left = held(numbers, [0, 8, 0, 8], [0, 0, 8, 8]).to(DEVICE).view(torch.int32)
    right = held(ones, [0, 0], [0, 8]).to(DEVICE).view(torch.int32)
    out = torch.empty(4, 64, device=DEVICE)
    _multiply_wide[(1,)](left, right, out, COMPILED=DEVICE == "cuda", num_warps=2)
    expected = torch.arange(256.0).reshape(16, 16).sum(1) * 2.0**-14
    assert torch.equal(out[0].cpu()[:32], expected[:8].repeat_interleave(4))
    assert torch.equal(out[2].cpu()[:32], expected[8:].repeat_interleave(4))


@triton.jit  # type: ignore[untyped-decorator]
def _multiply_wide(a, b, out, COMPILED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The same in float16, from sums of nothing to float32."""
    thread = tl.arange(0, 64)
    left = (tl.load(a + thread), tl.load(a + 64 + thread), tl.load(a + 128 + thread), tl.load(a + 192 + thread))
    nothing = tl.zeros((64,), tl.float32)
    right = (tl.load(b + thread), tl.load(b + 64 + thread))
    found = product(left, right, (nothing, nothing, nothing, nothing), tl.float16, COMPILED)
    for at in tl.static_range(4):
        tl.store(out + at * 64 + thread, found[at])
