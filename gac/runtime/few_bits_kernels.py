"""A Triton kernel for one row and a weight of few bits as ``gac.runtime.packed`` lays it; and how words are read.

``gac.runtime.few_bits`` launches it. The words are read as they lie, and their numbers are made in registers. A number
of few bits becomes a float32 without being converted: its bits are put where they are worth 1, 2, 4... in the mantissa
of 2^23, and 2^23 is taken away. Numbers higher up in their half of a word come out so many times as large; inputs take
that back, exactly.
"""

try:
    import triton
    import triton.language as tl
except ImportError as failure:  # transformers looks for what files import, but not here: a CPU needs no Triton
    raise RuntimeError("Triton is not installed") from failure

MAGIC = 0x4B000000
"""The bits of 2^23, which kernels are given: they then lie in a register, beside masks that do not."""
_LARGE = tl.constexpr(8388608.0)


@triton.jit  # type: ignore[untyped-decorator]
def _number(first, second, third, magic, AT: tl.constexpr, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Number AT of a word, or of three words of 3 bits, times ``2 ** _place(AT, BITS)``: float32."""
    if BITS == 3:
        shift: tl.constexpr = AT * 3 % 32
        word = first if AT * 3 < 32 else (second if AT * 3 < 64 else third)
        number = (word >> shift) & 7
        if shift > 29:
            behind = second if AT * 3 < 32 else third
            number = (number & ((1 << (32 - shift)) - 1)) | ((behind << (32 - shift)) & 7)
    else:
        half = first >> 16 if AT * BITS >= 16 else first
        number = half & (((1 << BITS) - 1) << (AT * BITS % 16))
    return (number | magic).to(tl.float32, bitcast=True) - _LARGE


@triton.jit  # type: ignore[untyped-decorator]
def _part(AT: tl.constexpr, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """What takes back that number AT is too large."""
    return 1.0 if BITS == 3 else 1.0 / (1 << (AT * BITS % 16))


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
def _in_turn(packed, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of values ``(units * COUNT,)`` those at 0, COUNT, 2 COUNT..., those at 1, COUNT + 1... and so on: a tuple."""
    if COUNT == 1:
        return (packed,)
    else:  # noqa: RET505 - Triton compiles one branch alone
        even, odd = tl.split(tl.reshape(packed, (packed.shape[0] // 2, 2)))
        if COUNT == 2:
            return (even, odd)
        else:  # noqa: RET505
            evens, odds = _in_turn(even, COUNT // 2), _in_turn(odd, COUNT // 2)
            if COUNT == 4:
                return (evens[0], odds[0], evens[1], odds[1])
            else:  # noqa: RET505
                return (evens[0], odds[0], evens[1], odds[1], evens[2], odds[2], evens[3], odds[3])


@triton.jit  # type: ignore[untyped-decorator]
def words_at(at, there, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A word of each place, or the three of 32 numbers of 3 bits."""
    first = tl.load(at, mask=there, other=0)
    if BITS == 3:
        return first, tl.load(at + 1, mask=there, other=0), tl.load(at + 2, mask=there, other=0)
    else:  # noqa: RET505
        return first, first, first


@triton.jit  # type: ignore[untyped-decorator]
def vector(  # type: ignore[no-untyped-def]
    x, words, scale, zeros, out, n, magic,
    size: tl.constexpr, width: tl.constexpr, groups: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, OWN_ZERO: tl.constexpr,
    ROWS: tl.constexpr, UNITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A unit is a word, or the three words of 32 numbers of 3 bits. x is read as int64: four numbers of 16 bits."""
    numbers: tl.constexpr = 32 if BITS == 3 else 32 // BITS
    whole: tl.constexpr = 3 if BITS == 3 else 1
    quads: tl.constexpr = numbers // 4
    parts: tl.constexpr = UNITS * numbers // GROUP if GROUP else 1
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < n
    by_row = words + row.to(tl.int64)[:, None] * width
    total = tl.zeros((ROWS, parts if GROUP else UNITS), tl.float32)
    shift = tl.zeros((UNITS,), tl.float32)
    for start in tl.range(0, size // numbers, UNITS, num_stages=STAGES):
        unit = start + tl.arange(0, UNITS)
        here = inside[:, None] & (unit < size // numbers)[None, :]
        first, second, third = words_at(by_row + unit[None, :] * whole, here, BITS)
        at = start * quads + tl.arange(0, UNITS * quads)
        given = _in_turn(tl.load(x + at, mask=at < size // 4, other=0), quads)
        part = tl.zeros((ROWS, UNITS), tl.float32)
        sums = tl.zeros((UNITS,), tl.float32)
        for number in tl.static_range(numbers):
            bits = (given[number // 4] >> (number % 4 * 16)).to(tl.int16)
            value = bits.to(out.dtype.element_ty, bitcast=True).to(tl.float32)
            sums += value
            part += _number(first, second, third, magic, number, BITS) * (value * _part(number, BITS))[None, :]
        if GROUP:
            group = start * numbers // GROUP + tl.arange(0, parts)
            there = inside[:, None] & (group < groups)[None, :]
            grouped = tl.sum(tl.reshape(part, (ROWS, parts, UNITS // parts)), axis=2)
            inputs = tl.sum(tl.reshape(sums, (parts, UNITS // parts)), axis=1)
            scales = tl.load(scale + row[:, None] * groups + group[None, :], mask=there, other=0.0).to(tl.float32)
            if OWN_ZERO:
                zero = zero_points(zeros, row[:, None], group[None, :], there, groups, BITS)
                total += scales * (grouped - zero * inputs[None, :])
            else:
                total += scales * (grouped - (1 << (BITS - 1)) * inputs[None, :])
        else:
            total += part
            shift += sums
    result = tl.sum(total, axis=1)
    if not GROUP:
        result -= tl.sum(shift, axis=0) * (1 << (BITS - 1))
        result *= tl.load(scale + row, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=inside)
