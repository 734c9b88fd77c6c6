"""Rows of 8 bits, as GEMMs of 8 bits read them: quantised as they are, or by the norm that makes them.

The kernels compute what ``gac.runtime.storage.eight_bits`` does, a norm up to the order of its sums.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gac.runtime.kernels.elementwise.rows import (
    AddNorm,
    by_row,
    gated_values,
    normed_values,
    power_of_two,
    warps_for,
)
from gac.runtime.kernels.gpu import ceil_div, launch_options, launching_on, operator, starts_early
from gac.runtime.kernels.guard import gdc_launch_dependents, gdc_wait, jit, tl
from gac.runtime.kernels.split_k import COUNTERS, clear

_MOST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


class QuantisedRows(NamedTuple):
    """Rows of 8 bits."""

    numbers: Tensor  # int8 or float8_e4m3fn, ``(rows, columns)``
    scale: Tensor  # of each row, or of each group of its columns, float32, ``(rows, groups)``
    counters: Tensor  # int32 zeros, ``(COUNTERS,)``: programs that share a tile count there, and leave zeros


def quantise_rows(x: Tensor, number: torch.dtype, group: int | None = None, gated: bool = False) -> QuantisedRows:
    """x ``(rows, columns)``, contiguous, as numbers of 8 bits: one launch.

    Args:
        group: columns with one scale, a power of two; None: all of a row.
        gated: x is ``(rows, 2 columns)``, gate beside up: quantise ``silu(gate) * up``, rounded to 16 bits.
    """
    inputs = x[:, : x.shape[1] // 2] if gated else x
    result = _empty(inputs, number, group)
    with launching_on(x):
        quantise_rows_kernel[(len(x),)](x, *result, inputs.shape[1], GATED=gated, **_options(inputs, number, group))
    return result


def norm_quantised(
    x: Tensor, weight: Tensor, eps: float, kind: str, number: torch.dtype, full: bool, group: int | None = None
) -> tuple[Tensor, QuantisedRows]:
    """Run one of ``rows.NORMS`` on x ``(..., features)`` of 16 bits, and quantise its output, in one launch.

    ``group`` columns have one scale, or all. The output is written in 16 bits too if ``full``; else it has its shape,
    and is NaN.
    """
    out, *result = normed_rows(x, weight, eps, kind, number, full, group)
    return (out if full else out.expand(x.shape)), QuantisedRows(*result)


def add_norm_quantised(x: Tensor, norm: AddNorm, number: torch.dtype, group: int | None = None) -> QuantisedRows:
    """Quantise the norm of x ``(rows, columns)``, contiguous, plus the residual stream, in one launch."""
    result, (out, summed) = _empty(x, number, group), norm.into
    with launching_on(x):
        norm_rows_kernel[(len(x),)](
            x, norm.residual, norm.weight, out, summed, *result, x.shape[1], x.shape[1], norm.eps,
            SUM=True, ADDED=False, WHOLE=norm.full, **_options(x, number, group),
        )  # fmt: skip
    return result


def _output(x: Tensor, full: bool) -> Tensor:
    return x.new_empty(x.shape if full else 1)


def _empty(x: Tensor, number: torch.dtype, group: int | None) -> QuantisedRows:
    rows, columns = x.shape[:-1].numel(), x.shape[-1]
    return QuantisedRows(
        x.new_empty(rows, columns, dtype=number),
        x.new_empty(rows, ceil_div(columns, group or columns), dtype=torch.float32),
        x.new_empty(COUNTERS, dtype=torch.int32),
    )


def _options(x: Tensor, number: torch.dtype, group: int | None) -> dict[str, Any]:
    columns, early = x.shape[-1], starts_early(x)
    size = max(power_of_two(columns), group or 1)
    constants = {"MOST": _MOST[number], "BLOCK_SIZE": size, "GROUP": group or size, "COUNTERS": COUNTERS}
    return constants | {"EARLY": early, "num_warps": warps_for(columns), **launch_options(early)}


@operator(lambda x, _weight, _eps, _kind, number, full, group=None: (_output(x, full), *_empty(x, number, group)))
def normed_rows(
    x: Tensor, weight: Tensor, eps: float, kind: str, number: torch.dtype, full: bool, group: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``norm_quantised``, as tensors; of an output that is not full one number."""
    inputs, size = by_row(x), x.shape[-1]
    out, result = _output(x, full), _empty(inputs, number, group)
    with launching_on(x):
        norm_rows_kernel[(len(inputs),)](
            inputs, inputs, weight, out, out, *result, inputs.stride(0), size, eps,
            SUM=False, ADDED=kind == "gemma", WHOLE=full, **_options(x, number, group),
        )  # fmt: skip
    return out, *result


# Triton kernels that round rows to 8 bits: as they are, or as a norm makes them.

_ROUNDING = tl.constexpr(12582912.0)  # 1.5 * 2^23: added and taken away, it leaves whole numbers, ties to even
_TINY = tl.constexpr(2.0**-126)


@jit
def nearest(units):
    """The nearest whole numbers, ties to even, of numbers below 2^22."""
    return (units + _ROUNDING) - _ROUNDING


@jit
def _round_row(
    value, row, offsets, size, numbers, scale, counters,
    MOST: tl.constexpr, GROUP: tl.constexpr, COUNTERS: tl.constexpr,
):  # fmt: skip
    """Round a row; GROUP columns have one scale."""
    wide: tl.constexpr = value.shape[0]
    parts: tl.constexpr = wide // GROUP
    value = tl.reshape(value, (parts, GROUP))
    local = tl.maximum(tl.div_rn(tl.max(tl.abs(value), axis=1, keep_dims=True), MOST), _TINY)
    part = tl.div_rn(1.0, local)
    units = value * part
    units = tl.fma(tl.fma(-units, local, value), part, units)  # as a division rounds
    if numbers.dtype.element_ty == tl.int8:
        units = nearest(units)
    units = tl.reshape(units, (wide,)).to(numbers.dtype.element_ty)
    tl.store(numbers + row * size + offsets, units, mask=offsets < size)
    group, groups = tl.arange(0, parts), tl.cdiv(size, GROUP)
    tl.store(scale + row * groups + group, tl.reshape(local, (parts,)), mask=group < groups)
    if row == 0:
        clear(counters, COUNTERS, COUNTERS)


@jit
def quantise_rows_kernel(
    x_ptr, numbers_ptr, scale_ptr, counters_ptr, n_cols,
    MOST: tl.constexpr, BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr, COUNTERS: tl.constexpr,
    GATED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK_SIZE)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    place = x_ptr + row * (2 * n_cols if GATED else n_cols) + offsets
    value = tl.load(place, mask=offsets < n_cols, other=0.0).to(tl.float32)
    if GATED:
        other = tl.load(place + n_cols, mask=offsets < n_cols, other=0.0).to(tl.float32)
        value = gated_values(value, other, False, x_ptr.dtype.element_ty).to(tl.float32)
    _round_row(value, row, offsets, n_cols, numbers_ptr, scale_ptr, counters_ptr, MOST, GROUP, COUNTERS)


@jit
def norm_rows_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, numbers_ptr, scale_ptr, counters_ptr, stride, n_cols, eps,
    MOST: tl.constexpr, SUM: tl.constexpr, ADDED: tl.constexpr, WHOLE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr, COUNTERS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program takes a row through an RMSNorm.

    SUM: the row is added to that of the residual stream first. ADDED: as of ``normed_values``. WHOLE: the row is
    written in 16 bits too; else one NaN stands for all rows.
    """
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK_SIZE)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x_ptr + row * stride + offsets, mask=offsets < n_cols, other=0.0).to(tl.float32)
    if SUM:
        place = row * stride + offsets
        other = tl.load(residual_ptr + place, mask=offsets < n_cols, other=0.0).to(tl.float32)
        value = (value + other).to(x_ptr.dtype.element_ty)
        tl.store(sum_ptr + place, value, mask=offsets < n_cols)
        value = value.to(tl.float32)
    gain = tl.load(weight_ptr + offsets, mask=offsets < n_cols, other=0.0).to(tl.float32)
    value = normed_values(value, gain, n_cols, eps, ADDED, x_ptr.dtype.element_ty)
    if WHOLE:
        tl.store(out_ptr + row * n_cols + offsets, value, mask=offsets < n_cols)
    elif row == 0:
        tl.store(out_ptr, float("nan"))
    value = value.to(tl.float32)
    _round_row(value, row, offsets, n_cols, numbers_ptr, scale_ptr, counters_ptr, MOST, GROUP, COUNTERS)
