"""A Triton kernel for one row and a weight of few bits as ``gac.runtime.packed`` lays it; and how words are read.

``gac.runtime.few_bits`` launches it. Tensor cores multiply: 16 rows of the weight are one matrix, and the other has the
row in its columns. The words are read as they lie, and their numbers are made in registers, two at a time. In bfloat16
a number becomes floating point without being converted: its bits are put where they are worth 1, 2, 4... in the
mantissa of 128. In float16 they are a number as they are, so many times 2^-24. Sums of the row take 128 and the zero
point away.
"""

try:
    import triton
    import triton.language as tl

    from .fragments import product
except ImportError as failure:  # transformers looks for what files import, but not here: a CPU needs no Triton
    raise RuntimeError("Triton is not installed") from failure

@triton.jit  # type: ignore[untyped-decorator]
def zero_points(zeros, row, group, there, groups, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Those of rows and groups, float32; they are packed across the rows."""
    bit = row * BITS
    found = tl.load(zeros + bit // 32 * groups + group, mask=there, other=0) >> (bit % 32)
    if BITS == 3:
        over = (bit % 32) > 29
        behind = tl.load(zeros + (bit // 32 + 1) * groups + group, mask=there & over, other=0)
        left = tl.where(over, 32 - bit % 32, 0)
        found = tl.where(over, (found & ((1 << left) - 1)) | (behind << left), found)
    return (found & ((1 << BITS) - 1)).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def words_at(at, there, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A word of each place, or the three of 32 numbers of 3 bits."""
    first = tl.load(at, mask=there, other=0)
    if BITS == 3:
        return first, tl.load(at + 1, mask=there, other=0), tl.load(at + 2, mask=there, other=0)
    else:  # noqa: RET505
        return first, first, first


@triton.jit  # type: ignore[untyped-decorator]
def in_halves(first, second, third):  # type: ignore[no-untyped-def]
    """Three words of 32 numbers of 3 bits as four: numbers 0 to 15 in lower halves, four in each, the others above."""
    low: tl.constexpr = 0xFFFF
    high: tl.constexpr = -0x10000
    a = (first & low) | (second & high)
    b = ((first >> 12) & low) | ((((second >> 12) & 0xFFFFF) | (third << 20)) & high)
    c = ((((first >> 24) & 0xFF) | (second << 8)) & low) | ((third << 8) & high)
    d = ((second >> 4) & low) | ((third >> 4) & high)
    return a, b, c, d


@triton.jit  # type: ignore[untyped-decorator]
def _in_turn(values):  # type: ignore[no-untyped-def]
    """Of values ``(threads, count)`` a tuple of count tensors; count is 1, 2 or 4."""
    threads: tl.constexpr = values.shape[0]
    count: tl.constexpr = values.shape[1]
    if count == 1:
        return (tl.reshape(values, (threads,)),)
    elif count == 2:  # noqa: RET505 - Triton compiles one branch alone
        return tl.split(values)
    else:
        even, odd = tl.split(tl.reshape(values, (threads, 2, 2)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        return first, second, third, fourth


@triton.jit  # type: ignore[untyped-decorator]
def _units(at, left, BITS: tl.constexpr, DEEP: tl.constexpr, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """DEEP neighbouring units of each thread, with zeros where fewer are left: tuples of words whose halves match."""
    many = tl.arange(0, DEEP)[None, :]
    there = True if WHOLE else many < left[:, None]
    if BITS == 3:
        first, second, third = words_at(at[:, None] + 3 * many, there, BITS)
        a, b, c, d = in_halves(first, second, third)
        return _in_turn(a), _in_turn(b), _in_turn(c), _in_turn(d)
    else:  # noqa: RET505
        return (_in_turn(tl.load(at[:, None] + many, mask=None if WHOLE else there, other=None if WHOLE else 0)),)


@triton.jit  # type: ignore[untyped-decorator]
def _pair(units, magic, UNIT: tl.constexpr, AT: tl.constexpr, BITS: tl.constexpr, PLANE: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Number AT of a unit below that half a unit further on; bfloat16 adds ``_more``, float16 has 2^-24 times them."""
    if BITS == 3:
        pair = units[AT // 4][UNIT] >> (AT % 4 * 3)
    else:
        pair = units[0][UNIT] >> (AT * BITS)
    if dtype == tl.float16:
        return pair & (((1 << BITS) - 1) * 0x10001)
    elif BITS < 8:  # noqa: RET505
        return (pair & (((1 << BITS) - 1) * 0x10001)) | magic
    else:  # seven bits, and the highest alone
        return (pair & (0x00800080 if PLANE else 0x007F007F)) | magic


@triton.jit  # type: ignore[untyped-decorator]
def _left(above, below, magic, UNIT: tl.constexpr, AT: tl.constexpr, BITS: tl.constexpr, PLANE: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """The matrix that has rows of the weight."""
    return (
        _pair(above, magic, UNIT, AT, BITS, PLANE, dtype),
        _pair(below, magic, UNIT, AT, BITS, PLANE, dtype),
        _pair(above, magic, UNIT, AT + 1, BITS, PLANE, dtype),
        _pair(below, magic, UNIT, AT + 1, BITS, PLANE, dtype),
    )


@triton.jit  # type: ignore[untyped-decorator]
def _inputs(given, AT: tl.constexpr, APART: tl.constexpr):  # type: ignore[no-untyped-def]
    """Number AT of what a thread has loaded below that APART further on: int32."""
    first = given[AT // 8][AT % 8 // 2]
    second = given[(AT + APART) // 8][(AT + APART) % 8 // 2]
    if AT % 2 == 0:
        return (first & 0xFFFF) | (second << 16)
    else:  # noqa: RET505
        return ((first >> 16) & 0xFFFF) | (second & -0x10000)


@triton.jit  # type: ignore[untyped-decorator]
def vector(  # type: ignore[no-untyped-def]
    x, words, scale, zeros, out, n, magic,
    size: tl.constexpr, width: tl.constexpr, groups: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, OWN_ZERO: tl.constexpr,
    TILES: tl.constexpr, PARTS: tl.constexpr, DEEP: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """A unit is a word, or the three words of 32 numbers of 3 bits. x is read as int32: two numbers of 16 bits.

    A warp multiplies 16 rows, PARTS warps the same. In a step a warp takes ``slots`` slots of columns. Of each slot
    four threads beside each other read DEEP units of a row. Sums are right where the slot of the weight is that of the
    row: of them thread j keeps those of slot j.
    """
    dtype: tl.constexpr = out.dtype.element_ty
    numbers: tl.constexpr = 32 if BITS == 3 else 32 // BITS
    whole: tl.constexpr = 3 if BITS == 3 else 1
    planes: tl.constexpr = 2 if BITS == 8 and dtype == tl.bfloat16 else 1
    slots: tl.constexpr = 4  # every two columns of the matrix that has the row hold another
    slot: tl.constexpr = 4 * DEEP * numbers
    step: tl.constexpr = slots * slot
    even: tl.constexpr = size % (PARTS * step) == 0
    ones: tl.constexpr = 0x3F803F80 if dtype == tl.bfloat16 else 0x3C003C00
    more: tl.constexpr = 128.0 * planes if dtype == tl.bfloat16 else 0.0
    large: tl.constexpr = 1.0 if dtype == tl.bfloat16 else 16777216.0
    thread = tl.arange(0, TILES * PARTS * 32)
    eighth, quarter = thread // 4 % 8, thread % 4
    tile = tl.program_id(0) * TILES + thread // (32 * PARTS)
    upper = tl.minimum(tile * 16 + eighth, n - 1)
    lower = tl.minimum(tile * 16 + 8 + eighth, n - 1)
    begin = thread // 32 % PARTS * step
    read = begin // numbers + quarter * DEEP
    of_upper = words + upper.to(tl.int64) * width + read * whole
    of_lower = words + lower.to(tl.int64) * width + read * whole
    input_at = begin + eighth // 2 * slot + quarter * (DEEP * numbers)
    one = tl.full((thread.shape[0],), ones, tl.int32)
    nothing = tl.zeros((thread.shape[0],), tl.float32)
    high, low = nothing, nothing
    high_scale, low_scale = nothing, nothing
    high_zero, low_zero = nothing + (1 << (BITS - 1)), nothing + (1 << (BITS - 1))
    if not GROUP:
        high_scale, low_scale = tl.load(scale + upper).to(tl.float32), tl.load(scale + lower).to(tl.float32)
    for start in tl.range(0, size, PARTS * step):
        loaded = ()
        for number in tl.static_range(slots):
            unit = start // numbers + number * (4 * DEEP)
            left = size // numbers - unit - read
            loaded += (
                _units(of_upper + unit * whole, left, BITS, DEEP, even),
                _units(of_lower + unit * whole, left, BITS, DEEP, even),
            )
        if GROUP:
            group = (start + begin + quarter * slot) // GROUP
            there = group < groups
            high_scale = tl.load(scale + upper * groups + group, mask=there, other=0.0).to(tl.float32)
            low_scale = tl.load(scale + lower * groups + group, mask=there, other=0.0).to(tl.float32)
            if OWN_ZERO:
                high_zero = zero_points(zeros, upper, group, there, groups, BITS)
                low_zero = zero_points(zeros, lower, group, there, groups, BITS)
        tl.debug_barrier()
        given = ()
        for chunk in tl.static_range(DEEP * numbers // 8):
            at = (start + input_at + chunk * 8) // 2
            there = None if even else ((at < size // 2)[:, None] & (tl.arange(0, 4) < 4)[None, :])
            of_chunk = tl.load(x + at[:, None] + tl.arange(0, 4)[None, :], mask=there, other=None if even else 0)
            given += (_in_turn(of_chunk),)
        inputs = ()
        for pair in tl.static_range(DEEP * numbers // 2):
            inputs += (_inputs(given, pair // (numbers // 2) * numbers + pair % (numbers // 2), numbers // 2),)
        sums = (nothing, nothing, nothing, nothing)
        for pair in tl.static_range(0, DEEP * numbers // 2, 2):
            sums = product((one, one, one, one), (inputs[pair], inputs[pair + 1]), sums, dtype, COMPILED)
        of_high, of_low = nothing, nothing
        for number in tl.static_range(slots):
            found = (nothing, nothing, nothing, nothing)
            above, below = loaded[2 * number], loaded[2 * number + 1]
            for pair in tl.static_range(0, DEEP * numbers // 2, 2):
                given_pair = (inputs[pair], inputs[pair + 1])
                for plane in tl.static_range(planes):
                    of_rows = _left(above, below, magic, pair // (numbers // 2), pair % (numbers // 2), BITS, plane, dtype)
                    found = product(of_rows, given_pair, found, dtype, COMPILED)
            of_high = tl.where(quarter == number, found[0], of_high)
            of_low = tl.where(quarter == number, found[2], of_low)
        high += high_scale * (of_high * large - (high_zero + more) * sums[0])
        low += low_scale * (of_low * large - (low_zero + more) * sums[0])
    row = tl.program_id(0) * (16 * TILES) + tl.arange(0, TILES)[:, None] * 16 + tl.arange(0, 8)[None, :]
    high = tl.sum(tl.sum(tl.reshape(high, (TILES, PARTS, 8, 4)), axis=3), axis=1)
    low = tl.sum(tl.sum(tl.reshape(low, (TILES, PARTS, 8, 4)), axis=3), axis=1)
    tl.store(out + row, high.to(dtype), mask=row < n)
    tl.store(out + row + 8, low.to(dtype), mask=row + 8 < n)
