"""GEMMs of 8 bits on a GPU: a Triton kernel rounds the inputs, and PyTorch multiplies what it wrote.

It finds what ``gac.runtime.rounded_inputs`` finds. Triton is imported when it first runs.
"""

import torch
from torch import Tensor

from .gpu import ceil_div, launching_on, make_operator

_MOST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_LEAST_ROWS = 32
"""Rows of an input of whole numbers, filled up where they are fewer: PyTorch multiplies no fewer than 17."""
_WIDEST = 2**16  # a program holds a row
_AT_ONCE = 1024
_SIDE = 16
_CAPABILITY = {torch.int8: (8, 0), torch.float8_e4m3fn: (9, 0)}


def unread(number: torch.dtype, device: torch.device, rows: int, columns: int) -> str | None:
    """Why PyTorch has no such GEMM for a weight ``(rows, columns)`` on that GPU; None where it has."""
    properties = torch.cuda.get_device_properties(device)
    if (properties.major, properties.minor) < _CAPABILITY[number]:
        return f"PyTorch multiplies no {str(number).removeprefix('torch.')} on this GPU ({properties.name})"
    if rows % _SIDE or columns % _SIDE or not 0 < columns <= _WIDEST:
        return f"a weight is {rows} x {columns}, not multiples of {_SIDE} with at most {_WIDEST} columns"
    return None


def linear(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """``x @ (weight * scale).T`` for x ``(..., columns)`` of 16 bits, rounded token by token as the weight is.

    Args:
        weight: int8 or float8_e4m3fn, ``(rows, columns)``.
        scale: 16 bits, ``(rows, 1)``.
    """
    y: Tensor = torch.ops.gac.eight_bits_linear(x, weight, scale)
    return y


def rounded(x: Tensor, number: torch.dtype, least_rows: int = 0) -> tuple[Tensor, Tensor]:
    """x ``(rows, columns)`` as numbers of 8 bits and the scales of rows, float32 ``(rows, 1)``: one launch.

    Args:
        least_rows: of the result; what it has beside x's rows is not written.
    """
    from .eight_bits_kernels import round_rows

    rows, columns = x.shape
    height = max(rows, least_rows)
    numbers, scale = x.new_empty(height, columns, dtype=number), x.new_empty(height, 1, dtype=torch.float32)
    with launching_on(x):
        round_rows[(rows,)](
            x, numbers, scale, columns, MOST=_MOST[number], WIDE=1 << (columns - 1).bit_length(),
            num_warps=4 if columns <= 4096 else 8 if columns <= 8192 else 16,
        )  # fmt: skip
    return numbers, scale


def rescaled(sums: Tensor, scale: Tensor, of_weight: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """The first ``rows`` of whole numbers ``(height, n)``, times the scales of rows and of columns: one launch."""
    from .eight_bits_kernels import rescale

    columns = sums.shape[1]
    out = sums.new_empty(rows, columns, dtype=dtype)
    with launching_on(sums):
        rescale[(rows, ceil_div(columns, _AT_ONCE))](
            sums, scale, of_weight, out, columns, COLUMNS=_AT_ONCE, num_warps=4
        )
    return out


def _linear(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    given = x.reshape(-1, x.shape[-1]).contiguous()
    if weight.dtype == torch.int8:
        numbers, own = rounded(given, weight.dtype, _LEAST_ROWS)
        y = rescaled(torch._int_mm(numbers, weight.t()), own, scale, len(given), x.dtype)
    else:
        numbers, own = rounded(given, weight.dtype)
        by_row = scale.float().t()
        y = torch._scaled_mm(numbers, weight.t(), own, by_row, out_dtype=torch.bfloat16).to(x.dtype)
    return y.view(*x.shape[:-1], len(weight))


make_operator(
    "eight_bits_linear",
    "(Tensor x, Tensor weight, Tensor scale) -> Tensor",
    _linear,
    lambda x, weight, _scale: x.new_empty(*x.shape[:-1], len(weight)),
)
