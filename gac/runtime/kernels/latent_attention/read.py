"""What Triton kernels of attention read of a cache of latents, thread by thread (``fragments``).

Latents are read in words: two numbers of 16 bits, or in 16 bits two numbers of 8, or four of 4, which the lower halves
of two bytes have and the upper ones: those are of the first half of the rank and of the second.
"""

from gac.runtime.kernels.guard import jit, tl
from gac.runtime.kernels.ptx import further, neighbours, packed, prefetched, transposed


@jit  # type: ignore[untyped-decorator]
def _words(  # type: ignore[no-untyped-def]
    row, at, COUNT: tl.constexpr, limit, UNIT: tl.constexpr, EVEN: tl.constexpr, COMPILED: tl.constexpr
):  # fmt: skip
    """So many neighbouring words of each thread's row, zeros from limit on. EVEN: no row ends there.

    Args:
        row: where it begins. at: how many words further each thread's words lie.
        UNIT: words that rows, and where they end, are multiples of.
    """
    piece: tl.constexpr = min(UNIT, COUNT)
    if EVEN:
        return neighbours(row + at, None, COUNT, piece, COMPILED)
    else:  # noqa: RET505 - Triton compiles one branch alone
        found = ()
        for start in tl.static_range(0, COUNT, piece):
            found += neighbours(row + (at + start), at + start < limit, piece, piece, COMPILED)
        return found


@jit  # type: ignore[untyped-decorator]
def _row(  # type: ignore[no-untyped-def]
    held, token, end, quarter, stride, limit,
    UNIT: tl.constexpr, STEPS: tl.constexpr, EVEN: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """The words of one token that each thread takes; from end on those of the last token before it.

    Four of each 16 words, which two steps of a product take; of an odd last step two of 8 words.
    """
    row = further(held, tl.minimum(token, end - 1), stride * UNIT, COMPILED)
    found = ()
    for chunk in tl.static_range(STEPS // 2):
        found += (_words(row, chunk * 16 + quarter * 4, 4, limit, UNIT, EVEN, COMPILED),)  # type: ignore[assignment]
    if STEPS % 2:
        found += (_words(row, STEPS // 2 * 16 + quarter * 2, 2, limit, UNIT, EVEN, COMPILED),)  # type: ignore[assignment]
    return found


@jit  # type: ignore[untyped-decorator]
def tiles(  # type: ignore[no-untyped-def]
    held, token, end, quarter, stride, limit,
    UNIT: tl.constexpr, STEPS: tl.constexpr, EVEN: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Of keys or values those of both tokens, by tile.

    From end on they are numbers of a token before it, which are finite: such a token's weight is 0.
    """
    found = ()
    for tile in tl.static_range(2):
        of_tile = ()
        for which in tl.static_range(2):
            own = token + tile * 16 + which * 8
            of_tile += (_row(held, own, end, quarter, stride, limit, UNIT, STEPS, EVEN, COMPILED),)  # type: ignore[assignment]
        found += (of_tile,)  # type: ignore[assignment]
    return found


@jit  # type: ignore[untyped-decorator]
def prefetch(held, token, end, stride, UNIT: tl.constexpr, STEPS: tl.constexpr, COMPILED: tl.constexpr):  # type: ignore[no-untyped-def]
    """One token of each thread, into L2."""
    prefetched(further(held, tl.minimum(token, end - 1), stride * UNIT, COMPILED), STEPS * 8, COMPILED)


@jit  # type: ignore[untyped-decorator]
def _numbers(words, BITS: tl.constexpr, HALF: tl.constexpr, dtype: tl.constexpr, COMPILED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Words as pairs of numbers of 16 bits; of numbers of 4 bits those in the lower or upper halves of bytes."""
    if BITS == 0:
        return words
    else:  # noqa: RET505 - Triton compiles one branch alone
        up: tl.constexpr = 32 - BITS - 4 * HALF
        found = ()
        for at in tl.static_range(len(words)):
            low, high = (words[at] << up) >> (32 - BITS), (words[at] << (up - 8)) >> (32 - BITS)
            found += (packed(low.to(tl.float32), high.to(tl.float32), dtype, COMPILED),)  # type: ignore[assignment]
        return found


@jit  # type: ignore[untyped-decorator]
def left(read, nil, BITS: tl.constexpr, dtype: tl.constexpr, COMPILED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Latents of both tokens as left matrices of products: two of each 16 words, of both halves, then the odd ones.

    nil is always 0, but the assembler cannot know that. With a plain 0 it would copy the four registers of a matrix for
    every product.
    """
    found, odd = (), ()
    for half in tl.static_range(2 if BITS == 4 else 1):
        for chunk in tl.static_range(len(read[0])):
            first = _numbers(read[0][chunk], BITS, half, dtype, COMPILED)
            second = _numbers(read[1][chunk], BITS, half, dtype, COMPILED)
            one = (first[0] | nil, second[0] | nil, first[1] | nil, second[1] | nil)
            if len(first) == 4:
                found += (one, (first[2] | nil, second[2] | nil, first[3] | nil, second[3] | nil))  # type: ignore[assignment]
            else:
                odd += (one,)  # type: ignore[assignment]
    return found + odd


@jit  # type: ignore[untyped-decorator]
def left_of_numbers(read, BITS: tl.constexpr, dtype: tl.constexpr, COMPILED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The same the other way round: rows are numbers of latents, and columns are tokens.

    Row i of a matrix is number ``8 (i // 2) + i % 2`` of 32, of those that are left ``4 (i // 2) + i % 2`` of 16; row
    i + 8 is two numbers further on. The second of two matrices begins four numbers after the first.
    """
    of_tokens = left(read, 0, BITS, dtype, COMPILED)
    found = ()
    for at in tl.static_range(len(of_tokens)):
        one = of_tokens[at]
        first, second = transposed(one[0], COMPILED), transposed(one[2], COMPILED)
        found += ((first, second, transposed(one[1], COMPILED), transposed(one[3], COMPILED)),)  # type: ignore[assignment]
    return found


@jit
def scale_of(scales, start, token, stride, end):  # type: ignore[no-untyped-def]
    """By which latents of a token of each tile are multiplied; 1 where they are not rounded."""
    if scales is None:
        return 1.0, 1.0
    else:  # noqa: RET505 - Triton compiles one branch alone
        scales += start + token.to(tl.int64) * stride
        one = tl.load(scales, mask=token < end, other=0.0)
        two = tl.load(scales + 16 * stride, mask=token + 16 < end, other=0.0)
        return one.to(tl.float32), two.to(tl.float32)
