"""Norms, gated activations, rotary embeddings and quantised rows in Triton: the numbers of plain PyTorch."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from gac.runtime.kernels.elementwise.rows import (
    ACTIVATIONS,
    NORMS,
    gated,
    normed,
    plainly_rotated,
    rotated,
    rotated_heads,
    write_to_cache,
)
from gac.runtime.kernels.quantise_rows import QuantisedRows, norm_quantised, normed_rows, quantise_rows
from tests.runtime.interpreted import DEVICE, operators

EPS = 1e-5
SHAPES = [(1, 1, 64), (2, 2500)]
NUMBERS = [torch.int8, torch.float8_e4m3fn]


@pytest.fixture(autouse=True)
def _running() -> Iterator[None]:
    with operators(normed, gated, rotated_heads, write_to_cache, normed_rows):
        yield


def random(*shape: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half().to(DEVICE)


def whole_numbers(*shape: int) -> Tensor:
    """Of whose squares every order of summing finds the same sum."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(0)).half().to(DEVICE)


def is_normed(out: Tensor, x: Tensor, weight: Tensor, kind: str) -> bool:
    """Whether numbers are those of PyTorch, but for sums that are taken in another order."""
    expected = NORMS[kind](x, weight, EPS)
    off = (out - expected).abs()
    return float((off > 0).float().mean()) < 5e-3 and bool(torch.all(off <= 2**-10 * expected.abs()))


def equal(found: QuantisedRows, expected: QuantisedRows) -> bool:
    return all(torch.equal(one.float(), other.float()) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_norm(shape: tuple[int, ...], kind: str) -> None:
    x, weight = random(*shape), random(shape[-1], seed=1)
    assert is_normed(normed(x, weight, EPS, kind), x, weight, kind)


@pytest.mark.parametrize("kind", NORMS)
def test_where_sums_are_exact_a_norm_is_that_of_pytorch_to_the_last_bit(kind: str) -> None:
    x = whole_numbers(3, 4, 48)
    weight = random(48, seed=1)
    apart = torch.cat((x, x), dim=-1)[..., :48]  # rows that lie apart
    assert torch.equal(normed(apart, weight, EPS, kind), NORMS[kind](x, weight, EPS))


@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_product(shape: tuple[int, ...], kind: str) -> None:
    """Gate and up are parts of one output, as of a shared GEMM."""
    gate, up = random(*shape[:-1], 2 * shape[-1]).chunk(2, dim=-1)
    out = gated(gate, up, kind)
    expected = ACTIVATIONS[kind](gate) * up
    assert out.is_contiguous()
    assert float((out != expected).float().mean()) < 3e-2  # exponentials differ in the last bit
    assert torch.all((out - expected).abs() <= 2**-9 * expected.abs() + 2**-20)  # PyTorch subtracts near zero


def test_gates_far_from_zero_are_finite() -> None:
    gate = torch.tensor([[-6e4, -90.0, -20.0, 0.0, 20.0, 90.0, 6e4, 1.0] * 2]).half().to(DEVICE)
    for kind, activation in ACTIVATIONS.items():
        assert torch.allclose(gated(gate, torch.ones_like(gate), kind), activation(gate), atol=2**-20), kind


@pytest.mark.parametrize(("heads", "size", "angles"), [((4, 4), 8, 1), ((9, 3), 80, 2), ((5, 1), 128, 1)])
def test_heads_are_rotated_as_by_pytorch_to_the_last_bit(heads: tuple[int, int], size: int, angles: int) -> None:
    """Queries and keys are parts of one output."""
    both = random(2, 3, sum(heads) * size)
    q, k = (one.view(2, 3, -1, size).transpose(1, 2) for one in both.split([size * one for one in heads], dim=-1))
    cos, sin = random(angles, 3, size, seed=1) / 8, random(angles, 3, size, seed=2) / 8
    for one, other in zip(rotated(q, k, cos, sin), plainly_rotated(q, k, cos, sin), strict=True):
        assert torch.equal(one, other)
        assert one.transpose(1, 2).is_contiguous()  # as the cache takes them


def test_float32_angles_round_once_and_gradients_are_those_of_pytorch() -> None:
    q, k = (random(2, heads, 3, 8, seed=heads).requires_grad_() for heads in (4, 2))
    cos, sin = (random(1, 3, 8, seed=seed).float() / 8 for seed in (3, 4))
    found = rotated(q, k, cos, sin)
    by = [random(*one.shape, seed=5) for one in found]
    gradients = torch.autograd.grad(found, (q, k), by)
    wide = [one.detach().float().requires_grad_() for one in (q, k)]
    expected = plainly_rotated(*wide, cos, sin)
    due = torch.autograd.grad(expected, wide, [one.float() for one in by])
    for one, other in zip((*found, *gradients), (*expected, *due), strict=True):
        assert one.dtype == torch.float16
        torch.testing.assert_close(one.float(), other, rtol=2**-11, atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 3])
def test_new_tokens_go_behind_those_that_there_are(tokens: int) -> None:
    """Values are shorter than keys, and both are parts of one output."""
    both = random(2, tokens, 4 * (16 + 10))
    k, v = (one.view(2, tokens, 4, -1).transpose(1, 2) for one in both.split([64, 40], dim=-1))
    keys, values = random(2, 4, 9, 16, seed=1), random(2, 4, 9, 10, seed=2)
    expected = [one.clone() for one in (keys, values)]
    for cached, new in zip(expected, (k, v), strict=True):
        cached[:, :, 5 : 5 + tokens] = new
    length = torch.tensor([3, 5], device=DEVICE)[1]
    write_to_cache(k, v, keys, values, length)
    assert all(map(torch.equal, (keys, values), expected))
    assert int(length) == 5


def test_a_token_without_room_is_seen() -> None:
    keys, values = random(1, 2, 4, 8), random(1, 2, 4, 8, seed=1)
    write_to_cache(random(1, 2, 1, 8), random(1, 2, 1, 8), keys, values, torch.tensor(4, device=DEVICE))
    assert keys[:, :, 0].isnan().all()
    assert values[:, :, 0].isnan().all()
    assert keys[:, :, 1:].isfinite().all()


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("kind", NORMS)
def test_a_norm_rounds_what_it_writes(kind: str, number: torch.dtype) -> None:
    x, weight = random(2, 3, 576), random(576, seed=1)
    x.view(-1)[1] = 40  # an outlier
    out, found = norm_quantised(x, weight, EPS, kind, number, True)
    assert is_normed(out, x, weight, kind)
    assert equal(found, quantise_rows(out.flatten(0, -2), number))


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("kind", NORMS)
def test_a_quantising_norm_whose_sums_are_exact_is_that_of_pytorch(kind: str, number: torch.dtype) -> None:
    x, weight = whole_numbers(2, 3, 576), random(576, seed=1)
    out, found = norm_quantised(x, weight, EPS, kind, number, False)
    expected = NORMS[kind](x, weight, EPS)
    assert out.shape == x.shape
    assert out.isnan().all()  # nobody reads it
    assert equal(found, quantise_rows(expected.flatten(0, -2), number))
