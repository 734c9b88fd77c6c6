"""Triton kernels of some rows and a weight of few bits, and of a weight that is written in 16 bits.

``gac.runtime.few_bits`` launches them. ``arrange`` writes inputs in the order in which ``matrix`` takes columns.
"""

try:
    import triton
    import triton.language as tl

    from .few_bits_kernels import column_of, in_order, numbers_of, off
    from .tile_kernels import clear, together
except ImportError as failure:  # transformers looks for what files import, but not here: a CPU needs no Triton
    raise RuntimeError("Triton is not installed") from failure


@triton.jit(do_not_specialize=["count", "m"])  # type: ignore[untyped-decorator]
def arrange(  # type: ignore[no-untyped-def]
    x, out, sums, counters, count, m, size, width,
    PAIRS: tl.constexpr, ACROSS: tl.constexpr, DEEP: tl.constexpr, STEP: tl.constexpr,
    AT_ONCE: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Columns of x in the order in which ``matrix`` takes them, zeros behind the last column and row.

    Sums of STEP columns are written too, and the counters of ``matrix`` cleared.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    column = column_of(at, PAIRS, ACROSS, DEEP)
    given = tl.load(x + row * size + column, mask=(column < size) & (row < m), other=0.0)
    tl.store(out + row * width + at, given, mask=at < width)
    many: tl.constexpr = AT_ONCE // STEP
    step = tl.program_id(1) * many + tl.arange(0, many)
    found = tl.sum(tl.reshape(given.to(tl.float32), (many, STEP)), axis=1)
    tl.store(sums + step * tl.num_programs(0) + row, found, mask=step * STEP < width)
    if tl.program_id(0) + tl.program_id(1) == 0:
        clear(counters, count, MOST)


@triton.jit(do_not_specialize=["m"])  # type: ignore[untyped-decorator]
def matrix(  # type: ignore[no-untyped-def]
    x, inputs, words, scale, zeros, out, sums, counters, m, n, magic,
    size: tl.constexpr, width: tl.constexpr, groups: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, OWN_ZERO: tl.constexpr, BASE: tl.constexpr,
    PAIRS: tl.constexpr, ACROSS: tl.constexpr, DEEP: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, NUMBERS: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``weight @ x.T`` for x as ``arrange`` left it: numbers go from registers into it.

    They are multiplied as whole numbers. The sums of a step are scaled then, less ``inputs`` times its zero point and
    the base.
    """
    column = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    dtype: tl.constexpr = x.dtype.element_ty
    shifted: tl.constexpr = GROUP > 0 and (BASE or OWN_ZERO)
    held = tl.minimum(column, n - 1)
    by_row = words + held.to(tl.int64) * width
    filled: tl.constexpr = (size + NUMBERS - 1) // NUMBERS * NUMBERS
    given_at = x + row.to(tl.int64)[:, None] * filled + tl.arange(0, NUMBERS)[None, :]
    of_row = scale + held * (groups if GROUP else 1)
    inputs += row
    begin = tl.program_id(2) * NUMBERS
    step: tl.constexpr = SPLIT * NUMBERS
    group = begin // GROUP if GROUP else 0
    scales = tl.load(of_row + group)
    above = off(zeros, held, group, True, groups, BITS, OWN_ZERO, BASE, dtype)
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for start in tl.range(begin, size, step, num_stages=STAGES):
        numbers = numbers_of(by_row, magic, start, size, BITS, NUMBERS, size % NUMBERS == 0, BASE, dtype)
        numbers = in_order(numbers, OUTPUTS, NUMBERS, PAIRS, ACROSS, DEEP)
        given = tl.trans(tl.load(given_at + start))
        if GROUP:
            coming = tl.minimum(start + step, size - 1) // GROUP  # loaded a step before
            next_scales = tl.load(of_row + coming)
            found = tl.dot(numbers, given)
            if shifted:
                given_sums = tl.load(inputs + start // NUMBERS * (tl.num_programs(1) * ROWS))
                found -= above[:, None] * given_sums[None, :]
                above = off(zeros, held, coming, True, groups, BITS, OWN_ZERO, BASE, dtype)
            total += scales.to(tl.float32)[:, None] * found
            scales = next_scales
        else:
            total = tl.dot(numbers, given, total)
    if not GROUP:
        total *= scales.to(tl.float32)[:, None]
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    total, last = together(total, sums, counters, tile, tl.program_id(2), SPLIT)
    place = row.to(tl.int64)[:, None] * n + column[None, :]
    tl.store(out + place, tl.trans(total).to(dtype), mask=(row < m)[:, None] & (column < n)[None, :] & last)


@triton.jit  # type: ignore[untyped-decorator]
def unpack(  # type: ignore[no-untyped-def]
    words, scale, zeros, out, n, magic,
    size: tl.constexpr, width: tl.constexpr, groups: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, OWN_ZERO: tl.constexpr,
    OUTPUTS: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    """Write the weight: whole numbers times scales, less zero points times scales, rounded once; all else is exact."""
    row = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    start = tl.program_id(1) * NUMBERS
    dtype: tl.constexpr = out.dtype.element_ty
    held = tl.minimum(row, n - 1)
    group = start // GROUP if GROUP else 0
    scales = tl.load(scale + held * (groups if GROUP else 1) + group).to(tl.float32)
    numbers = numbers_of(
        words + held.to(tl.int64) * width, magic, start, size, BITS, NUMBERS, size % NUMBERS == 0, False, dtype
    )
    values = tl.reshape(tl.permute(numbers, (0, 1, 3, 2)), (OUTPUTS, NUMBERS)).to(tl.float32) * scales[:, None]
    if OWN_ZERO:
        values -= (off(zeros, held, group, True, groups, BITS, True, False, dtype) * scales)[:, None]
    at = start + tl.arange(0, NUMBERS)
    inside = (row < n)[:, None] & (at < size)[None, :]
    tl.store(out + row.to(tl.int64)[:, None] * size + at[None, :], values.to(dtype), mask=inside)
