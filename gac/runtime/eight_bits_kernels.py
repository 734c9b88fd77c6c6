"""Triton kernels around GEMMs of 8 bits: launched by ``gac.runtime.eight_bits_gemm``."""

try:
    import triton
    import triton.language as tl
except ImportError as failure:  # transformers looks for what files import, but not here: a CPU needs no Triton
    raise RuntimeError("Triton is not installed") from failure

_ROUNDING = tl.constexpr(12582912.0)  # 1.5 * 2^23: added and taken away, it leaves whole numbers, ties to even
_TINY = tl.constexpr(2.0**-126)


@triton.jit  # type: ignore[untyped-decorator]
def round_rows(x, numbers, scale, size, MOST: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program takes a row: its largest number, the scale, and the numbers in one pass."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDE)
    value = tl.load(x + row * size + at, mask=at < size, other=0.0).to(tl.float32)
    own = tl.maximum(tl.div_rn(tl.max(tl.abs(value), axis=0), MOST), _TINY)
    part = tl.div_rn(1.0, own)
    units = value * part
    units = tl.fma(tl.fma(-units, own, value), part, units)  # as a division rounds
    if numbers.dtype.element_ty == tl.int8:
        units = (units + _ROUNDING) - _ROUNDING
    tl.store(numbers + row * size + at, units.to(numbers.dtype.element_ty), mask=at < size)
    tl.store(scale + row, own)


@triton.jit  # type: ignore[untyped-decorator]
def rescale(sums, scale, of_weight, out, n, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program takes some columns of a row: whole numbers, times the scales of row and column."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < n
    total = tl.load(sums + row * n + at, mask=inside, other=0).to(tl.float32)
    own = tl.load(of_weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * n + at, (total * tl.load(scale + row) * own).to(out.dtype.element_ty), mask=inside)
