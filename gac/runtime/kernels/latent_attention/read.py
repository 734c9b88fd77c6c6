"""Loads of cached latents in the attention kernel, thread by thread (``gac.runtime.kernels.ptx``).

Latents are read in words: two numbers of 16 bits, or in 16 bits two numbers of 8, or four of 4, which the lower halves
of two bytes have and the upper ones: those are of the first half of the rank and of the second.
"""

from gac.runtime.kernels.guard import jit, tl
from gac.runtime.kernels.ptx import further, neighbours, packed, prefetched, transposed


@jit
def _words(
    row, offsets, COUNT: tl.constexpr, limit, UNIT: tl.constexpr, EVEN_K: tl.constexpr, COMPILED: tl.constexpr
):  # fmt: skip
    """So many neighbouring words of each thread's row, ``offsets`` further on, zeros from ``limit`` on.

    EVEN_K: no row ends there. UNIT: words that rows, and where they end, are multiples of.
    """
    piece: tl.constexpr = min(UNIT, COUNT)
    if EVEN_K:
        return neighbours(row + offsets, None, COUNT, piece, COMPILED)
    else:
        result = ()
        for start in tl.static_range(0, COUNT, piece):
            result += neighbours(row + (offsets + start), offsets + start < limit, piece, piece, COMPILED)
        return result


@jit
def _row(
    base, token, end, quarter, stride, limit,
    UNIT: tl.constexpr, STEPS: tl.constexpr, EVEN_K: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """The words of one token that each thread takes; from end on those of the last token before it.

    Four of each 16 words, which two steps of a product take; of an odd last step two of 8 words.
    """
    row = further(base, tl.minimum(token, end - 1), stride * UNIT, COMPILED)
    result = ()
    for chunk in tl.static_range(STEPS // 2):
        result += (_words(row, chunk * 16 + quarter * 4, 4, limit, UNIT, EVEN_K, COMPILED),)
    if STEPS % 2:
        result += (_words(row, STEPS // 2 * 16 + quarter * 2, 2, limit, UNIT, EVEN_K, COMPILED),)
    return result


@jit
def tiles(
    base, token, end, quarter, stride, limit,
    UNIT: tl.constexpr, STEPS: tl.constexpr, EVEN_K: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Of keys or values those of both tokens, by tile.

    From end on they are numbers of a token before it, which are finite: such a token's weight is 0.
    """
    result = ()
    for tile in tl.static_range(2):
        of_tile = ()
        for which in tl.static_range(2):
            local = token + tile * 16 + which * 8
            of_tile += (_row(base, local, end, quarter, stride, limit, UNIT, STEPS, EVEN_K, COMPILED),)
        result += (of_tile,)
    return result


@jit
def prefetch(base, token, end, stride, UNIT: tl.constexpr, STEPS: tl.constexpr, COMPILED: tl.constexpr):
    prefetched(further(base, tl.minimum(token, end - 1), stride * UNIT, COMPILED), STEPS * 8, COMPILED)


@jit
def _numbers(words, BITS: tl.constexpr, HALF: tl.constexpr, dtype: tl.constexpr, COMPILED: tl.constexpr):
    """Words as pairs of numbers of 16 bits; of numbers of 4 bits those in the lower or upper halves of bytes."""
    if BITS == 0:
        return words
    else:
        up: tl.constexpr = 32 - BITS - 4 * HALF
        result = ()
        for offsets in tl.static_range(len(words)):
            low, high = (words[offsets] << up) >> (32 - BITS), (words[offsets] << (up - 8)) >> (32 - BITS)
            result += (packed(low.to(tl.float32), high.to(tl.float32), dtype, COMPILED),)
        return result


@jit
def left(read, nil, BITS: tl.constexpr, dtype: tl.constexpr, COMPILED: tl.constexpr):
    """Latents of both tokens as left matrices of products: two of each 16 words, of both halves, then the odd ones.

    nil is always 0, but the assembler cannot know that. With a plain 0 it would copy the four registers of a matrix for
    every product.
    """
    result, odd = (), ()
    for half in tl.static_range(2 if BITS == 4 else 1):
        for chunk in tl.static_range(len(read[0])):
            first = _numbers(read[0][chunk], BITS, half, dtype, COMPILED)
            second = _numbers(read[1][chunk], BITS, half, dtype, COMPILED)
            item = (first[0] | nil, second[0] | nil, first[1] | nil, second[1] | nil)
            if len(first) == 4:
                result += (item, (first[2] | nil, second[2] | nil, first[3] | nil, second[3] | nil))
            else:
                odd += (item,)
    return result + odd


@jit
def left_of_numbers(read, BITS: tl.constexpr, dtype: tl.constexpr, COMPILED: tl.constexpr):
    """The same the other way round: rows are numbers of latents, and columns are tokens.

    Row i of a matrix is number ``8 (i // 2) + i % 2`` of 32, of those that are left ``4 (i // 2) + i % 2`` of 16; row
    i + 8 is two numbers further on. The second of two matrices begins four numbers after the first.
    """
    of_tokens = left(read, 0, BITS, dtype, COMPILED)
    result = ()
    for offsets in tl.static_range(len(of_tokens)):
        item = of_tokens[offsets]
        first, second = transposed(item[0], COMPILED), transposed(item[2], COMPILED)
        result += ((first, second, transposed(item[1], COMPILED), transposed(item[3], COMPILED)),)
    return result


@jit
def scale_of(scales, start, token, stride, end):
    """By which latents of a token of each tile are multiplied; 1 where they are not rounded."""
    if scales is None:
        return 1.0, 1.0
    else:
        scales += start + token.to(tl.int64) * stride
        first = tl.load(scales, mask=token < end, other=0.0)
        two = tl.load(scales + 16 * stride, mask=token + 16 < end, other=0.0)
        return first.to(tl.float32), two.to(tl.float32)
