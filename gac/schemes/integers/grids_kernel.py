"""``gac.schemes.integers.grids.fit_grid`` as one Triton kernel: a program per row, which tries some ranges at once."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from gac.schemes.base import LARGEST_SCALE, SMALLEST_SCALE

RANGES = 8
"""Ranges that are tried at once."""
MAX_BLOCK = 1024
"""The most columns of a block."""
WARP_COLUMNS = 128
_SMALLEST, _LARGEST = tl.constexpr(SMALLEST_SCALE), tl.constexpr(LARGEST_SCALE)


def launch(
    values: Tensor, weights: Tensor, most: int, zero: bool, fractions: tuple[float, ...]
) -> tuple[Tensor, Tensor]:
    """The scale and the zero point of ``fit_grid``, for float64 tensors on a GPU."""
    *batch, rows, columns = values.shape
    values, parts = values.contiguous(), _parts(fractions, values.device)
    weights = weights.contiguous().expand(*batch, columns).reshape(-1, columns)
    scale, zeros = (values.new_empty(*batch, rows, 1) for _ in range(2))
    BLOCK_SIZE = min(triton.next_power_of_2(columns), MAX_BLOCK)
    with torch.cuda.device(values.device):
        _fit[(scale.numel(),)](
            values, weights, parts, scale, zeros, rows, columns, weights.stride(0), most,
            zero=zero, count=len(parts), turns=triton.next_power_of_2(triton.cdiv(len(parts), RANGES)), RANGES=RANGES,
            BLOCK_SIZE=BLOCK_SIZE, num_warps=max(BLOCK_SIZE // WARP_COLUMNS, 1), enable_fp_fusion=False,
        )  # fmt: skip
    return scale, zeros


@cache
def _parts(fractions: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(fractions, dtype=torch.float64, device=device)


@triton.jit  # type: ignore[untyped-decorator]
def _fit(  # type: ignore[no-untyped-def]
    values_ptr, weights_ptr, fractions_ptr, scale_ptr, zeros_ptr, rows, columns, weights_row_stride, most,
    zero: tl.constexpr, count: tl.constexpr, turns: tl.constexpr, RANGES: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    values_ptr += row * columns
    weights_ptr += row // rows * weights_row_stride
    low, high = _ends(values_ptr, columns, BLOCK_SIZE)
    if not zero:
        high = tl.maximum(high, -low)
        low = -high
    place = tl.arange(0, turns)[:, None] * RANGES + tl.arange(0, RANGES)[None, :]
    parts = tl.load(fractions_ptr + place, mask=place < count, other=1.0)
    scale, zeros = _grid(parts * low, parts * high, most, zero)  # one per thread: divisions are slow
    inverse = 1 / scale
    least, best = high * 0.0 + float("inf"), 0
    for first in range(0, count, RANGES):
        here = place // RANGES * RANGES == first
        scale_here, inverse_here, zeros_here = _only(scale, here), _only(inverse, here), _only(zeros, here)
        costs = _costs(scale_here, inverse_here, zeros_here, values_ptr, weights_ptr, columns, most, RANGES, BLOCK_SIZE)
        cost = tl.min(costs, 0)
        best = tl.where(cost < least, first + tl.argmin(costs, 0), best)
        least = tl.minimum(cost, least)
    tl.store(scale_ptr + row, tl.sum(_only(scale, place == best), 0))
    tl.store(zeros_ptr + row, tl.sum(_only(zeros, place == best), 0))


@triton.jit
def _only(values, here):  # type: ignore[no-untyped-def]
    return tl.sum(tl.where(here, values, 0.0), 0)


@triton.jit  # type: ignore[untyped-decorator]
def _ends(values_ptr, columns, BLOCK_SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    low, high = tl.zeros([BLOCK_SIZE], tl.float64), tl.zeros([BLOCK_SIZE], tl.float64)
    for start in range(0, columns, BLOCK_SIZE):
        column = start + tl.arange(0, BLOCK_SIZE)
        value = tl.load(values_ptr + column, mask=column < columns, other=0.0)
        low, high = tl.minimum(low, value), tl.maximum(high, value)
    return tl.min(low, 0), tl.max(high, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _grid(low, high, most, zero: tl.constexpr):  # type: ignore[no-untyped-def]
    scale = (high - low) / most if zero else 2 * high / (most - 1)
    bits = scale.to(tl.float32).to(tl.int32, bitcast=True)
    bits += 32767 + (bits >> 16 & 1)  # to the nearest bfloat16, the even one of two
    scale = (bits >> 16 << 16).to(tl.float32, bitcast=True)
    scale = tl.minimum(tl.maximum(scale.to(tl.float16).to(tl.float64), _SMALLEST), _LARGEST)
    zeros = high * 0.0 + (most + 1) // 2
    if zero:
        zeros = tl.minimum(tl.maximum(libdevice.rint(-low / scale), 0.0), most)
    return scale, zeros


@triton.jit  # type: ignore[untyped-decorator]
def _costs(  # type: ignore[no-untyped-def]
    scale, inverse, zeros, values_ptr, weights_ptr, columns, most, RANGES: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    scale, inverse, least, largest = scale[:, None], inverse[:, None], -zeros[:, None], (most - zeros)[:, None]
    totals = tl.zeros([RANGES, BLOCK_SIZE], tl.float64)
    for start in range(0, columns, BLOCK_SIZE):
        column = start + tl.arange(0, BLOCK_SIZE)
        value = tl.load(values_ptr + column, mask=column < columns, other=0.0)[None, :]
        weigh = tl.load(weights_ptr + column, mask=column < columns, other=0.0)[None, :]
        number = libdevice.rint(value * inverse)
        number = tl.where(number < least, least, number)
        number = tl.where(number > largest, largest, number)
        error = tl.fma(number, scale, -value)
        totals = tl.fma(weigh * error, error, totals)
    return tl.sum(totals, 1)
