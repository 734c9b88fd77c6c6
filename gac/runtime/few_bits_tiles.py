"""Triton kernels that make 16-bit numbers of weights of few bits, two at a time: launched by ``gac.runtime.few_bits``.

Two numbers of a word that lie half of it apart are moved into the halves of another, and become floating point
without being converted: their bits are put where they are worth 1, 2, 4... in the mantissa of 1024 (float16) or 128
(bfloat16), and that is taken away, with the middle of their range. 8 bits are one more than bfloat16 has there: the
highest of them goes into what is taken away. All of it is exact.

A product takes columns in another order, so that every thread multiplies the words that it reads: ``arrange`` writes
the inputs in that order.
"""

try:
    import triton
    import triton.language as tl

    from .few_bits_kernels import in_halves, zero_points
    from .fragments import halves
    from .tile_kernels import clear, together
except ImportError as failure:  # transformers looks for what files import, but not here: a CPU needs no Triton
    raise RuntimeError("Triton is not installed") from failure


@triton.jit  # type: ignore[untyped-decorator]
def _words_at(at, there, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A word of each place, or the three of 32 numbers of 3 bits."""
    first = tl.load(at, mask=there, other=0)
    if BITS == 3:
        return first, tl.load(at + 1, mask=there, other=0), tl.load(at + 2, mask=there, other=0)
    else:  # noqa: RET505
        return first, first, first


@triton.jit  # type: ignore[untyped-decorator]
def _pairs(first, second, third, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers 0, 1... of the first half of each unit below those of the second: int32, ``(rows, units, pairs)``."""
    if BITS == 3:  # 96 bits become four words, each of four numbers of the first 48 and four of the last 48
        a, b, c, d = in_halves(first, second, third)
        words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (first.shape[0], first.shape[1] * 4))
        pairs = (words[:, :, None] >> (tl.arange(0, 4) * 3)[None, None, :]) & 0x00070007
        return tl.reshape(pairs, (first.shape[0], first.shape[1], 16))
    else:  # noqa: RET505 - Triton compiles one branch alone
        return (first[:, :, None] >> (tl.arange(0, 16 // BITS) * BITS)[None, None, :]) & (((1 << BITS) - 1) * 0x10001)


@triton.jit  # type: ignore[untyped-decorator]
def _numbers(  # type: ignore[no-untyped-def]
    words, row, magic, start, size,
    BITS: tl.constexpr, NUMBERS: tl.constexpr, EVEN: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Numbers less ``2 ** (BITS - 1)``, ``(rows, units, pairs, 2)``, of some rows' words from column ``start`` on."""
    numbers: tl.constexpr = 32 if BITS == 3 else 32 // BITS
    whole: tl.constexpr = 3 if BITS == 3 else 1
    units = size // 32 * (32 // numbers)  # of a row: so the compiler knows what divides them
    unit = start // numbers + tl.arange(0, NUMBERS // numbers)
    there = True if EVEN else (unit < units)[None, :]
    at = words + row.to(tl.int64)[:, None] * (units * whole) + unit[None, :] * whole
    first, second, third = _words_at(at, there, BITS)
    pairs = _pairs(first, second, third, BITS)
    if BITS == 8 and dtype == tl.bfloat16:
        found = halves((pairs & 0x007F007F) | magic, dtype).to(tl.float32)
        found -= halves((~pairs & 0x00800080) ^ magic, dtype).to(tl.float32)
    else:
        least: tl.constexpr = 1024.0 if dtype == tl.float16 else 128.0
        found = halves(pairs | magic, dtype).to(tl.float32) - (least + (1 << (BITS - 1)))
    return found.to(dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _off(zeros, row, group, groups, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """How far zero points of a group lie above ``2 ** (BITS - 1)``, float32."""
    return zero_points(zeros, row, group, True, groups, BITS) - (1 << (BITS - 1))


@triton.jit(do_not_specialize=["count", "m"])  # type: ignore[untyped-decorator]
def arrange(  # type: ignore[no-untyped-def]
    x, out, sums, counters, count, m, size, width,
    PAIRS: tl.constexpr, ACROSS: tl.constexpr, DEEP: tl.constexpr, STEP: tl.constexpr,
    AT_ONCE: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Columns of x in the order in which ``matrix`` takes them, zeros behind the last column and row.

    ACROSS threads beside each other read DEEP units of 2 PAIRS numbers each. They take numbers 0 and PAIRS of their
    first units, thread by thread, then 1 and PAIRS + 1, and so on. Sums of STEP columns are written too, and the
    counters of ``matrix`` cleared.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    thread = at // 2 % ACROSS
    pair = at // (2 * ACROSS) % PAIRS
    deep = at // (2 * ACROSS * PAIRS) % DEEP
    block = at // (2 * ACROSS * PAIRS * DEEP)
    column = ((block * ACROSS + thread) * DEEP + deep) * 2 * PAIRS + pair + at % 2 * PAIRS
    given = tl.load(x + row * size + column, mask=(column < size) & (row < m), other=0.0)
    tl.store(out + row * width + at, given, mask=at < width)
    many: tl.constexpr = AT_ONCE // STEP
    step = tl.program_id(1) * many + tl.arange(0, many)
    found = tl.sum(tl.reshape(given.to(tl.float32), (many, STEP)), axis=1)
    tl.store(sums + step * tl.num_programs(0) + row, found, mask=step * STEP < width)
    if tl.program_id(0) + tl.program_id(1) == 0:
        clear(counters, count, MOST)


@triton.jit(do_not_specialize=["m", "groups"])  # type: ignore[untyped-decorator]
def matrix(  # type: ignore[no-untyped-def]
    x, inputs, words, scale, zeros, out, sums, counters, m, n, size, groups, magic,
    BITS: tl.constexpr, GROUP: tl.constexpr, OWN_ZERO: tl.constexpr, ACROSS: tl.constexpr, DEEP: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, NUMBERS: tl.constexpr, EVEN: tl.constexpr,
    SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``weight @ x.T`` for x as ``arrange`` left it: numbers go from registers into it.

    They are multiplied as whole numbers. The sums of a step are scaled then, less ``inputs`` times its zero point.
    """
    column = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    dtype: tl.constexpr = x.dtype.element_ty
    pairs: tl.constexpr = 16 if BITS == 3 else 16 // BITS
    blocks: tl.constexpr = NUMBERS // (2 * pairs * DEEP * ACROSS)
    held = tl.minimum(column, n - 1)
    filled = tl.cdiv(size, NUMBERS) * NUMBERS
    given_at = x + row.to(tl.int64)[:, None] * filled + tl.arange(0, NUMBERS)[None, :]
    of_row = scale + held * (groups if GROUP else 1)
    inputs += row
    begin = tl.program_id(2) * NUMBERS
    step: tl.constexpr = SPLIT * NUMBERS
    group = begin // GROUP if GROUP else 0
    scales = tl.load(of_row + group)
    off = tl.zeros((OUTPUTS,), tl.float32)
    if OWN_ZERO:
        off = _off(zeros, held, group, groups, BITS)
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for start in tl.range(begin, size, step, num_stages=STAGES):
        numbers = _numbers(words, held, magic, start, size, BITS, NUMBERS, EVEN, dtype)
        numbers = tl.permute(tl.reshape(numbers, (OUTPUTS, blocks, ACROSS, DEEP, pairs, 2)), (0, 1, 3, 4, 2, 5))
        given = tl.trans(tl.load(given_at + start))
        if GROUP:
            coming = tl.minimum(start + step, size - 1) // GROUP  # loaded a step before
            next_scales = tl.load(of_row + coming)
            found = tl.dot(tl.reshape(numbers, (OUTPUTS, NUMBERS)), given)
            if OWN_ZERO:
                given_sums = tl.load(inputs + start // NUMBERS * (tl.num_programs(1) * ROWS))
                found -= off[:, None] * given_sums[None, :]
                off = _off(zeros, held, coming, groups, BITS)
            total += scales.to(tl.float32)[:, None] * found
            scales = next_scales
        else:
            total = tl.dot(tl.reshape(numbers, (OUTPUTS, NUMBERS)), given, total)
    if not GROUP:
        total *= scales.to(tl.float32)[:, None]
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    total, last = together(total, sums, counters, tile, tl.program_id(2), SPLIT)
    place = row.to(tl.int64)[:, None] * n + column[None, :]
    tl.store(out + place, tl.trans(total).to(dtype), mask=(row < m)[:, None] & (column < n)[None, :] & last)


@triton.jit(do_not_specialize=["groups"])  # type: ignore[untyped-decorator]
def unpack(  # type: ignore[no-untyped-def]
    words, scale, zeros, out, n, size, groups, magic,
    BITS: tl.constexpr, GROUP: tl.constexpr, OWN_ZERO: tl.constexpr,
    OUTPUTS: tl.constexpr, NUMBERS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Write the weight: whole numbers times scales, less zero points times scales, rounded once; all else is exact."""
    row = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    start = tl.program_id(1) * NUMBERS
    dtype: tl.constexpr = out.dtype.element_ty
    held = tl.minimum(row, n - 1)
    group = start // GROUP if GROUP else 0
    scales = tl.load(scale + held * (groups if GROUP else 1) + group).to(tl.float32)
    numbers = _numbers(words, held, magic, start, size, BITS, NUMBERS, EVEN, dtype)
    values = tl.reshape(tl.permute(numbers, (0, 1, 3, 2)), (OUTPUTS, NUMBERS)).to(tl.float32) * scales[:, None]
    if OWN_ZERO:
        values -= (_off(zeros, held, group, groups, BITS) * scales)[:, None]
    at = start + tl.arange(0, NUMBERS)
    inside = (row < n)[:, None] & (at < size)[None, :]
    tl.store(out + row.to(tl.int64)[:, None] * size + at[None, :], values.to(dtype), mask=inside)
