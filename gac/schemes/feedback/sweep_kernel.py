"""``gac.schemes.feedback.levels.sweep`` as one Triton kernel: a program keeps some rows in registers."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

ROWS = 8
"""Rows of a program."""


def launch(units: Tensor, factors: Tensor, most: int, number: str, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """As ``sweep``, for tensors on a GPU; ``most`` and ``number`` are those of ``Levels``."""
    pairs, rows, width = units.shape
    units, factors = units.contiguous(), factors.contiguous()
    was = units if before is None else before.contiguous()
    numbers, errors = torch.empty_like(units), torch.empty_like(units)
    with torch.cuda.device(units.device):
        _sweep[(triton.cdiv(rows, ROWS), pairs)](
            units, factors, was, numbers, errors, rows, width, most,
            from_before=before is not None, kind=number,
            BLOCK_ROWS=ROWS, BLOCK_SIZE=triton.next_power_of_2(width), num_warps=2,
        )  # fmt: skip
    return numbers, errors


@triton.jit  # type: ignore[untyped-decorator]
def _sweep(  # type: ignore[no-untyped-def]
    units_ptr, factors_ptr, was_ptr, numbers_ptr, errors_ptr, rows, width, most,
    from_before: tl.constexpr, kind: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_SIZE)
    inside = (row[:, None] < rows) & (column[None, :] < width)
    place = pair * rows * width + row[:, None] * width + column[None, :]
    work = tl.load(units_ptr + place, mask=inside, other=0.0)
    was = tl.load(was_ptr + place, mask=inside, other=0.0)
    numbers = tl.zeros_like(work)
    errors = tl.zeros_like(work)
    for current in range(width):
        here = column[None, :] == current
        value = tl.sum(tl.where(here, work, 0.0), axis=1)
        number = _nearest(value, most.to(tl.float64), kind)
        error = value - number
        if from_before:
            error = tl.sum(tl.where(here, was, 0.0), axis=1) - number
        numbers = tl.where(here, number[:, None], numbers)
        errors = tl.where(here, error[:, None], errors)
        behind = (column > current) & (column < width)
        factors = tl.load(factors_ptr + (pair * width + current) * width + column, mask=behind, other=0.0)
        work -= error[:, None] * factors[None, :]
    tl.store(numbers_ptr + place, numbers, mask=inside)
    tl.store(errors_ptr + place, errors, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _nearest(value, most, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    """The nearest whole number from 0 to ``most``, or of floating point from ``-most`` on.

    e4m3 has 4 digits, and multiples of 2^-9; e2m1 has 2, and multiples of 1/2.
    """
    least = value * 0.0
    units = libdevice.rint(value)
    if kind != "integer":
        exponent = ((value.to(tl.int64, bitcast=True) >> 52) & 2047) - 1023
        lowest = tl.maximum(exponent, -6) - 3 if kind == "e4m3" else tl.maximum(exponent, 0) - 1
        step = ((lowest + 1023) << 52).to(tl.float64, bitcast=True)
        units = libdevice.rint(value / step) * step
        least -= most
    return tl.minimum(tl.maximum(units, least), most)
