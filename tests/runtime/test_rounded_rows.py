"""Norms that round what they make, in Triton: the numbers of plain PyTorch, in one pass."""

import pytest
import torch
from torch import Tensor

from gac.runtime.kernels import quantise_rows as rounded_rows
from gac.runtime.kernels.elementwise.rows import NORMS
from gac.runtime.kernels.quantise_rows import QuantisedRows, norm_quantised, quantise_rows
from tests.runtime.interpreted import DEVICE, operators

EPS = 1e-5
SHAPES = [(1, 1, 64), (2, 3, 576), (5, 1536)]
NUMBERS = [torch.int8, torch.float8_e4m3fn]

running = {"normed_rows": rounded_rows._normed_rows}


def random(*shape: int, seed: int = 0) -> Tensor:
    """With an outlier."""
    x = 2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    x.view(-1)[1] = 40
    return x.half().to(DEVICE)


def whole(*shape: int) -> Tensor:
    """Whole numbers, of whose squares every order of summing finds the same sum."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(0)).half().to(DEVICE)


def equal(found: QuantisedRows, expected: QuantisedRows) -> bool:
    return all(torch.equal(one.cpu().float(), other.cpu().float()) for one, other in zip(found, expected, strict=True))


def rows_of(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_norm_rounds_what_it_writes(shape: tuple[int, ...], kind: str, number: torch.dtype) -> None:
    x, weight = random(*shape), random(shape[-1], seed=1)
    with operators(**running):
        out, found = norm_quantised(x, weight, EPS, kind, number, True)
    expected = NORMS[kind](x.cpu(), weight.cpu(), EPS)
    off = (out.cpu() - expected).abs()
    assert float((off > 0).float().mean()) < 5e-3  # sums are taken in another order
    assert torch.all(off <= 2**-10 * expected.abs())
    assert equal(found, quantise_rows(rows_of(out), number))


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_where_sums_are_exact_a_norm_is_that_of_pytorch_to_the_last_bit(
    shape: tuple[int, ...], kind: str, number: torch.dtype
) -> None:
    x, weight = whole(*shape), random(shape[-1], seed=1)
    with operators(**running):
        out, found = norm_quantised(x, weight, EPS, kind, number, False)
    expected = NORMS[kind](x, weight, EPS)
    assert out.shape == x.shape
    assert out.isnan().all()  # nobody reads it
    assert equal(found, quantise_rows(rows_of(expected), number))
