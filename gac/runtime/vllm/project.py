"""Products of linear layers.

Siblings of which some are low-rank pairs take one GEMM of all that reads the input, and one a pair.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import torch
from torch import Tensor

from gac.runtime.contract import FEW_ROWS
from gac.runtime.kernels.few_rows import SecondFactor, gated_row, kernels_run, multiply, multiply_factors
from gac.runtime.kernels.gated import gated_gemm, gates_many
from gac.runtime.vllm.elementwise import silu_and_mul

_gemm = torch.nn.functional.linear


def first_rows(ranks: Sequence[int]) -> list[int]:
    """Return the siblings in the order of their rows in the first GEMM.

    Dense siblings at the end come first. So the GEMM can write them in place: the products of first factors lie behind
    all outputs.
    """
    end = _paired(ranks)
    return [*range(end, len(ranks)), *range(end)]


def _paired(ranks: Sequence[int]) -> int:
    """Return the number of siblings up to the last low-rank pair."""
    return max((index for index, rank in enumerate(ranks, 1) if rank), default=0)


@dataclass(frozen=True)
class _Layout:
    """Columns of siblings in the first GEMM and in the result.

    Attributes:
        direct: columns of the result, the last ones, that the first GEMM writes in place.
        pairs: the low-rank ones.
        copies: by dense sibling that is copied: its column in the first GEMM, its column in the result, its outputs.
    """

    direct: int
    pairs: tuple[SecondFactor, ...]
    copies: tuple[tuple[int, int, int], ...]


def width_in_place(ranks: Sequence[int], sizes: Sequence[int]) -> int:
    """Return the numbers of a row that has room for the result, and for the first GEMM where it writes in place."""
    paired = _paired(ranks)
    rows = sum(rank or size for rank, size in zip(ranks, sizes, strict=True))
    return sum(sizes[:paired]) + (rows if paired < len(ranks) else 0)


@cache
def _layout(ranks: tuple[int, ...], sizes: tuple[int, ...], in_place: bool) -> _Layout:
    order, paired = first_rows(ranks), _paired(ranks)
    columns = dict(zip(order, accumulate((ranks[i] or sizes[i] for i in order), initial=0), strict=False))
    starts = tuple(accumulate(sizes, initial=0))
    factors = tuple(accumulate((rank * size for rank, size in zip(ranks, sizes, strict=True)), initial=0))
    pairs = (SecondFactor(ranks[i], sizes[i], columns[i], starts[i], factors[i]) for i in range(len(ranks)) if ranks[i])
    copied = range(paired if in_place else len(ranks))
    copies = ((columns[i], starts[i], sizes[i]) for i in copied if not ranks[i])
    return _Layout(sum(sizes[paired:]) if in_place else 0, tuple(pairs), tuple(copies))


def project(
    x: Tensor,
    weight: Tensor,
    second: Tensor,
    bias: Tensor | None,
    ranks: Sequence[int],
    sizes: Sequence[int],
    width: int,
) -> Tensor:
    """Multiply tokens by siblings.

    Args:
        x: shape ``(tokens, in)``.
        weight: first factors and dense weights, one above the other by ``first_rows``, shape ``(rows, in)``.
        second: second factors ``(size, rank)``, one after the other.
        bias: shape ``(sum(sizes),)``.
        ranks: of each sibling; 0: it is dense.
        sizes: output features of each sibling.
        width: of the result's rows in memory: ``sum(sizes)``, or from ``width_in_place`` on. The first GEMM then writes
            dense outputs in place.

    Returns:
        Shape ``(tokens, sum(sizes))``.
    """
    if len(ranks) == 1 and len(x) > FEW_ROWS:  # the fewest calls: launches of small models take longer than their GEMMs
        return _gemm(_gemm(x, weight), second.view(sizes[0], ranks[0]), bias)
    total = sum(sizes)
    layout = _layout(tuple(ranks), tuple(sizes), width > total)
    buffer = x.new_empty(len(x), width)
    if layout.direct:
        products = buffer.narrow(1, total - layout.direct, len(weight))
    else:
        products = x.new_empty(len(x), len(weight))
    multiply(x, weight, products)
    multiply_factors(products, layout.pairs, second, buffer)
    for column, start, size in layout.copies:
        buffer.narrow(1, start, size).copy_(products.narrow(1, column, size))
    y = buffer[:, :total]
    return y if bias is None else y.add_(bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply tokens ``(..., in)`` by a weight ``(out, in)``."""
    if x.numel() > FEW_ROWS * x.shape[-1]:
        return _gemm(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])  # the Transformers backend has a batch of one
    out = x.new_empty(*x.shape[:-1], len(weight))
    multiply(rows, weight, out.view(-1, len(weight)), bias)
    return out


def gated_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` ``(..., n)`` of tokens ``(..., in)``, of gate and up in one weight ``(2 n, in)``."""
    out = x.new_empty(*x.shape[:-1], len(weight) // 2)
    if x.numel() == x.shape[-1] and kernels_run(row := x.reshape(1, -1), weight):
        gated_row(row, weight, out)
    elif gates_many(x, weight):
        gated_gemm(x, weight, out)
    else:
        both = linear(x, weight, None)
        silu_and_mul(both.view(-1, both.shape[-1]), out.view(-1, out.shape[-1]))
    return out
