"""GEMMs of 8 bits on a GPU: a Triton kernel rounds the inputs, and another multiplies what it wrote.

PyTorch multiplies many rows in 8-bit floating point. The first kernel finds what ``gac.runtime.rounded_inputs`` finds.
Triton is imported when it first runs.
"""

import torch
from torch import Tensor

from .gpu import launching_on, make_operator
from .kernel_limits import eight_bits
from .tiles import Sharing, Tile, tile_for

_MOST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
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


def rounded(x: Tensor, number: torch.dtype, counters: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x ``(rows, columns)`` as numbers of 8 bits and the scales of rows, float32 ``(rows, 1)``: one launch.

    Args:
        counters: they are cleared.
    """
    from .eight_bits_kernels import round_rows

    rows, columns = x.shape
    numbers, scale = x.new_empty(rows, columns, dtype=number), x.new_empty(rows, 1, dtype=torch.float32)
    count = 0 if counters is None else len(counters)
    with launching_on(x):
        round_rows[(rows,)](
            x, numbers, scale, counters, count, columns,
            MOST=_MOST[number], WIDE=1 << (columns - 1).bit_length(), COUNTERS=1 << (max(count, 1) - 1).bit_length(),
            num_warps=4 if columns <= 4096 else 8 if columns <= 8192 else 16,
        )  # fmt: skip
    return numbers, scale


def multiplied(x: Tensor, weight: Tensor, scale: Tensor, how: Tile | None = None) -> Tensor:
    """``linear`` for x ``(rows, columns)``: two launches.

    Where tiles are few, several programs share each, every one with a part of the columns.
    """
    from .eight_bits_kernels import multiply

    how = how or tile_for(len(x), _TILES)
    how = how.fitted(how.numbers * (how.rows + how.outputs), x.device)
    (rows, columns), outputs = x.shape, len(weight)
    sums = torch.int32 if weight.dtype == torch.int8 else torch.float32
    sharing = Sharing.of(how, rows, outputs, columns, x, sums)
    numbers, own = rounded(x, weight.dtype, sharing.counters)
    out = x.new_empty(rows, outputs)
    with launching_on(x):
        multiply[(how.count(rows, outputs), sharing.split)](
            numbers, own, weight, scale, out, sharing.sums, sharing.counters, rows, outputs,
            size=columns, ROWS=how.rows, OUTPUTS=how.outputs, NUMBERS=how.numbers, SPLIT=sharing.split,
            STAGES=how.stages, num_warps=how.warps,
        )  # fmt: skip
    return out


def _linear(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    given = x.reshape(-1, x.shape[-1]).contiguous()
    if weight.dtype == torch.int8 or len(given) <= MOST_ROWS:
        y = multiplied(given, weight, scale)
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
