"""Triton kernels of training: KL divergence, its gradient, and fake quantisation.

Each reads its inputs once. Another library's kernels can stand in for these three functions.
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

_KL_BLOCK, _KL_WARPS = 2048, 8
_LOWEST = tl.constexpr(-1e30)  # finite, so that differences are
_TILE, _MAX_COLUMNS, _WARPS = 2048, 1024, 4


@triton.jit
def _load_logits(pointers, mask):  # type: ignore[no-untyped-def]
    return tl.where(mask, tl.load(pointers, mask=mask, other=0.0).to(tl.float32), _LOWEST)


@triton.jit  # type: ignore[untyped-decorator]
def _kl_rows(  # type: ignore[no-untyped-def]
    model_ptr, teacher_ptr, kl_ptr, log_sums_ptr, model_stride, teacher_stride, n_cols, BLOCK: tl.constexpr
):
    """One program per row. Each lane sums exponentials relative to the largest logit that it has seen."""
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    model, teacher = model_ptr + row * model_stride, teacher_ptr + row * teacher_stride
    model_max = tl.full([BLOCK], _LOWEST, tl.float32)
    teacher_max = tl.full([BLOCK], _LOWEST, tl.float32)
    model_sum = tl.zeros([BLOCK], tl.float32)
    teacher_sum = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n_cols, BLOCK):
        mask = start + lane < n_cols
        x = _load_logits(model + start + lane, mask)
        y = _load_logits(teacher + start + lane, mask)
        largest = tl.maximum(model_max, x)
        model_sum = model_sum * tl.exp(model_max - largest) + tl.exp(x - largest)
        model_max = largest
        largest = tl.maximum(teacher_max, y)
        rescale, exponential = tl.exp(teacher_max - largest), tl.exp(y - largest)
        teacher_sum = teacher_sum * rescale + exponential
        weighted = weighted * rescale + tl.where(mask, exponential * (y - x), 0.0)
        teacher_max = largest
    largest = tl.max(model_max, 0)
    model_log = largest + tl.log(tl.sum(model_sum * tl.exp(model_max - largest), 0))
    largest = tl.max(teacher_max, 0)
    rescale = tl.exp(teacher_max - largest)
    total = tl.sum(teacher_sum * rescale, 0)
    teacher_log = largest + tl.log(total)
    tl.store(kl_ptr + row, tl.sum(weighted * rescale, 0) / total - teacher_log + model_log)
    tl.store(log_sums_ptr + 2 * row, model_log)
    tl.store(log_sums_ptr + 2 * row + 1, teacher_log)


@triton.jit  # type: ignore[untyped-decorator]
def _kl_gradients(  # type: ignore[no-untyped-def]
    model_ptr, teacher_ptr, log_sums_ptr, weight_ptr, labels_ptr, scale_ptr, gradient_ptr,
    model_stride, teacher_stride, n_cols, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per BLOCK logits of a row; the target is weight * teacher + (1 - weight) * one_hot(label)."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < n_cols
    model = tl.exp(_load_logits(model_ptr + row * model_stride + column, mask) - tl.load(log_sums_ptr + 2 * row))
    teacher_logits = _load_logits(teacher_ptr + row * teacher_stride + column, mask)
    teacher = tl.exp(teacher_logits - tl.load(log_sums_ptr + 2 * row + 1))
    weight = tl.load(weight_ptr + row)
    target = weight * teacher + tl.where(column == tl.load(labels_ptr + row), 1.0 - weight, 0.0)
    tl.store(gradient_ptr + row * n_cols + column, (model - target) * tl.load(scale_ptr), mask=mask)


def kl_divergence(logits: Tensor, teacher_logits: Tensor) -> tuple[Tensor, Tensor]:
    model, teacher = map(_contiguous_rows, (logits, teacher_logits))
    rows, columns = model.shape
    kl, log_sums = (model.new_empty(shape, dtype=torch.float32) for shape in ((rows,), (rows, 2)))
    strides = model.stride(0), teacher.stride(0)
    with launching_on(model):
        _kl_rows[(rows,)](model, teacher, kl, log_sums, *strides, columns, BLOCK=_KL_BLOCK, num_warps=_KL_WARPS)
    return kl, log_sums


def kl_gradient(
    logits: Tensor, teacher_logits: Tensor, log_sums: Tensor, kl_weight: Tensor, labels: Tensor, scale: Tensor
) -> Tensor:
    model, teacher = map(_contiguous_rows, (logits, teacher_logits))
    rows, columns = model.shape
    gradient = model.new_empty(rows, columns)
    inputs = model, teacher, log_sums, kl_weight, labels, scale, gradient, model.stride(0), teacher.stride(0), columns
    with launching_on(model):
        _kl_gradients[(rows, ceil_div(columns, _KL_BLOCK))](*inputs, BLOCK=_KL_BLOCK, num_warps=_KL_WARPS)
    return gradient


def _contiguous_rows(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()


@triton.jit  # type: ignore[untyped-decorator]
def _nearest_level(units, LEAST: tl.constexpr, MOST: tl.constexpr):  # type: ignore[no-untyped-def]
    clamped = tl.maximum(units, LEAST, propagate_nan=tl.PropagateNan.ALL)
    return nearest(tl.minimum(clamped, MOST, propagate_nan=tl.PropagateNan.ALL))


@triton.jit  # type: ignore[untyped-decorator]
def _fake_quantize(  # type: ignore[no-untyped-def]
    master_ptr, scale_ptr, zero_ptr, output_ptr, gradient_ptr, by_scale_ptr, rows, columns, groups, group_size,
    LEAST: tl.constexpr, MOST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """One program per group of columns of ROWS rows; the output is the values, or the gradient by the masters."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_rows, group = row < rows, row * groups + tl.program_id(1)
    scale = tl.load(scale_ptr + group, mask=in_rows, other=1.0)[:, None]
    zero = tl.load(zero_ptr + group, mask=in_rows, other=0.0)[:, None]
    sums = tl.zeros([ROWS], tl.float32)
    for start in range(0, group_size, COLUMNS):
        in_group = start + tl.arange(0, COLUMNS)
        column = tl.program_id(1) * group_size + in_group
        mask = in_rows[:, None] & ((in_group < group_size) & (column < columns))[None, :]
        offset = row[:, None] * columns + column[None, :]
        steps = tl.div_rn(tl.load(master_ptr + offset, mask=mask, other=0.0), scale)
        units = steps + zero
        level = _nearest_level(units, LEAST, MOST)
        if BACKWARD:
            gradient = tl.load(gradient_ptr + offset, mask=mask, other=0.0).to(tl.float32)
            inside = (units >= LEAST) & (units <= MOST)
            tl.store(output_ptr + offset, tl.where(inside, gradient, 0.0), mask=mask)
            sums += tl.sum(gradient * (level - zero - tl.where(inside, steps, 0.0)), 1)
        else:
            tl.store(output_ptr + offset, (level - zero) * scale, mask=mask)
    if BACKWARD:
        tl.store(by_scale_ptr + group, sums, mask=in_rows)


class FakeQuantize(torch.autograd.Function):
    """As ``gac.healing.straight_through.fake_quantize``, for integer levels from ``least`` to ``most``."""

    @staticmethod
    def forward(ctx: Any, master: Tensor, scale: Tensor, zero: Tensor, *options: Any) -> Tensor:
        *ctx.grid, dtype = options
        ctx.save_for_backward(master, scale, zero)
        output = torch.empty_like(master, dtype=dtype)
        _launch((master, scale, zero, output, output, output), ctx.grid, backward=False)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        master, scale, zero = ctx.saved_tensors
        by_master, by_scale = torch.empty_like(master), torch.empty_like(scale)
        _launch((master, scale, zero, by_master, gradients[0].contiguous(), by_scale), ctx.grid, backward=True)
        return by_master, by_scale, None, None, None, None, None


def _launch(tensors: tuple[Tensor, ...], grid: tuple[int, int, int], backward: bool) -> None:
    group_size, least, most = grid
    assert all(tensor.is_contiguous() for tensor in tensors)
    (rows, columns), groups = tensors[0].shape, tensors[1].shape[1]
    block_columns = min(triton.next_power_of_2(group_size), _MAX_COLUMNS)
    block_rows = _TILE // block_columns
    levels = {"LEAST": float(least), "MOST": float(most), "BACKWARD": backward}
    block = {"ROWS": block_rows, "COLUMNS": block_columns, "num_warps": _WARPS}
    with launching_on(tensors[0]):
        kernel = _fake_quantize[(ceil_div(rows, block_rows), groups)]
        kernel(*tensors, rows, columns, groups, group_size, **levels, **block)
