"""Operators of linear layers. Compiled graphs hold them as they are, for any number of tokens.

Siblings of which some are low-rank pairs take one GEMM of all that reads the input, and one a pair.
"""

from collections.abc import Callable
from functools import wraps
from itertools import accumulate
from typing import Any

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
    rows = x.reshape(-1, x.shape[-1])  # the Transformers backend has a batch of one
    if len(rows) > FEW_ROWS:
        return torch.nn.functional.linear(x, weight, bias)
    out = _linear_shape(x, weight, bias)
    multiply(rows, weight, out.view(-1, len(weight)), bias)
    return out


def _linear_shape(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _gated(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` ``(..., n)`` of tokens ``(..., in)``, of gate and up in one weight ``(2 n, in)``."""
    out = _gated_shape(x, weight)
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) == 1 and kernels_run(rows, weight):
        gated_row(rows, weight, out)
    else:
        torch.ops._C.silu_and_mul(out, _linear(x, weight, None))
    return out


def _gated_shape(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0] // 2)


def _operator(name: str, function: Callable[..., Tensor], shape: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Register an operator for compiled graphs. Elsewhere the function itself runs: the dispatcher is slow."""
    direct_register_custom_op(name, function, fake_impl=shape)
    registered = getattr(torch.ops.vllm, name)

    @wraps(function)
    def run(*inputs: Any) -> Tensor:
        result: Tensor = (registered if torch.compiler.is_compiling() else function)(*inputs)
        return result

    return run


project = _operator("gac_project", _project, _shape)
linear = _operator("gac_linear", _linear, _linear_shape)
gated_linear = _operator("gac_gated_linear", _gated, _gated_shape)
