"""Heads in a storage: few inputs are multiplied as the head lies, in one kernel; many with some rows at a time."""

from typing import Any

import pytest
import torch
from torch import nn

from gac.runtime.kernels import low_bit as few_bits
from gac.runtime.kernels.low_bit import MOST_ROWS
from gac.runtime.storage import embeddings as ends
from gac.runtime.storage import packed
from gac.runtime.storage.embeddings import StoredEmbedding, StoredHead, TiedHead
from gac.schemes import scheme_named
from gac.schemes.base import storage_of
from tests.runtime.interpreted import DEVICE, operators, small_gpu

ROWS, COLUMNS = 96, 64


@pytest.fixture
def products(kernels_anywhere: None, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of the weight of every product in a kernel; pieces of heads have 32 rows."""
    small_gpu(monkeypatch)
    found: list[int] = []

    def linear(x: torch.Tensor, *operands: Any) -> torch.Tensor:
        found.append(len(operands[0]))
        return few_bits.few_bits_linear.__wrapped__(x, *operands)

    monkeypatch.setattr(packed, "few_bits_linear", linear)
    monkeypatch.setattr(ends, "HEAD_ROWS", 32)
    return found


@pytest.mark.parametrize(
    ("given", "pieces", "tied"),
    [(1, [ROWS], False), (MOST_ROWS, [ROWS], True), *((MOST_ROWS + 1, [32] * 3, tied) for tied in (False, True))],
)
def test_few_inputs_are_multiplied_in_one_kernel(
    products: list[int], given: int, pieces: list[int], tied: bool
) -> None:
    scheme = scheme_named("w8a16")
    generator = torch.Generator().manual_seed(0)
    numbers = scheme.stored(torch.randn(ROWS, COLUMNS, generator=generator).half())
    storage = storage_of(scheme)
    assert storage is not None
    plain = nn.Linear(COLUMNS, ROWS, dtype=torch.float16)
    head: Any = StoredHead(storage, plain)
    holder = head
    if tied:
        holder = StoredEmbedding(storage, nn.Embedding(ROWS, COLUMNS, dtype=torch.float16))
        head = TiedHead(holder, plain)
    holder.fill(numbers)
    holder, head = holder.to(DEVICE), head.to(DEVICE)
    x = torch.randn(1, given, COLUMNS, generator=generator).half().to(DEVICE)
    with operators(few_bits.few_bits_linear, few_bits.few_bits_written), torch.no_grad():
        found = head(x)
        expected = x.float() @ holder.values(torch.float16).float().T + plain.bias.float().to(DEVICE)
    assert products == pieces
    assert torch.linalg.norm(found.float() - expected) < 2e-3 * torch.linalg.norm(expected)
