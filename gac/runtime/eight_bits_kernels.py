"""The Triton kernel of GEMMs of 8 bits: launched by ``gac.runtime.eight_bits_gemm``."""

try:
    import triton
    import triton.language as tl

    from .tile_kernels import together
except ImportError as failure:  # transformers looks for what files import, but not here: a CPU needs no Triton
    raise RuntimeError("Triton is not installed") from failure

_BESIDE = tl.constexpr(8)  # tiles of outputs whose programs run at the same time, so that L2 holds what they read
_EXACT = tl.constexpr(128)  # products of 8-bit floating point that a tensor core adds up before float32 does


@triton.jit(do_not_specialize=["m"])  # type: ignore[untyped-decorator]
def multiply(  # type: ignore[no-untyped-def]
    x, scale, weight, of_weight, out, sums, counters, m, n, size,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, NUMBERS: tl.constexpr, EVEN: tl.constexpr,
    SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``weight @ x.T``, times both scales. Tiles of _BESIDE outputs take all rows before the next ones come."""
    high, wide = tl.cdiv(m, ROWS), tl.cdiv(n, OUTPUTS)
    tile = tl.program_id(0)
    first = tile // (_BESIDE * high) * _BESIDE
    beside = tl.minimum(wide - first, _BESIDE)
    column = (first + tile % (_BESIDE * high) % beside) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tile % (_BESIDE * high) // beside * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, NUMBERS)
    weights = weight + tl.minimum(column, n - 1).to(tl.int64)[:, None] * size + at[None, :]
    inputs = x + tl.minimum(row, m - 1).to(tl.int64)[:, None] * size + at[None, :]
    whole: tl.constexpr = weight.dtype.element_ty == tl.int8
    total = tl.zeros((OUTPUTS, ROWS), tl.int32 if whole else tl.float32)
    for start in tl.range(tl.program_id(1) * NUMBERS, size, SPLIT * NUMBERS, num_stages=STAGES):
        there = True if EVEN else (start + at < size)[None, :]
        given = tl.load(inputs + start, mask=there, other=0.0)
        taken = tl.load(weights + start, mask=there, other=0.0)
        if whole:
            total = tl.dot(taken, tl.trans(given), total, out_dtype=tl.int32)
        else:
            exact: tl.constexpr = _EXACT if _EXACT < NUMBERS else NUMBERS
            total = tl.dot(taken, tl.trans(given), total, max_num_imprecise_acc=exact)
    total, last = together(total, sums, counters, tile, tl.program_id(1), SPLIT)
    of_row = tl.load(scale + row, mask=row < m, other=0.0)
    of_column = tl.load(of_weight + column, mask=column < n, other=0.0).to(tl.float32)
    result = tl.trans(total.to(tl.float32) * of_row[None, :] * of_column[:, None]).to(out.dtype.element_ty)
    place = row.to(tl.int64)[:, None] * n + column[None, :]
    tl.store(out + place, result, mask=(row < m)[:, None] & (column < n)[None, :] & last)
