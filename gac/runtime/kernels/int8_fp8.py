"""GEMMs of 8 bits on a GPU: a Triton kernel multiplies inputs that another one has rounded.

PyTorch multiplies many rows in 8-bit floating point. Triton is imported when a kernel first runs.
"""

import torch
from torch import Tensor
from torch.nn import functional

from gac.runtime.kernels import gpu
from gac.runtime.kernels.gpu import launch_options, launching_on, operator, starts_early
from gac.runtime.kernels.guard import gdc_launch_dependents, gdc_wait, jit, tl
from gac.runtime.kernels.quantise_rows import QuantisedRows, quantise_rows
from gac.runtime.kernels.split_k import SplitK, Tile, split_k_reduce, tile_for
from gac.runtime.limits import eight_bits

MOST_ROWS = 64  # rows of the input that are multiplied in the kernel; more rows of 8-bit floating point in PyTorch
_BLOCK = 128  # rows and columns of a weight with one scale, where blocks have scales
_TILES = {
    16: Tile(16, 64, 256, 4, 4), 32: Tile(32, 64, 256, 4, 3), MOST_ROWS: Tile(64, 64, 256, 4, 3),
    128: Tile(128, 128, 128, 4, 3),
}  # fmt: skip
"""By the most rows; the last for more, too."""
_BLOCK_TILES = {
    16: Tile(16, 64, _BLOCK, 4, 8), 32: Tile(32, 64, _BLOCK, 4, 6), MOST_ROWS: Tile(64, 64, _BLOCK, 4, 4),
    128: Tile(128, 64, _BLOCK, 4, 4),
}  # fmt: skip
"""Those of weights with scales of blocks, by which the sums of each step are multiplied: they take registers too."""
_OF_MANY_OUTPUTS = {**_BLOCK_TILES, MOST_ROWS: Tile(64, 128, _BLOCK, 4, 4)}
"""The same where a tile of 128 outputs for each SM is there."""
_ALIGNED = 4  # cuBLAS reads scales of so many rows, and of so many blocks of columns, at a time
_CUDA = tuple(map(int, (torch.version.cuda or "0").split(".")))
_LIBRARY_HAS_BLOCKS = torch.__version__ >= "2.9" and _CUDA >= (12, 9)
_CAPABILITY = {torch.int8: (8, 0), torch.float8_e4m3fn: (9, 0)}


def gemm_unsupported_reason(number: torch.dtype, device: torch.device, rows: int, columns: int) -> str | None:
    """Why there is no such GEMM for a weight ``(rows, columns)`` on that GPU; None where there is."""
    properties = torch.cuda.get_device_properties(device)
    if (properties.major, properties.minor) < _CAPABILITY[number]:
        return f"no GEMM multiplies {str(number).removeprefix('torch.')} on this GPU ({properties.name})"
    return eight_bits(rows, columns)


def gemm(
    x: QuantisedRows,
    weight: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    how: Tile | None = None,
    block: int | None = None,
) -> Tensor:
    """``eight_bits_linear_of`` in one launch of the kernel, for any number of rows.

    Where tiles are few, several programs share each, every one with a part of the columns.
    """
    (rows, columns), outputs = x.numbers.shape, len(weight)
    how = how or tile_for(rows, _block_tiles(weight) if block else _TILES)
    assert block in (None, how.numbers), f"blocks of {block} columns, steps of {how.numbers}"
    how = how.fitted(how.numbers * (how.rows + how.outputs), weight.device)
    sums = torch.int32 if weight.dtype == torch.int8 else torch.float32
    sharing = SplitK.of(how, rows, outputs, columns, weight, sums, x.counters)
    out, early = weight.new_empty(rows, outputs, dtype=dtype), starts_early(weight)
    with launching_on(weight):
        gemm_kernel[(how.count(rows, outputs), sharing.split)](
            x.numbers, x.scale, weight, scale, out, sharing.sums, sharing.counters, rows, outputs, columns,
            BLOCK_M=how.rows, BLOCK_N=how.outputs, BLOCK_K=how.numbers, EVEN_K=columns % how.numbers == 0,
            SPLIT_K=sharing.split, NUM_STAGES=how.stages, BLOCKS=block is not None, EARLY=early,
            num_warps=how.warps, **launch_options(early),
        )  # fmt: skip
    return out


@operator(
    lambda numbers, _token_scale, _counters, weight, _scale, dtype, _block=None: numbers.new_empty(
        len(numbers), len(weight), dtype=dtype
    )
)
def eight_bits_linear_of(
    numbers: Tensor,
    token_scale: Tensor,
    counters: Tensor,
    weight: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    block: int | None = None,
) -> Tensor:
    """``eight_bits_linear`` of ``QuantisedRows``, ``(rows, rows of the weight)`` in that dtype."""
    return _product(QuantisedRows(numbers, token_scale, counters), weight, scale, dtype, block)


@operator(lambda x, weight, _scale, _block=None: x.new_empty(*x.shape[:-1], len(weight)))
def eight_bits_linear(x: Tensor, weight: Tensor, scale: Tensor, block: int | None = None) -> Tensor:
    """``x @ (weight * scale).T`` for x ``(..., columns)`` of 16 bits, rounded as the weight is.

    The weight is int8 or float8_e4m3fn, ``(rows, columns)``. The scale is of rows, ``(rows, 1)`` of 16 bits, and x is
    rounded token by token; or of blocks of so many rows and columns, ``(rows / block, columns / block)`` in float32,
    and x is rounded in groups of as many columns.
    """
    inputs = x.reshape(-1, x.shape[-1]).contiguous()
    y = _product(quantise_rows(inputs, weight.dtype, block), weight, scale, x.dtype, block)
    return y.view(*x.shape[:-1], len(weight))


def _product(x: QuantisedRows, weight: Tensor, scale: Tensor, dtype: torch.dtype, block: int | None) -> Tensor:
    rows = len(x.numbers)
    if weight.dtype == torch.int8 or rows <= MOST_ROWS or (block is not None and not _has_library_gemm(weight, block)):
        return gemm(x, weight, scale, dtype, block=block)
    numbers, row_scale = x.numbers, x.scale
    if block is not None:
        more = -rows % _ALIGNED
        numbers = functional.pad(numbers.view(torch.uint8), (0, 0, 0, more)).view(numbers.dtype) if more else numbers
        row_scale = functional.pad(row_scale.t(), (0, more)).contiguous().t()  # a group of columns after the other
    weight_scale = scale.float().t()
    y = torch._scaled_mm(numbers, weight.t(), row_scale, weight_scale, out_dtype=torch.bfloat16)
    return y[:rows].to(dtype)


def _has_library_gemm(weight: Tensor, block: int) -> bool:
    """Return whether cuBLAS multiplies a weight with scales of blocks: on Hopper GPUs, from CUDA 12.9 on."""
    rows, columns = weight.shape
    is_aligned = rows % block == 0 and columns % (_ALIGNED * block) == 0
    return is_aligned and _LIBRARY_HAS_BLOCKS and torch.cuda.get_device_capability(weight.device) == (9, 0)


def _block_tiles(weight: Tensor) -> dict[int, Tile]:
    return _OF_MANY_OUTPUTS if len(weight) >= _BLOCK * gpu.processors(weight.device) else _BLOCK_TILES


# The Triton kernel.

_BESIDE = tl.constexpr(8)  # tiles of outputs whose programs run at the same time, so that L2 holds what they read
_EXACT = tl.constexpr(128)  # products of 8-bit floating point that a tensor core adds up before float32 does


@jit(do_not_specialize=["m"])
def gemm_kernel(
    x_ptr, scale_ptr, weight_ptr, weight_scale_ptr, out_ptr, partial_ptr, counters_ptr, m, n, n_cols,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    SPLIT_K: tl.constexpr, NUM_STAGES: tl.constexpr, BLOCKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """``weight @ x.T``, times both scales. Tiles of _BESIDE outputs take all rows before the next ones come.

    BLOCKS: scales are of BLOCK_K rows and columns of the weight, in which a tile lies, and of BLOCK_K columns of x.
    """
    high, wide = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    tile = tl.program_id(0)
    first = tile // (_BESIDE * high) * _BESIDE
    extra = tl.minimum(wide - first, _BESIDE)
    start_column = (first + tile % (_BESIDE * high) % extra) * BLOCK_N
    column = start_column + tl.arange(0, BLOCK_N)
    row = tile % (_BESIDE * high) // extra * BLOCK_M + tl.arange(0, BLOCK_M)
    offsets = tl.arange(0, BLOCK_K)
    weights = weight_ptr + tl.minimum(column, n - 1).to(tl.int64)[:, None] * n_cols + offsets[None, :]
    inputs = x_ptr + tl.minimum(row, m - 1).to(tl.int64)[:, None] * n_cols + offsets[None, :]
    groups = tl.cdiv(n_cols, BLOCK_K)
    full: tl.constexpr = weight_ptr.dtype.element_ty == tl.int8
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.int32 if full else tl.float32)
    for start in tl.range(tl.program_id(1) * BLOCK_K, n_cols, SPLIT_K * BLOCK_K, num_stages=NUM_STAGES):
        there = True if EVEN_K else (start + offsets < n_cols)[None, :]
        values_in = tl.load(inputs + start, mask=(row < m)[:, None] & there, other=0.0)
        taken = tl.load(weights + start, mask=there, other=0.0)
        if BLOCKS:
            of_row = tl.load(scale_ptr + row * groups + start // BLOCK_K, mask=row < m, other=0.0)
            of_block = tl.load(weight_scale_ptr + start_column // BLOCK_K * groups + start // BLOCK_K)
            total += tl.dot(taken, tl.trans(values_in)) * (of_row * of_block)[None, :]
        elif full:
            total = tl.dot(taken, tl.trans(values_in), total, out_dtype=tl.int32)
        else:
            exact: tl.constexpr = _EXACT if _EXACT < BLOCK_K else BLOCK_K
            total = tl.dot(taken, tl.trans(values_in), total, max_num_imprecise_acc=exact)
    total, last = split_k_reduce(total, partial_ptr, counters_ptr, tile, tl.program_id(1), SPLIT_K)
    if not BLOCKS:
        of_row = tl.load(scale_ptr + row, mask=row < m, other=0.0)
        of_column = tl.load(weight_scale_ptr + column, mask=column < n, other=0.0).to(tl.float32)
        total = total.to(tl.float32) * of_row[None, :] * of_column[:, None]
    place = row.to(tl.int64)[:, None] * n + column[None, :]
    result = tl.trans(total).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place, result, mask=(row < m)[:, None] & (column < n)[None, :] & last)
