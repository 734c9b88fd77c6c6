"""Kernels between the GEMMs of an engine's layer in Triton: the numbers of plain PyTorch."""

import pytest
import torch
from torch import Tensor

from gac.runtime.kernels.elementwise.engine import add_norm, apply_rotary, gate, write_to_pages
from gac.runtime.kernels.elementwise.rows import NORMS, plainly_rotated
from tests.runtime.interpreted import DEVICE


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half().to(DEVICE)


def by_head(x: Tensor, size: int) -> Tensor:
    return x.reshape(1, len(x), -1, size).transpose(1, 2)


@pytest.mark.parametrize(("heads", "size"), [((4, 4), 8), ((9, 3), 80), ((33, 1), 128)])
def test_heads_are_rotated_in_place_by_their_positions(heads: tuple[int, int], size: int) -> None:
    """Queries, keys and values are parts of one output; the values stay."""
    both = random(3, (sum(heads) + 1) * size)
    before = both.clone()
    angles, positions = random(7, size, seed=1), torch.tensor([5, 0, 6], device=DEVICE)
    q, k, v = both.split([heads[0] * size, heads[1] * size, size], dim=1)
    apply_rotary(positions, q, k, angles, size)
    cos, sin = (torch.cat((half, half), dim=1)[None] for half in angles[positions].chunk(2, dim=1))
    old_q, old_k, old_v = before.split([heads[0] * size, heads[1] * size, size], dim=1)
    wide = (each.float() for each in (by_head(old_q, size), by_head(old_k, size), cos, sin))
    for rotated, expected in zip((q, k), plainly_rotated(*wide), strict=True):
        torch.testing.assert_close(by_head(rotated, size), expected.half(), rtol=2**-10, atol=2**-14)
    assert torch.equal(v, old_v)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)])  # heads within tokens, and tokens within heads
def test_keys_and_values_are_written_to_their_slots(order: tuple[int, ...]) -> None:
    heads, size, page = 3, 20, 4
    shape = (5, page, heads, 2 * size)
    cache = random(*(shape[axis] for axis in order)).permute(order)
    keys, values = cache.chunk(2, dim=-1)
    expected = cache.clone()
    both = random(4, 2 * heads * size, seed=1)
    k, v = (half.view(4, heads, size) for half in both.chunk(2, dim=1))
    slots = torch.tensor([18, -1, 3], device=DEVICE)  # of four tokens, the last of which only fills the batch
    write_to_pages(k, v, keys, values, slots)
    for token, slot in ((0, 18), (2, 3)):
        expected[slot // page, slot % page] = torch.cat((k[token], v[token]), dim=-1)
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("size", [48, 1500])
def test_a_norm_adds_to_the_residual_stream(size: int) -> None:
    x, residual, weight = random(3, size), random(3, size, seed=1), random(size, seed=2)
    expected = x + residual
    add_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, expected)
    torch.testing.assert_close(x, NORMS["llama"](expected, weight, 1e-5), rtol=2**-9, atol=2**-14)


def test_gate_and_up_are_halves_of_a_row() -> None:
    x, out = random(2, 2 * 2500), random(2, 2500, seed=1)
    gate(x, out)
    expected = torch.nn.functional.silu(x[:, :2500]) * x[:, 2500:]
    torch.testing.assert_close(out, expected, rtol=2**-9, atol=2**-14)
