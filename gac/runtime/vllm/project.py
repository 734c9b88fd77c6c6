"""The operator of siblings, some of them low-rank pairs: one GEMM of all that reads the input, and one a pair."""

from itertools import accumulate

import torch
from torch import Tensor
from vllm.utils.torch_utils import direct_register_custom_op


def first_rows(ranks: list[int]) -> list[int]:
    """Return the siblings in the order of their rows in the first GEMM.

    Dense siblings at the end come first. So the GEMM can write them in place: the products of first factors lie behind
    all outputs.
    """
    end = _paired(ranks)
    return [*range(end, len(ranks)), *range(end)]


def _paired(ranks: list[int]) -> int:
    """Return the number of siblings up to the last low-rank pair."""
    return max((index for index, rank in enumerate(ranks, 1) if rank), default=0)


def _project(
    x: Tensor, weight: Tensor, second: Tensor, bias: Tensor | None, ranks: list[int], sizes: list[int], strided: bool
) -> Tensor:
    """Multiply tokens by siblings.

    Args:
        x: shape ``(tokens, in)``.
        weight: first factors and dense weights, one above the other by ``first_rows``, shape ``(rows, in)``.
        second: second factors ``(size, rank)``, one after the other.
        bias: shape ``(sum(sizes),)``.
        ranks: of each sibling; 0: it is dense.
        sizes: output features of each sibling.
        strided: rows of the result may lie apart. The GEMM then writes dense outputs in place.

    Returns:
        Shape ``(tokens, sum(sizes))``.
    """
    total, direct = sum(sizes), sum(sizes[_paired(ranks) :]) if strided else 0
    buffer = x.new_empty(x.shape[0], total - direct + len(weight) if direct else total)
    products = torch.mm(x, weight.t(), out=buffer[:, total - direct :]) if direct else torch.mm(x, weight.t())
    columns = _columns(ranks, sizes)
    start = factor = 0
    for column, rank, size in zip(columns, ranks, sizes, strict=True):
        out = buffer[:, start : start + size]
        start += size
        if rank:
            matrix = second[factor : factor + size * rank].view(size, rank).t()
            torch.mm(products[:, column : column + rank], matrix, out=out)
            factor += size * rank
        elif start <= total - direct:
            out.copy_(products[:, column : column + size])
    y = buffer[:, :total]
    return y if bias is None else y.add_(bias)


def _columns(ranks: list[int], sizes: list[int]) -> list[int]:
    """Return where the products of each sibling's rows in the first GEMM begin."""
    order = first_rows(ranks)
    starts = accumulate((ranks[index] or sizes[index] for index in order), initial=0)
    columns = dict(zip(order, starts, strict=False))
    return [columns[index] for index in range(len(ranks))]


def _shape(
    x: Tensor, weight: Tensor, second: Tensor, bias: Tensor | None, ranks: list[int], sizes: list[int], strided: bool
) -> Tensor:
    total, direct = sum(sizes), sum(sizes[_paired(ranks) :]) if strided else 0
    return x.new_empty(x.shape[0], total - direct + weight.shape[0] if direct else total)[:, :total]


direct_register_custom_op("gac_project", _project, fake_impl=_shape)
project = torch.ops.vllm.gac_project
