"""Triton kernels of a stored matrix in training: its values, and the gradients that pass its rounding.

Each reads every master once, and keeps nothing between them.
"""

try:
    import triton
    import triton.language as tl

    from gac.runtime.kernels.quantise_rows import nearest
except ImportError as failure:
    raise RuntimeError("Triton is not installed") from failure

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gac.runtime.kernels.gpu import ceil_div, launching_on

_TILE, _WIDEST, _WARPS = 2048, 1024, 4


@triton.jit  # type: ignore[untyped-decorator]
def _places(rows, columns, size, begin, ROWS: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A part of a group of some rows: where it lies, and what of it is there."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = begin + tl.arange(0, WIDE)
    column = tl.program_id(1) * size + inside
    there = (row < rows)[:, None] & ((inside < size) & (column < columns))[None, :]
    return row[:, None] * columns + column[None, :], there


@triton.jit  # type: ignore[untyped-decorator]
def _of_group(scale, zero, rows, groups, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row * groups + tl.program_id(1)
    return tl.load(scale + at, mask=row < rows, other=1.0), tl.load(zero + at, mask=row < rows, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _number(units, LEAST: tl.constexpr, MOST: tl.constexpr):  # type: ignore[no-untyped-def]
    within = tl.maximum(units, LEAST, propagate_nan=tl.PropagateNan.ALL)
    within = tl.minimum(within, MOST, propagate_nan=tl.PropagateNan.ALL)
    return nearest(within)


@triton.jit  # type: ignore[untyped-decorator]
def _values(  # type: ignore[no-untyped-def]
    master, scale, zero, found, rows, columns, groups, size,
    LEAST: tl.constexpr, MOST: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A program takes a group of columns of ROWS rows."""
    part, shift = _of_group(scale, zero, rows, groups, ROWS)
    for begin in range(0, size, WIDE):
        at, there = _places(rows, columns, size, begin, ROWS, WIDE)
        value = tl.load(master + at, mask=there, other=0.0)
        number = _number(tl.div_rn(value, part[:, None]) + shift[:, None], LEAST, MOST)
        tl.store(found + at, (number - shift[:, None]) * part[:, None], mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def _changes(  # type: ignore[no-untyped-def]
    master, scale, zero, by, to_master, to_scale, rows, columns, groups, size,
    LEAST: tl.constexpr, MOST: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The same, with the gradient by its values."""
    part, shift = _of_group(scale, zero, rows, groups, ROWS)
    sums = tl.zeros([ROWS], tl.float32)
    for begin in range(0, size, WIDE):
        at, there = _places(rows, columns, size, begin, ROWS, WIDE)
        steps = tl.div_rn(tl.load(master + at, mask=there, other=0.0), part[:, None])
        units = steps + shift[:, None]
        change = tl.load(by + at, mask=there, other=0.0).to(tl.float32)
        moves = (units >= LEAST) & (units <= MOST)
        tl.store(to_master + at, tl.where(moves, change, 0.0), mask=there)
        apart = _number(units, LEAST, MOST) - shift[:, None] - tl.where(moves, steps, 0.0)
        sums += tl.sum(change * apart, 1)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tl.store(to_scale + row * groups + tl.program_id(1), sums, mask=row < rows)


class Rounded(torch.autograd.Function):
    """scale * (number - zero); number is the whole one from least to most that is nearest to master / scale + zero.

    Gradients reach the masters, but where they lie beyond least or most, and the scales, as if nothing were rounded.

    Args:
        master: float32 ``(rows, columns)``, as are the gradients.
        scale: float32 ``(rows, groups)``, as is ``zero``.
        size: neighbouring columns that have one scale; the last group may have fewer.
        dtype: of the values, ``(rows, columns)``.
    """

    @staticmethod
    def forward(
        ctx: Any, master: Tensor, scale: Tensor, zero: Tensor, size: int, least: int, most: int, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(master, scale, zero)
        ctx.grid = size, least, most
        found = torch.empty_like(master, dtype=dtype)
        _launch(_values, (master, scale, zero, found), *ctx.grid)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *by: Any) -> Any:
        master, scale, zero = ctx.saved_tensors
        to_master, to_scale = torch.empty_like(master), torch.empty_like(scale)
        _launch(_changes, (master, scale, zero, by[0].contiguous(), to_master, to_scale), *ctx.grid)
        return to_master, to_scale, None, None, None, None, None


def _launch(kernel: Any, tensors: tuple[Tensor, ...], size: int, least: int, most: int) -> None:
    assert all(one.is_contiguous() for one in tensors)
    (rows, columns), groups = tensors[0].shape, tensors[1].shape[1]
    wide = min(triton.next_power_of_2(size), _WIDEST)
    tall = _TILE // wide
    sizes = {"LEAST": float(least), "MOST": float(most), "ROWS": tall, "WIDE": wide}
    with launching_on(tensors[0]):
        kernel[(ceil_div(rows, tall), groups)](*tensors, rows, columns, groups, size, **sizes, num_warps=_WARPS)
