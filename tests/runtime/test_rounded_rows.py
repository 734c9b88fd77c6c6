"""Norms and gated activations that round what they make, in Triton: the numbers of plain PyTorch, in one pass."""

import pytest
import torch
from torch import Tensor
from transformers.activations import ACT2FN

from gac.runtime import rounded_rows
from gac.runtime.eight_bits import FLOAT8
from gac.runtime.rounded_rows import Rounded, gated, normed, rounded
from gac.runtime.rows import ACTIVATIONS, NORMS
from tests.runtime.interpreted import DEVICE, operators

EPS = 1e-5
SHAPES = [(1, 1, 64), (2, 3, 576), (5, 1536)]
NUMBERS = [torch.int8, FLOAT8]

running = {"normed_rows": rounded_rows._normed_rows, "gated_rows": rounded_rows._gated_rows}


def random(*shape: int, seed: int = 0) -> Tensor:
    """With an outlier."""
    x = 2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    x.view(-1)[1] = 40
    return x.half().to(DEVICE)


def whole(*shape: int) -> Tensor:
    """Whole numbers, of whose squares every order of summing finds the same sum."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(0)).half().to(DEVICE)


def equal(found: Rounded, expected: Rounded) -> bool:
    return all(torch.equal(one.cpu().float(), other.cpu().float()) for one, other in zip(found, expected, strict=True))


def rows_of(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_norm_rounds_what_it_writes(shape: tuple[int, ...], kind: str, number: torch.dtype) -> None:
    x, weight = random(*shape), random(shape[-1], seed=1)
    with operators(**running):
        out, found = normed(x, weight, EPS, kind, number, True)
    expected = NORMS[kind](x.cpu(), weight.cpu(), EPS)
    off = (out.cpu() - expected).abs()
    assert float((off > 0).float().mean()) < 5e-3  # sums are taken in another order
    assert torch.all(off <= 2**-10 * expected.abs())
    assert equal(found, rounded(rows_of(out), number))


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_where_sums_are_exact_a_norm_is_that_of_pytorch_to_the_last_bit(
    shape: tuple[int, ...], kind: str, number: torch.dtype
) -> None:
    x, weight = whole(*shape), random(shape[-1], seed=1)
    with operators(**running):
        out, found = normed(x, weight, EPS, kind, number, False)
    expected = NORMS[kind](x, weight, EPS)
    assert out.shape == x.shape
    assert out.isnan().all()  # nobody reads it
    assert equal(found, rounded(rows_of(expected), number))


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_is_rounded_as_that_of_pytorch(shape: tuple[int, ...], kind: str, number: torch.dtype) -> None:
    """Gate and up are parts of one output, as of a shared GEMM."""
    both = random(*shape[:-1], 2 * shape[-1])
    gate, up = both.chunk(2, dim=-1)
    with operators(**running):
        out, found = gated(gate, up, kind, number)
    product = ACTIVATIONS[kind](gate.cpu()) * up.cpu()
    expected = rounded(rows_of(product).to(DEVICE), number)
    assert out.shape == up.shape
    assert out.isnan().all()
    off = (found.scale / expected.scale - 1).abs()
    assert float(off.max()) < 2**-9  # exponentials differ in the last bit
    units = (found.numbers.float() - expected.numbers.float()).abs()
    assert torch.all(units <= (1 if number == torch.int8 else 2**-3 * expected.numbers.float().abs().clamp_min(2**-6)))
    assert float((units > 0).float().mean()) < 2e-2


def test_gates_far_from_zero_are_finite() -> None:
    gate = torch.tensor([[-6e4, -90.0, -20.0, 0.0, 20.0, 90.0, 6e4, 1.0] * 2]).half().to(DEVICE)
    up = torch.ones_like(gate)
    for kind, activation in ACTIVATIONS.items():
        with operators(**running):
            _, found = gated(gate, up, kind, torch.int8)
        assert equal(found, rounded(activation(gate), torch.int8)), kind


def test_the_activations_are_those_of_transformers() -> None:
    x = torch.linspace(-9, 9, 64)
    for name, kind in (("silu", "silu"), ("gelu_pytorch_tanh", "gelu_tanh")):
        assert torch.equal(ACT2FN[name](x), ACTIVATIONS[kind](x))
