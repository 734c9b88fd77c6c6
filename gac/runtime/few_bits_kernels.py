"""How Triton kernels read weights of few bits as ``gac.runtime.packed`` lays them, and make 16-bit numbers of them.

Two numbers of a word that lie half of it apart are moved into the halves of another, and become floating point
without being converted: their bits are put where they are worth 1, 2, 4... in the mantissa of 1024 (float16) or 128
(bfloat16), which is called the base here. Products with groups leave it there, and take it away from sums; else it is
taken away at once, with the middle of the numbers' range. 8 bits are one more than bfloat16 has there: the highest of
them goes into what is taken away. All of it is exact.

Products take columns in another order, so that every thread multiplies the words that it reads.
"""

try:
    import triton
    import triton.language as tl
except ImportError as failure:  # transformers looks for what files import, but not here: a CPU needs no Triton
    raise RuntimeError("Triton is not installed") from failure


@triton.jit  # type: ignore[untyped-decorator]
def _words_at(at, there, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A word of each place, or the three of 32 numbers of 3 bits."""
    first = tl.load(at, mask=there, other=0)
    if BITS == 3:
        return first, tl.load(at + 1, mask=there, other=0), tl.load(at + 2, mask=there, other=0)
    else:  # noqa: RET505 - Triton compiles one branch alone
        return first, first, first


@triton.jit  # type: ignore[untyped-decorator]
def _pairs(first, second, third, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers 0, 1... of the first half of each unit below those of the second: int32, ``(rows, units, pairs)``."""
    if BITS == 3:  # 96 bits become four words, each of four numbers of the first 48 and four of the last 48
        low: tl.constexpr = 0xFFFF
        high: tl.constexpr = -0x10000
        a = (first & low) | (second & high)
        b = ((first >> 12) & low) | ((((second >> 12) & 0xFFFFF) | (third << 20)) & high)
        c = ((((first >> 24) & 0xFF) | (second << 8)) & low) | ((third << 8) & high)
        d = ((second >> 4) & low) | ((third >> 4) & high)
        words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (first.shape[0], first.shape[1] * 4))
        pairs = (words[:, :, None] >> (tl.arange(0, 4) * 3)[None, None, :]) & 0x00070007
        return tl.reshape(pairs, (first.shape[0], first.shape[1], 16))
    else:  # noqa: RET505
        return (first[:, :, None] >> (tl.arange(0, 16 // BITS) * BITS)[None, None, :]) & (((1 << BITS) - 1) * 0x10001)


@triton.jit  # type: ignore[untyped-decorator]
def _halves(words, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """The 16 bits of either half, as numbers."""
    low = words.to(tl.int16).to(dtype, bitcast=True)
    return tl.join(low, (words >> 16).to(tl.int16).to(dtype, bitcast=True))


@triton.jit  # type: ignore[untyped-decorator]
def numbers_of(  # type: ignore[no-untyped-def]
    words, magic, start,
    size: tl.constexpr, BITS: tl.constexpr, NUMBERS: tl.constexpr, WHOLE: tl.constexpr, BASE: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Numbers less ``2 ** (BITS - 1)``, or with the base: ``(rows, units, pairs, 2)``, from column ``start`` on.

    Args:
        words: where rows begin.
        start: for all rows, or ``(rows, 1)``.
        WHOLE: no number asked for lies behind the last column.
    """
    numbers: tl.constexpr = 32 if BITS == 3 else 32 // BITS
    count: tl.constexpr = 3 if BITS == 3 else 1
    unit = start // numbers + tl.arange(0, NUMBERS // numbers)[None, :]
    first, second, third = _words_at(words[:, None] + unit * count, True if WHOLE else unit < size // numbers, BITS)
    pairs = _pairs(first, second, third, BITS)
    if BASE:
        return _halves(pairs | magic, dtype)
    elif BITS == 8 and dtype == tl.bfloat16:  # noqa: RET505
        found = _halves((pairs & 0x007F007F) | magic, dtype).to(tl.float32)
        return (found - _halves((~pairs & 0x00800080) ^ magic, dtype).to(tl.float32)).to(dtype)
    else:
        found = _halves(pairs | magic, dtype).to(tl.float32) - (base_of(dtype) + (1 << (BITS - 1)))
        return found.to(dtype)


@triton.jit  # type: ignore[untyped-decorator]
def base_of(dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    return 1024.0 if dtype == tl.float16 else 128.0


@triton.jit  # type: ignore[untyped-decorator]
def in_order(  # type: ignore[no-untyped-def]
    numbers, ROWS: tl.constexpr, NUMBERS: tl.constexpr, PAIRS: tl.constexpr, ACROSS: tl.constexpr, DEEP: tl.constexpr
):
    """``numbers_of`` as ``(ROWS, NUMBERS)``, the columns as ``column_of`` has them."""
    blocks: tl.constexpr = NUMBERS // (2 * PAIRS * DEEP * ACROSS)
    apart = tl.permute(tl.reshape(numbers, (ROWS, blocks, ACROSS, DEEP, PAIRS, 2)), (0, 1, 3, 4, 2, 5))
    return tl.reshape(apart, (ROWS, NUMBERS))


@triton.jit  # type: ignore[untyped-decorator]
def column_of(at, PAIRS: tl.constexpr, ACROSS: tl.constexpr, DEEP: tl.constexpr):  # type: ignore[no-untyped-def]
    """The column that products take in such a place.

    ACROSS threads beside each other read DEEP units of 2 PAIRS numbers each. They take numbers 0 and PAIRS of their
    first units, thread by thread, then 1 and PAIRS + 1, and so on.
    """
    thread = at // 2 % ACROSS
    pair = at // (2 * ACROSS) % PAIRS
    deep = at // (2 * ACROSS * PAIRS) % DEEP
    block = at // (2 * ACROSS * PAIRS * DEEP)
    return ((block * ACROSS + thread) * DEEP + deep) * 2 * PAIRS + pair + at % 2 * PAIRS


@triton.jit  # type: ignore[untyped-decorator]
def off(  # type: ignore[no-untyped-def]
    zeros, row, group, there, groups,
    BITS: tl.constexpr, OWN_ZERO: tl.constexpr, BASE: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """How far zero points lie above the 0 of ``numbers_of``: float32, for rows and groups beside each other.

    Zero points are packed across the rows.
    """
    if OWN_ZERO:
        bit = row * BITS
        found = tl.load(zeros + bit // 32 * groups + group, mask=there, other=0) >> (bit % 32)
        if BITS == 3:
            over = (bit % 32) > 29
            behind = tl.load(zeros + (bit // 32 + 1) * groups + group, mask=there & over, other=0)
            left = tl.where(over, 32 - bit % 32, 0)
            found = tl.where(over, (found & ((1 << left) - 1)) | (behind << left), found)
        zero = (found & ((1 << BITS) - 1)).to(tl.float32)
    else:
        zero = tl.zeros_like(row + group).to(tl.float32) + (1 << (BITS - 1))
    return zero + base_of(dtype) if BASE else zero - (1 << (BITS - 1))
