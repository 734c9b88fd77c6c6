"""The Triton kernel of one row and a weight of few bits: launched by ``gac.runtime.few_bits``."""

try:
    import triton
    import triton.language as tl

    from .few_bits_kernels import column_of, in_order, numbers_of, off
except ImportError as failure:  # transformers looks for what files import, but not here: a CPU needs no Triton
    raise RuntimeError("Triton is not installed") from failure

_LEAST = tl.constexpr(8)
"""Columns of a product of tensor cores. The row takes the place of each."""
_AT_ONCE = tl.constexpr(4096)
"""Inputs that are added up at a time."""


@triton.jit(do_not_specialize=["n"])  # type: ignore[untyped-decorator]
def vector(  # type: ignore[no-untyped-def]
    x, words, scale, zeros, out, n, magic,
    size: tl.constexpr, width: tl.constexpr, groups: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, OWN_ZERO: tl.constexpr, BASE: tl.constexpr,
    PAIRS: tl.constexpr, ACROSS: tl.constexpr, DEEP: tl.constexpr,
    OUTPUTS: tl.constexpr, NUMBERS: tl.constexpr, SLICES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``weight @ x`` on tensor cores. Warps have the same OUTPUTS; each takes every SLICES-th NUMBERS columns.

    Sums of a step are scaled. Zero points times the inputs of each group are taken away at the end.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    step: tl.constexpr = SLICES * NUMBERS
    whole: tl.constexpr = size % step == 0
    column = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    held = tl.minimum(column, n - 1)
    slice = tl.arange(0, SLICES)
    at = slice[:, None] * NUMBERS + column_of(tl.arange(0, NUMBERS), PAIRS, ACROSS, DEEP)[None, :]
    each = tl.reshape(tl.broadcast_to(held[None, :], (SLICES, OUTPUTS)), (SLICES * OUTPUTS,))
    own = tl.reshape(tl.broadcast_to(slice[:, None], (SLICES, OUTPUTS)), (SLICES * OUTPUTS, 1)) * NUMBERS
    by_row = words + each.to(tl.int64) * width
    of_row = scale + held[None, :] * (groups if GROUP else 1)
    coming = tl.load(x + at, mask=at < size, other=0.0)
    group = slice[:, None] * NUMBERS // GROUP if GROUP else slice[:, None] * 0
    next_scales = tl.load(of_row + group, mask=group < groups if GROUP else True, other=0.0)
    total = tl.zeros((SLICES, OUTPUTS, _LEAST), tl.float32)
    for start in tl.range(0, size, step, num_stages=STAGES):
        numbers = numbers_of(by_row, magic, start + own, size, BITS, NUMBERS, whole, BASE, dtype)
        numbers = tl.reshape(
            in_order(numbers, SLICES * OUTPUTS, NUMBERS, PAIRS, ACROSS, DEEP), (SLICES, OUTPUTS, NUMBERS)
        )
        given, scales = coming, next_scales
        ahead = start + step + at
        coming = tl.load(x + ahead, mask=ahead < size, other=0.0)
        if GROUP:
            group = (start + step + slice[:, None] * NUMBERS) // GROUP
            next_scales = tl.load(of_row + group, mask=group < groups, other=0.0)
        found = tl.dot(numbers, tl.broadcast_to(given[:, :, None], (SLICES, NUMBERS, _LEAST)))
        total += scales.to(tl.float32)[:, :, None] * found
    result = tl.sum(tl.sum(total, axis=2), axis=0) * (1.0 / _LEAST)
    if GROUP and (BASE or OWN_ZERO):
        result -= _zeros(x, scale, zeros, held, size, groups, BITS, GROUP, OWN_ZERO, BASE)
    tl.store(out + column, result.to(dtype), mask=column < n)


@triton.jit  # type: ignore[untyped-decorator]
def _zeros(  # type: ignore[no-untyped-def]
    x, scale, zeros, row,
    size: tl.constexpr, groups: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, OWN_ZERO: tl.constexpr,
    BASE: tl.constexpr,
):  # fmt: skip
    """What zero points and the base add to each row of the weight."""
    many: tl.constexpr = max(_AT_ONCE // GROUP, 1)
    total = tl.zeros_like(row).to(tl.float32)
    for first in tl.range(0, groups, many):
        group = first + tl.arange(0, many)
        at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        inputs = tl.sum(tl.load(x + at, mask=at < size, other=0.0).to(tl.float32), axis=1)
        there = (group < groups)[None, :]
        scales = tl.load(scale + row[:, None] * groups + group[None, :], mask=there, other=0.0).to(tl.float32)
        above = off(zeros, row[:, None], group[None, :], there, groups, BITS, OWN_ZERO, BASE, x.dtype.element_ty)
        total += tl.sum(scales * above * inputs[None, :], axis=1)
    return total
