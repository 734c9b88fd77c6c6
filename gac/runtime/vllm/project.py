"""Operators of linear layers. Compiled graphs hold them as they are, for any number of tokens.

Siblings of which some are low-rank pairs take one GEMM of all that reads the input, and one a pair.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from vllm.utils.torch_utils import direct_register_custom_op

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
        total: columns of the result.
        direct: of these, the last ones that the first GEMM writes in place.
        pairs: the low-rank ones.
        copies: by dense sibling that is copied: its column in the first GEMM, its column in the result, its outputs.
    """

    total: int
    direct: int
    pairs: tuple[SecondFactor, ...]
    copies: tuple[tuple[int, int, int], ...]


@cache
def _layout(ranks: tuple[int, ...], sizes: tuple[int, ...], strided: bool) -> _Layout:
    order, paired = first_rows(ranks), _paired(ranks)
    columns = dict(zip(order, accumulate((ranks[i] or sizes[i] for i in order), initial=0), strict=False))
    starts = tuple(accumulate(sizes, initial=0))
    factors = tuple(accumulate((rank * size for rank, size in zip(ranks, sizes, strict=True)), initial=0))
    pairs = (SecondFactor(ranks[i], sizes[i], columns[i], starts[i], factors[i]) for i in range(len(ranks)) if ranks[i])
    copied = range(paired if strided else len(ranks))
    copies = ((columns[i], starts[i], sizes[i]) for i in copied if not ranks[i])
    return _Layout(starts[-1], sum(sizes[paired:]) if strided else 0, tuple(pairs), tuple(copies))


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
    if len(ranks) == 1 and len(x) > FEW_ROWS:  # the fewest calls: launches of small models take longer than their GEMMs
        return _gemm(_gemm(x, weight), second.view(sizes[0], ranks[0]), bias)
    layout = _layout(tuple(ranks), tuple(sizes), strided)
    buffer = _buffer(x, weight, layout)
    products = buffer[:, layout.total - layout.direct :] if layout.direct else x.new_empty(len(x), len(weight))
    multiply(x, weight, products)
    multiply_factors(products, layout.pairs, second, buffer)
    for column, start, size in layout.copies:
        buffer.narrow(1, start, size).copy_(products.narrow(1, column, size))
    y = buffer[:, : layout.total]
    return y if bias is None else y.add_(bias)


def _buffer(x: Tensor, weight: Tensor, layout: _Layout) -> Tensor:
    """Return room for the result, with the products of first factors behind it where the GEMM writes in place."""
    return x.new_empty(x.shape[0], layout.total - layout.direct + weight.shape[0] if layout.direct else layout.total)


def _shape(
    x: Tensor, weight: Tensor, second: Tensor, bias: Tensor | None, ranks: list[int], sizes: list[int], strided: bool
) -> Tensor:
    layout = _layout(tuple(ranks), tuple(sizes), strided)
    return _buffer(x, weight, layout)[:, : layout.total]


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply tokens ``(..., in)`` by a weight ``(out, in)``."""
    if x.numel() > FEW_ROWS * x.shape[-1]:
        return _gemm(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])  # the Transformers backend has a batch of one
    out = _linear_shape(x, weight, bias)
    multiply(rows, weight, out.view(-1, len(weight)), bias)
    return out


def _linear_shape(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _gated(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` ``(..., n)`` of tokens ``(..., in)``, of gate and up in one weight ``(2 n, in)``."""
    if x.numel() == x.shape[-1] and kernels_run(row := x.reshape(1, -1), weight):
        gated_row(row, weight, out := _gated_shape(x, weight))
        return out
    if gates_many(x, weight):
        gated_gemm(x, weight, out := _gated_shape(x, weight))
        return out
    both, out = _linear(x, weight, None), _gated_shape(x, weight)
    silu_and_mul(both.view(-1, both.shape[-1]), out.view(-1, out.shape[-1]))
    return out


def _gated_shape(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0] // 2)


def _operator(name: str, function: Callable[..., Tensor], shape: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Register an operator for compiled graphs. Elsewhere the function itself runs: the dispatcher is slow."""
    direct_register_custom_op(name, function, fake_impl=shape)
    registered, is_compiling = getattr(torch.ops.vllm, name), torch.compiler.is_compiling

    @wraps(function)
    def run(*inputs: Any) -> Tensor:
        result: Tensor = (registered if is_compiling() else function)(*inputs)
        return result

    return run


project = _operator("gac_project", _project, _shape)
linear = _operator("gac_linear", _linear, _linear_shape)
gated_linear = _operator("gac_gated_linear", _gated, _gated_shape)
