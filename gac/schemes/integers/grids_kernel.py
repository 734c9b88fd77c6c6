"""``gac.schemes.integers.grids.fitted`` as one Triton kernel: a program takes a row, and tries some ranges at once."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from gac.schemes.integers.grids import SMALLEST_SCALE, parts_of
from gac.schemes.integers.spec import LARGEST_SCALE

RANGES = 8
"""Ranges that are tried at once."""
WIDE = 1024
"""Most columns that are read at once."""
EACH = 128
"""Columns of a warp."""
_SMALLEST, _LARGEST = tl.constexpr(SMALLEST_SCALE), tl.constexpr(LARGEST_SCALE)


def launch(values: Tensor, weighs: Tensor, most: int, zero: bool) -> tuple[Tensor, Tensor]:
    """The scale and the zero point of ``fitted``, for float64 tensors on a GPU."""
    *several, rows, columns = values.shape
    values, parts = values.contiguous(), _parts(most, zero, values.device)
    weighs = weighs.contiguous().expand(*several, columns).reshape(-1, columns)
    scale, zeros = (values.new_empty(*several, rows, 1) for _ in range(2))
    wide = min(triton.next_power_of_2(columns), WIDE)
    with torch.cuda.device(values.device):
        _fit[(scale.numel(),)](
            values, weighs, parts, scale, zeros, rows, columns, weighs.stride(0), most,
            zero=zero, count=len(parts), turns=triton.next_power_of_2(triton.cdiv(len(parts), RANGES)), ranges=RANGES,
            wide=wide, num_warps=max(wide // EACH, 1), enable_fp_fusion=False,
        )  # fmt: skip
    return scale, zeros


@cache
def _parts(most: int, zero: bool, device: torch.device) -> Tensor:
    return torch.tensor(parts_of(most, zero), dtype=torch.float64, device=device)


@triton.jit  # type: ignore[untyped-decorator]
def _fit(  # type: ignore[no-untyped-def]
    values_at, weighs_at, parts_at, scale_at, zeros_at, rows, columns, apart, most,
    zero: tl.constexpr, count: tl.constexpr, turns: tl.constexpr, ranges: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    values_at += row * columns
    weighs_at += row // rows * apart
    low, high = _ends(values_at, columns, wide)
    if not zero:
        high = tl.maximum(high, -low)
        low = -high
    place = tl.arange(0, turns)[:, None] * ranges + tl.arange(0, ranges)[None, :]
    parts = tl.load(parts_at + place, mask=place < count, other=1.0)
    scale, zeros = _grid(parts * low, parts * high, most, zero)  # one a thread: to divide takes long
    inverse = 1 / scale
    least, best = high * 0.0 + float("inf"), 0
    for first in range(0, count, ranges):
        here = place // ranges * ranges == first
        own, own_inverse, own_zeros = _only(scale, here), _only(inverse, here), _only(zeros, here)
        costs = _costs(own, own_inverse, own_zeros, values_at, weighs_at, columns, most, ranges, wide)
        cost = tl.min(costs, 0)
        best = tl.where(cost < least, first + tl.argmin(costs, 0), best)
        least = tl.minimum(cost, least)
    tl.store(scale_at + row, tl.sum(_only(scale, place == best), 0))
    tl.store(zeros_at + row, tl.sum(_only(zeros, place == best), 0))


@triton.jit
def _only(values, here):  # type: ignore[no-untyped-def]
    """Of each column the only value that is marked, or zero."""
    return tl.sum(tl.where(here, values, 0.0), 0)


@triton.jit  # type: ignore[untyped-decorator]
def _ends(values_at, columns, wide: tl.constexpr):  # type: ignore[no-untyped-def]
    """The least and the largest value, or zero."""
    low, high = tl.zeros([wide], tl.float64), tl.zeros([wide], tl.float64)
    for start in range(0, columns, wide):
        column = start + tl.arange(0, wide)
        value = tl.load(values_at + column, mask=column < columns, other=0.0)
        low, high = tl.minimum(low, value), tl.maximum(high, value)
    return tl.min(low, 0), tl.max(high, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _grid(low, high, most, zero: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scales and zero points, bit for bit those of ``grids``: in PyTorch too, what 16 bits hold comes by float32."""
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
    scale, inverse, zeros, values_at, weighs_at, columns, most, ranges: tl.constexpr, wide: tl.constexpr
):
    """What each range costs; a product with the inverse of a scale rounds as a quotient does, but for ties."""
    scale, inverse, least, largest = scale[:, None], inverse[:, None], -zeros[:, None], (most - zeros)[:, None]
    totals = tl.zeros([ranges, wide], tl.float64)
    for start in range(0, columns, wide):
        column = start + tl.arange(0, wide)
        value = tl.load(values_at + column, mask=column < columns, other=0.0)[None, :]
        weigh = tl.load(weighs_at + column, mask=column < columns, other=0.0)[None, :]
        number = libdevice.rint(value * inverse)
        number = tl.where(number < least, least, number)
        number = tl.where(number > largest, largest, number)
        error = tl.fma(number, scale, -value)
        totals = tl.fma(weigh * error, error, totals)
    return tl.sum(totals, 1)
