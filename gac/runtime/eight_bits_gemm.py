"""GEMMs of 8 bits on a GPU: a Triton kernel multiplies inputs that another one has rounded.

PyTorch multiplies many rows in 8-bit floating point. Triton is imported when a kernel first runs.
"""

import torch
from torch import Tensor

from .gpu import launching_on, make_operator
from .kernel_limits import eight_bits
from .rounded_rows import Rounded, rounded
from .tiles import Sharing, Tile, tile_for

MOST_ROWS = 64
"""Rows of the input that are multiplied in the kernel; more rows of 8-bit floating point in PyTorch."""
_TILES = {
    16: Tile(16, 64, 256, 4, 4), 32: Tile(32, 64, 256, 4, 3), MOST_ROWS: Tile(64, 64, 256, 4, 3),
    128: Tile(128, 128, 128, 4, 3),
}  # fmt: skip
"""By the most rows; the last for more, too."""
_CAPABILITY = {torch.int8: (8, 0), torch.float8_e4m3fn: (9, 0)}


def unread(number: torch.dtype, device: torch.device, rows: int, columns: int) -> str | None:
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


def linear_of(x: Rounded, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The same of inputs that are rounded already, ``(rows, rows of the weight)`` in that dtype."""
    y: Tensor = torch.ops.gac.eight_bits_linear_of(*x, weight, scale, dtype)
    return y


def multiplied(x: Rounded, weight: Tensor, scale: Tensor, dtype: torch.dtype, how: Tile | None = None) -> Tensor:
    """``linear_of`` in one launch of the kernel, for any number of rows.

    Where tiles are few, several programs share each, every one with a part of the columns.
    """
    from .eight_bits_kernels import multiply

    (rows, columns), outputs = x.numbers.shape, len(weight)
    how = how or tile_for(rows, _TILES)
    how = how.fitted(how.numbers * (how.rows + how.outputs), weight.device)
    sums = torch.int32 if weight.dtype == torch.int8 else torch.float32
    sharing = Sharing.of(how, rows, outputs, columns, weight, sums, x.counters)
    out = weight.new_empty(rows, outputs, dtype=dtype)
    with launching_on(weight):
        multiply[(how.count(rows, outputs), sharing.split)](
            x.numbers, x.scale, weight, scale, out, sharing.sums, sharing.counters, rows, outputs, columns,
            ROWS=how.rows, OUTPUTS=how.outputs, NUMBERS=how.numbers, EVEN=columns % how.numbers == 0,
            SPLIT=sharing.split, STAGES=how.stages, num_warps=how.warps,
        )  # fmt: skip
    return out


def _linear_of(
    numbers: Tensor, own: Tensor, counters: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype
) -> Tensor:
    if weight.dtype == torch.int8 or len(numbers) <= MOST_ROWS:
        return multiplied(Rounded(numbers, own, counters), weight, scale, dtype)
    by_row = scale.float().t()
    return torch._scaled_mm(numbers, weight.t(), own, by_row, out_dtype=torch.bfloat16).to(dtype)


def _linear(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    given = x.reshape(-1, x.shape[-1]).contiguous()
    y = _linear_of(*rounded(given, weight.dtype), weight, scale, x.dtype)
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
