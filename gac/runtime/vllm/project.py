"""Operators of linear layers. Compiled graphs hold them as they are, for any number of tokens.

Siblings of which some are low-rank pairs take one GEMM of all that reads the input, and one a pair.
"""

from itertools import accumulate

import torch
from torch import Tensor
from vllm.utils.torch_utils import direct_register_custom_op

from gac.runtime.contract import FEW_ROWS
from gac.runtime.kernels.few_rows import gated_row, kernels_run, multiply


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
    products = buffer[:, total - direct :] if direct else x.new_empty(x.shape[0], len(weight))
    multiply(x, weight, products)
    columns = _columns(ranks, sizes)
    start = factor = 0
    for column, rank, size in zip(columns, ranks, sizes, strict=True):
        out = buffer[:, start : start + size]
        start += size
        if rank:
            multiply(products[:, column : column + rank], second[factor : factor + size * rank].view(size, rank), out)
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


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply tokens ``(..., in)`` by a weight ``(out, in)``."""
    if x.dim() > 2 or len(x) > FEW_ROWS:
        return torch.nn.functional.linear(x, weight, bias)
    out = x.new_empty(len(x), len(weight))
    multiply(x, weight, out, bias)
    return out


def _linear_shape(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _gated(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` ``(..., n)`` of tokens ``(..., in)``, of gate and up in one weight ``(2 n, in)``."""
    out = _gated_shape(x, weight)
    if x.dim() == 2 and len(x) == 1 and kernels_run(x, weight):
        gated_row(x, weight, out)
    else:
        torch.ops._C.silu_and_mul(out, _linear(x, weight, None))
    return out


def _gated_shape(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0] // 2)


direct_register_custom_op("gac_project", _project, fake_impl=_shape)
direct_register_custom_op("gac_linear", _linear, fake_impl=_linear_shape)
direct_register_custom_op("gac_gated_linear", _gated, fake_impl=_gated_shape)
project, linear, gated_linear = torch.ops.vllm.gac_project, torch.ops.vllm.gac_linear, torch.ops.vllm.gac_gated_linear
