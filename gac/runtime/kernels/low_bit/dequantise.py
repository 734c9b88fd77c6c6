"""Numbers of weights of few bits in tiles, and the kernel that writes a weight in 16 bits."""

import torch
from torch import Tensor

from gac.runtime.kernels.gpu import ceil_div, launching_on
from gac.runtime.kernels.guard import jit, tl
from gac.runtime.kernels.low_bit.packed import MAGIC, Packed, in_halves, zero_offset
from gac.runtime.kernels.ptx import halves

_ROWS, _NUMBERS = 32, 128


def dequantised(weight: Packed, dtype: torch.dtype) -> Tensor:
    """``few_bits_written`` in one launch: a program writes some rows, and of each some numbers."""
    out = weight.words.new_empty(weight.rows, weight.columns, dtype=dtype)
    rows, numbers = _ROWS, min(_NUMBERS, weight.group or _NUMBERS)
    with launching_on(out):
        dequantise_kernel[(ceil_div(weight.rows, rows), ceil_div(weight.columns, numbers))](
            *weight.read, out, weight.rows, *weight.sizes, MAGIC[dtype],
            **weight.options, BLOCK_N=rows, BLOCK_K=numbers, EVEN_K=weight.columns % numbers == 0, num_warps=4,
        )  # fmt: skip
    return out


# The Triton kernel.


@jit
def _words_at(offsets, there, BITS: tl.constexpr):
    first = tl.load(offsets, mask=there, other=0)
    if BITS == 3:
        return first, tl.load(offsets + 1, mask=there, other=0), tl.load(offsets + 2, mask=there, other=0)
    else:
        return first, first, first


@jit
def _pairs(first, second, third, BITS: tl.constexpr):
    """Numbers 0, 1... of the first half of each unit below those of the second: int32, ``(rows, units, pairs)``."""
    if BITS == 3:  # 96 bits become four words, each of four numbers of the first 48 and four of the last 48
        a, b, c, d = in_halves(first, second, third)
        words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (first.shape[0], first.shape[1] * 4))
        pairs = (words[:, :, None] >> (tl.arange(0, 4) * 3)[None, None, :]) & 0x00070007
        return tl.reshape(pairs, (first.shape[0], first.shape[1], 16))
    else:
        return (first[:, :, None] >> (tl.arange(0, 16 // BITS) * BITS)[None, None, :]) & (((1 << BITS) - 1) * 0x10001)


@jit
def numbers_of(
    words, row, magic, start, size,
    BITS: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Numbers of some rows from column ``start`` on, and what ``_more`` they have, ``(rows, units, pairs, 2)``."""
    numbers: tl.constexpr = 32 if BITS == 3 else 32 // BITS
    full: tl.constexpr = 3 if BITS == 3 else 1
    units = size // 32 * (32 // numbers)  # of a row: so the compiler knows what divides them
    unit = start // numbers + tl.arange(0, BLOCK_K // numbers)
    there = True if EVEN_K else (unit < units)[None, :]
    offsets = words + row.to(tl.int64)[:, None] * (units * full) + unit[None, :] * full
    first, second, third = _words_at(offsets, there, BITS)
    pairs = _pairs(first, second, third, BITS)
    if BITS == 8 and dtype == tl.bfloat16:
        high = halves((~pairs & 0x00800080) ^ magic, dtype).to(tl.float32)
        return (halves((pairs & 0x007F007F) | magic, dtype).to(tl.float32) - high).to(dtype)
    else:
        return halves(pairs | magic, dtype)


@jit(do_not_specialize=["groups"])
def dequantise_kernel(
    words_ptr, scale_ptr, zeros_ptr, out_ptr, n, n_cols, groups, magic,
    BITS: tl.constexpr, GROUP: tl.constexpr, OWN_ZERO: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """Write the weight: whole numbers times scales, less zero points times scales, rounded once; all else is exact."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.program_id(1) * BLOCK_K
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    base = tl.minimum(row, n - 1)
    group = start // GROUP if GROUP else 0
    scales = tl.load(scale_ptr + base * (groups if GROUP else 1) + group).to(tl.float32)
    numbers = numbers_of(words_ptr, base, magic, start, n_cols, BITS, BLOCK_K, EVEN_K, dtype)
    values = tl.reshape(tl.permute(numbers, (0, 1, 3, 2)), (BLOCK_N, BLOCK_K)).to(tl.float32) * scales[:, None]
    values -= (zero_offset(zeros_ptr, base, group, groups, BITS, OWN_ZERO, dtype) * scales)[:, None]
    offsets = start + tl.arange(0, BLOCK_K)
    inside = (row < n)[:, None] & (offsets < n_cols)[None, :]
    tl.store(out_ptr + row.to(tl.int64)[:, None] * n_cols + offsets[None, :], values.to(dtype), mask=inside)
