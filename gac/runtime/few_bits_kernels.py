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

    from .fragments import in_turn, keep_order, product
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


@triton.jit
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
def _units(at, left, BITS: tl.constexpr, DEEP: tl.constexpr, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """DEEP neighbouring units of each thread, as far as there are so many: tuples of words whose halves match.

    Args:
        left: how many there are; of WHOLE steps all where it is not 0 or less. What is not there may be any number.
    """
    many = tl.arange(0, DEEP)[None, :]
    there = left > 0 if WHOLE else many < left
    if BITS == 3:
        at = at[:, None] + 3 * many
        a, b, c, d = in_halves(tl.load(at, mask=there), tl.load(at + 1, mask=there), tl.load(at + 2, mask=there))
        return in_turn(a), in_turn(b), in_turn(c), in_turn(d)
    else:  # noqa: RET505 - Triton compiles one branch alone
        return (in_turn(tl.load(at[:, None] + many, mask=there)),)


@triton.jit  # type: ignore[untyped-decorator]
def _factors(  # type: ignore[no-untyped-def]
    scale, zeros, row, group, groups, COUNT: tl.constexpr, BITS: tl.constexpr, OWN_ZERO: tl.constexpr
):  # fmt: skip
    """Scales and zero points of COUNT neighbouring groups of each thread, of the last group where there are fewer."""
    found = ()
    for part in tl.static_range(COUNT):
        here = tl.minimum(group + part, groups - 1)
        scales = tl.load(scale + row * groups + here).to(tl.float32)
        if OWN_ZERO:
            found += ((scales, zero_points(zeros, row, here, True, groups, BITS)),)  # type: ignore[assignment]
        else:
            found += ((scales, 1 << (BITS - 1)),)  # type: ignore[assignment]
    return found


@triton.jit  # type: ignore[untyped-decorator]
def _scaled(sums, given, factors, FIRST: tl.constexpr, BITS: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums of products from FIRST on, less what numbers have too much times sums of inputs, in their groups' scales."""
    more: tl.constexpr = (256.0 if BITS == 8 else 128.0) if dtype == tl.bfloat16 else 0.0
    large: tl.constexpr = 1.0 if dtype == tl.bfloat16 else 16777216.0
    found = factors[0][0] * (sums[FIRST] * large - (factors[0][1] + more) * given[0])
    if len(factors) == 2:
        found += factors[1][0] * (sums[FIRST + 1] * large - (factors[1][1] + more) * given[1])
    return found


@triton.jit
def _where(there, found, kept):  # type: ignore[no-untyped-def]
    """Of two tuples of sums."""
    return (
        tl.where(there, found[0], kept[0]), tl.where(there, found[1], kept[1]),
        tl.where(there, found[2], kept[2]), tl.where(there, found[3], kept[3]),
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _slots(  # type: ignore[no-untyped-def]
    of_upper, of_lower, left, BITS: tl.constexpr, DEEP: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """Units of both rows of each thread, slot by slot."""
    words: tl.constexpr = 4 * DEEP * (3 if BITS == 3 else 1)
    found = ()
    for slot in tl.static_range(4):
        here = left if WHOLE else left - slot * (4 * DEEP)
        above = _units(of_upper + slot * words, here, BITS, DEEP, WHOLE)
        below = _units(of_lower + slot * words, here, BITS, DEEP, WHOLE)
        found += (above, below)  # type: ignore[assignment]
    return found


@triton.jit  # type: ignore[untyped-decorator]
def _pair(  # type: ignore[no-untyped-def]
    units, magic, UNIT: tl.constexpr, AT: tl.constexpr, BITS: tl.constexpr, PLANE: tl.constexpr, dtype: tl.constexpr
):  # fmt: skip
    """Number AT of a unit below that half a unit further on; float16 has 2^-24 times them, bfloat16 128 more.

    8 bits are one more than bfloat16 has there: one plane has seven of them, and another the highest.
    """
    pair = units[AT // 4][UNIT] >> (AT % 4 * 3) if BITS == 3 else units[0][UNIT] >> (AT * BITS)
    if dtype == tl.float16:
        return pair & (((1 << BITS) - 1) * 0x10001)
    elif BITS < 8:  # noqa: RET505
        return (pair & (((1 << BITS) - 1) * 0x10001)) | magic
    else:
        return (pair & (0x00800080 if PLANE else 0x007F007F)) | magic


@triton.jit  # type: ignore[untyped-decorator]
def _of_slot(  # type: ignore[no-untyped-def]
    above, below, inputs, magic, nothing,
    BITS: tl.constexpr, dtype: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Sums of a slot of both rows."""
    planes: tl.constexpr = 2 if BITS == 8 and dtype == tl.bfloat16 else 1
    pairs: tl.constexpr = 16 if BITS == 3 else 16 // BITS
    sums = (nothing, nothing, nothing, nothing)
    for at in tl.static_range(0, len(inputs), 2):
        for plane in tl.static_range(planes):
            numbers = (
                _pair(above, magic, at // pairs, at % pairs, BITS, plane, dtype),
                _pair(below, magic, at // pairs, at % pairs, BITS, plane, dtype),
                _pair(above, magic, at // pairs, at % pairs + 1, BITS, plane, dtype),
                _pair(below, magic, at // pairs, at % pairs + 1, BITS, plane, dtype),
            )
            sums = product(numbers, (inputs[at], inputs[at + 1]), sums, dtype, COMPILED)
    return sums


@triton.jit  # type: ignore[untyped-decorator]
def _two(given, AT: tl.constexpr, APART: tl.constexpr):  # type: ignore[no-untyped-def]
    """Number AT of what a thread has loaded below that APART further on: int32."""
    first = given[AT // 8][AT % 8 // 2]
    second = given[(AT + APART) // 8][(AT + APART) % 8 // 2]
    if AT % 2 == 0:
        return (first & 0xFFFF) | (second << 16)
    else:  # noqa: RET505 - Triton compiles one branch alone
        return ((first >> 16) & 0xFFFF) | (second & -0x10000)


@triton.jit  # type: ignore[untyped-decorator]
def _inputs(at, left, BITS: tl.constexpr, DEEP: tl.constexpr, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers of the row for DEEP units of each thread, in pairs like theirs: zeros where fewer are left."""
    pairs: tl.constexpr = 16 if BITS == 3 else 16 // BITS
    given = ()
    for chunk in tl.static_range(DEEP * pairs // 4):
        four = tl.arange(chunk * 4, chunk * 4 + 4)[None, :]
        there = left > 0 if WHOLE else four < left
        given += (in_turn(tl.load(at[:, None] + four, mask=there, other=0)),)  # type: ignore[assignment]
    found = ()
    for pair in tl.static_range(DEEP * pairs):
        found += (_two(given, pair // pairs * 2 * pairs + pair % pairs, pairs),)  # type: ignore[assignment]
    return found


@triton.jit  # type: ignore[untyped-decorator]
def _multiplied(  # type: ignore[no-untyped-def]
    loaded, inputs, quarter, magic, nothing, BITS: tl.constexpr, dtype: tl.constexpr, COMPILED: tl.constexpr
):  # fmt: skip
    """Of a step sums of products, of thread j those of slot j, and sums of inputs."""
    one = tl.full(quarter.shape, 0x3F803F80 if dtype == tl.bfloat16 else 0x3C003C00, tl.int32)
    given = (nothing, nothing, nothing, nothing)
    for at in tl.static_range(0, len(inputs), 2):
        given = product((one, one, one, one), (inputs[at], inputs[at + 1]), given, dtype, COMPILED)
    kept = _of_slot(loaded[0], loaded[1], inputs, magic, nothing, BITS, dtype, COMPILED)
    for slot in tl.static_range(1, 4):
        found = _of_slot(loaded[2 * slot], loaded[2 * slot + 1], inputs, magic, nothing, BITS, dtype, COMPILED)
        kept = _where(quarter == slot, found, kept)
    return kept, given


@triton.jit  # type: ignore[untyped-decorator]
def _write(high, low, out, n, TILES: tl.constexpr, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums of all threads of a row."""
    both = tl.reshape(tl.join(high, low), (TILES, PARTS, 8, 4, 2))
    found = tl.sum(tl.sum(both, axis=3), axis=1)
    row = tl.arange(0, TILES)[:, None, None] * 16 + tl.arange(0, 8)[None, :, None] + tl.arange(0, 2)[None, None, :] * 8
    row += tl.program_id(0) * (16 * TILES)
    tl.store(out + row, found.to(out.dtype.element_ty), mask=row < n)


@triton.jit(do_not_specialize=["groups"])  # type: ignore[untyped-decorator]
def vector(  # type: ignore[no-untyped-def]
    x, words, scale, zeros, out, n, blocks, groups, magic,
    BITS: tl.constexpr, GROUP: tl.constexpr, OWN_ZERO: tl.constexpr,
    TILES: tl.constexpr, PARTS: tl.constexpr, DEEP: tl.constexpr,
    ONCE: tl.constexpr, EVEN: tl.constexpr, WHOLE: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """A unit is a word, or the three words of 32 numbers of 3 bits. x is read as int32: two numbers of 16 bits.
    A row of the weight has so many blocks of DEEP units.

    A warp multiplies 16 rows, PARTS warps the same. In a step it takes four slots of columns. Of a slot four threads
    beside each other read DEEP units of a row each. Every two columns of the matrix that has the row hold another slot,
    and thread j of four keeps the sums of slot j. Where a slot has two groups, each of the two columns holds one.
    ONCE: one step takes all columns. EVEN: columns are a multiple of a step; WHOLE: of four slots.
    """
    dtype: tl.constexpr = out.dtype.element_ty
    numbers: tl.constexpr = 32 if BITS == 3 else 32 // BITS
    slot: tl.constexpr = 4 * DEEP * numbers
    step: tl.constexpr = PARTS * 4 * slot
    ahead: tl.constexpr = step * BITS // 32
    each: tl.constexpr = 3 if BITS == 3 else 1
    cut: tl.constexpr = 2 if GROUP and slot > GROUP else 1
    thread = tl.arange(0, TILES * PARTS * 32)
    eighth, quarter = thread // 4 % 8, thread % 4
    upper = (tl.program_id(0) * TILES + thread // (32 * PARTS)) * 16 + eighth
    upper, lower = tl.minimum(upper, n - 1), tl.minimum(upper + 8, n - 1)
    begin = thread // 32 % PARTS * (4 * slot)
    unit = begin // numbers + quarter * DEEP
    units, size = blocks * DEEP, blocks * (DEEP * numbers)  # of a row: so the compiler knows what divides them
    of_upper = words + upper.to(tl.int64) * (units * each) + unit * each
    of_lower = words + lower.to(tl.int64) * (units * each) + unit * each
    input_at = (begin + eighth // 2 * slot + quarter * (DEEP * numbers)) // 2
    nothing = tl.zeros((thread.shape[0],), tl.float32)
    high, low = nothing, nothing
    if not GROUP:
        above = _factors(scale, zeros, upper, 0, 1, 1, BITS, False)
        below = _factors(scale, zeros, lower, 0, 1, 1, BITS, False)
    for start in tl.range(0, step if ONCE else size, step):
        left = 1 if EVEN else (units - start // numbers - unit)[:, None]
        loaded = _slots(of_upper, of_lower, left, BITS, DEEP, WHOLE)
        if GROUP:
            group = (start + begin + quarter * slot) // GROUP
            above = _factors(scale, zeros, upper, group, groups, cut, BITS, OWN_ZERO)
            below = _factors(scale, zeros, lower, group, groups, cut, BITS, OWN_ZERO)
        keep_order(thread, COMPILED)  # all words are loaded before the inputs, which all products need
        here = 1 if EVEN else (size - start) // 2 - input_at[:, None]
        if cut == 2:
            here = tl.where((quarter // 2 == eighth % 2)[:, None], here, 0)
        inputs = _inputs(x + input_at, here, BITS, DEEP, WHOLE)
        kept, given = _multiplied(loaded, inputs, quarter, magic, nothing, BITS, dtype, COMPILED)
        high += _scaled(kept, given, above, 0, BITS, dtype)
        low += _scaled(kept, given, below, 2, BITS, dtype)
        of_upper += ahead
        of_lower += ahead
        x += step // 2
    _write(high, low, out, n, TILES, PARTS)
