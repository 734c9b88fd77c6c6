"""Triton kernels that round rows to 8 bits: as they are, or as a norm makes them."""

try:
    import triton
    import triton.language as tl

    from .row_kernels import normed_values
    from .tile_kernels import clear
except ImportError as failure:  # transformers looks for what files import, but not here: a CPU needs no Triton
    raise RuntimeError("Triton is not installed") from failure

_ROUNDING = tl.constexpr(12582912.0)  # 1.5 * 2^23: added and taken away, it leaves whole numbers, ties to even
_TINY = tl.constexpr(2.0**-126)


@triton.jit
def nearest(units):  # type: ignore[no-untyped-def]
    """The nearest whole numbers, ties to even, of numbers below 2^22."""
    return (units + _ROUNDING) - _ROUNDING


@triton.jit  # type: ignore[untyped-decorator]
def _round_row(  # type: ignore[no-untyped-def]
    value, row, at, size, numbers, scale, counters, MOST: tl.constexpr, COUNTERS: tl.constexpr
):
    """Write a row's scale, which its largest number sets, and its numbers. The first one clears counters."""
    own = tl.maximum(tl.div_rn(tl.max(tl.abs(value), axis=0), MOST), _TINY)
    part = tl.div_rn(1.0, own)
    units = value * part
    units = tl.fma(tl.fma(-units, own, value), part, units)  # as a division rounds
    if numbers.dtype.element_ty == tl.int8:
        units = nearest(units)
    tl.store(numbers + row * size + at, units.to(numbers.dtype.element_ty), mask=at < size)
    tl.store(scale + row, own)
    if row == 0:
        clear(counters, COUNTERS, COUNTERS)


@triton.jit  # type: ignore[untyped-decorator]
def round_rows(  # type: ignore[no-untyped-def]
    x, numbers, scale, counters, size, MOST: tl.constexpr, WIDE: tl.constexpr, COUNTERS: tl.constexpr
):
    """A program takes a row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDE)
    value = tl.load(x + row * size + at, mask=at < size, other=0.0).to(tl.float32)
    _round_row(value, row, at, size, numbers, scale, counters, MOST, COUNTERS)


@triton.jit  # type: ignore[untyped-decorator]
def norm_rows(  # type: ignore[no-untyped-def]
    x, weight, whole, numbers, scale, counters, stride, size, eps,
    MOST: tl.constexpr, ADDED: tl.constexpr, WHOLE: tl.constexpr, WIDE: tl.constexpr, COUNTERS: tl.constexpr,
):  # fmt: skip
    """A program takes a row through an RMSNorm.

    ADDED: as of ``normed_values``. WHOLE: whether the row is written in 16 bits too; else one number stands for all
    rows, which is none.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDE)
    value = tl.load(x + row * stride + at, mask=at < size, other=0.0).to(tl.float32)
    gain = tl.load(weight + at, mask=at < size, other=0.0).to(tl.float32)
    value = normed_values(value, gain, size, eps, ADDED, x.dtype.element_ty)
    if WHOLE:
        tl.store(whole + row * size + at, value, mask=at < size)
    elif row == 0:
        tl.store(whole, float("nan"))
    _round_row(value.to(tl.float32), row, at, size, numbers, scale, counters, MOST, COUNTERS)
