"""GEMMs of 8 bits on a GPU: a Triton kernel multiplies inputs that another one has rounded.

PyTorch multiplies many rows in 8-bit floating point. Triton is imported when a kernel first runs.
"""

import torch
from torch import Tensor

from gac.runtime.kernels.gpu import launching_on, make_operator
from gac.runtime.kernels.guard import jit, tl
from gac.runtime.kernels.quantise_rows import QuantisedRows, quantise_rows
from gac.runtime.kernels.split_k import SplitK, Tile, split_k_reduce, tile_for
from gac.runtime.limits import eight_bits

MOST_ROWS = 64
"""Rows of the input that are multiplied in the kernel; more rows of 8-bit floating point in PyTorch."""
_TILES = {
    16: Tile(16, 64, 256, 4, 4), 32: Tile(32, 64, 256, 4, 3), MOST_ROWS: Tile(64, 64, 256, 4, 3),
    128: Tile(128, 128, 128, 4, 3),
}  # fmt: skip
"""By the most rows; the last for more, too."""
_CAPABILITY = {torch.int8: (8, 0), torch.float8_e4m3fn: (9, 0)}


def gemm_unsupported_reason(number: torch.dtype, device: torch.device, rows: int, columns: int) -> str | None:
    """Why there is no such GEMM for a weight ``(rows, columns)`` on that GPU; None where there is."""
    properties = torch.cuda.get_device_properties(device)
    if (properties.major, properties.minor) < _CAPABILITY[number]:
        return f"no GEMM multiplies {str(number).removeprefix('torch.')} on this GPU ({properties.name})"
    return eight_bits(rows, columns)


def linear(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """``x @ (weight * scale).T`` for x ``(..., columns)`` of 16 bits, rounded token by token as the weight is.

    Args:
        weight: int8 or float8_e4m3fn, ``(rows, columns)``.
        scale: 16 bits, ``(rows, 1)``.
    """
    y: Tensor = torch.ops.gac.eight_bits_linear(x, weight, scale)
    return y


def linear_of_quantised(x: QuantisedRows, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The same of inputs that are rounded already, ``(rows, rows of the weight)`` in that dtype."""
    y: Tensor = torch.ops.gac.eight_bits_linear_of(*x, weight, scale, dtype)
    return y


def gemm(x: QuantisedRows, weight: Tensor, scale: Tensor, dtype: torch.dtype, how: Tile | None = None) -> Tensor:
    """``linear_of_quantised`` in one launch of the kernel, for any number of rows.

    Where tiles are few, several programs share each, every one with a part of the columns.
    """
    (rows, columns), outputs = x.numbers.shape, len(weight)
    how = how or tile_for(rows, _TILES)
    how = how.fitted(how.numbers * (how.rows + how.outputs), weight.device)
    sums = torch.int32 if weight.dtype == torch.int8 else torch.float32
    sharing = SplitK.of(how, rows, outputs, columns, weight, sums, x.counters)
    out = weight.new_empty(rows, outputs, dtype=dtype)
    with launching_on(weight):
        gemm_kernel[(how.count(rows, outputs), sharing.split)](
            x.numbers, x.scale, weight, scale, out, sharing.sums, sharing.counters, rows, outputs, columns,
            ROWS=how.rows, OUTPUTS=how.outputs, NUMBERS=how.numbers, EVEN=columns % how.numbers == 0,
            SPLIT=sharing.split, STAGES=how.stages, num_warps=how.warps,
        )  # fmt: skip
    return out


def _linear_of(
    numbers: Tensor, local: Tensor, counters: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype
) -> Tensor:
    if weight.dtype == torch.int8 or len(numbers) <= MOST_ROWS:
        return gemm(QuantisedRows(numbers, local, counters), weight, scale, dtype)
    by_row = scale.float().t()
    return torch._scaled_mm(numbers, weight.t(), local, by_row, out_dtype=torch.bfloat16).to(dtype)


def _linear(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    inputs = x.reshape(-1, x.shape[-1]).contiguous()
    y = _linear_of(*quantise_rows(inputs, weight.dtype), weight, scale, x.dtype)
    return y.view(*x.shape[:-1], len(weight))


make_operator(
    "eight_bits_linear",
    "(Tensor x, Tensor weight, Tensor scale) -> Tensor",
    _linear,
    lambda x, weight, _scale: x.new_empty(*x.shape[:-1], len(weight)),
)
make_operator(
    "eight_bits_linear_of",
    "(Tensor numbers, Tensor own, Tensor counters, Tensor weight, Tensor scale, ScalarType dtype) -> Tensor",
    _linear_of,
    lambda numbers, _own, _counters, weight, _scale, dtype: numbers.new_empty(len(numbers), len(weight), dtype=dtype),
)


# The Triton kernel of GEMMs of 8 bits: launched by ``gac.runtime.kernels.int8_fp8``.

_BESIDE = tl.constexpr(8)  # tiles of outputs whose programs run at the same time, so that L2 holds what they read
_EXACT = tl.constexpr(128)  # products of 8-bit floating point that a tensor core adds up before float32 does


@jit(do_not_specialize=["m"])
def gemm_kernel(
    x, scale, weight, of_weight, out, sums, counters, m, n, size,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, NUMBERS: tl.constexpr, EVEN: tl.constexpr,
    SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``weight @ x.T``, times both scales. Tiles of _BESIDE outputs take all rows before the next ones come."""
    high, wide = tl.cdiv(m, ROWS), tl.cdiv(n, OUTPUTS)
    tile = tl.program_id(0)
    first = tile // (_BESIDE * high) * _BESIDE
    extra = tl.minimum(wide - first, _BESIDE)
    column = (first + tile % (_BESIDE * high) % extra) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tile % (_BESIDE * high) // extra * ROWS + tl.arange(0, ROWS)
    offsets = tl.arange(0, NUMBERS)
    weights = weight + tl.minimum(column, n - 1).to(tl.int64)[:, None] * size + offsets[None, :]
    inputs = x + tl.minimum(row, m - 1).to(tl.int64)[:, None] * size + offsets[None, :]
    full: tl.constexpr = weight.dtype.element_ty == tl.int8
    total = tl.zeros((OUTPUTS, ROWS), tl.int32 if full else tl.float32)
    for start in tl.range(tl.program_id(1) * NUMBERS, size, SPLIT * NUMBERS, num_stages=STAGES):
        there = True if EVEN else (start + offsets < size)[None, :]
        values_in = tl.load(inputs + start, mask=there, other=0.0)
        taken = tl.load(weights + start, mask=there, other=0.0)
        if full:
            total = tl.dot(taken, tl.trans(values_in), total, out_dtype=tl.int32)
        else:
            exact: tl.constexpr = _EXACT if _EXACT < NUMBERS else NUMBERS
            total = tl.dot(taken, tl.trans(values_in), total, max_num_imprecise_acc=exact)
    total, last = split_k_reduce(total, sums, counters, tile, tl.program_id(1), SPLIT)
    of_row = tl.load(scale + row, mask=row < m, other=0.0)
    of_column = tl.load(of_weight + column, mask=column < n, other=0.0).to(tl.float32)
    result = tl.trans(total.to(tl.float32) * of_row[None, :] * of_column[:, None]).to(out.dtype.element_ty)
    place = row.to(tl.int64)[:, None] * n + column[None, :]
    tl.store(out + place, result, mask=(row < m)[:, None] & (column < n)[None, :] & last)
