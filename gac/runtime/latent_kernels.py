"""Triton kernels of one new token's attention over a cache of latents; ``gac.runtime.latent_attention`` launches them.

A program takes a head of keys and values with all queries of it, and a part of the context, tile by tile. It makes
keys of a tile of latents, in registers, and turns them by their places in the tile alone: the queries are turned back
to where the tile begins. So its angles are the same for every tile, and no table of all tokens is read. Values
stay latents: a second kernel adds the parts up, and multiplies the sum of all tokens by the second factor.

Features are taken in pairs, which are turned together: a first one and a second one, each in a tensor of its own. A
rank lies in a part of a power of two, FIRST, or in two, FIRST and REST; zeros fill them up. Latents of few bits are
read as bytes and multiplied by the scale of their token before they are used. Of 4 bits FIRST is what lies in the lower
halves of a group's bytes, and REST what lies in the upper ones.
"""

try:
    import triton
    import triton.language as tl
except ImportError as failure:  # transformers looks for what files import, but not here: a CPU needs no Triton
    raise RuntimeError("Triton is not installed") from failure

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit  # type: ignore[untyped-decorator]
def _places(pair, SIZE: tl.constexpr, ROTATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the first and the second feature of each pair lie in a head."""
    turns = pair < ROTATED // 2
    first = pair + tl.where(turns, 0, ROTATED // 2)
    second = pair + tl.where(turns, ROTATED // 2, SIZE // 2)
    return first, second


@triton.jit
def _turned(one, two, cosine, sine):  # type: ignore[no-untyped-def]
    return one * cosine - two * sine, two * cosine + one * sine


@triton.jit  # type: ignore[untyped-decorator]
def _part(length, tokens, TOKENS: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many tokens there are, and where the program's part of them begins and ends."""
    there_are = tokens
    if length is not None:
        there_are = tl.minimum(tl.load(length), tokens).to(tl.int32)
    each = tl.cdiv(tl.cdiv(there_are, TOKENS), tl.num_programs(1)) * TOKENS
    begin = tl.program_id(1) * each
    return there_are, begin, tl.minimum(begin + each, there_are)


@triton.jit
def _picked(rows, there, feature, inside):  # type: ignore[no-untyped-def]
    """Some features of rows of pointers."""
    return tl.load(rows[:, None] + feature[None, :], mask=there[:, None] & inside[None, :], other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _tile(rows, there, START: tl.constexpr, WIDE: tl.constexpr, RANK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers of rows of pointers from START on, WIDE, of the RANK that there are."""
    at = START + tl.arange(0, WIDE)
    there = there[:, None]
    if START + WIDE > RANK:
        there = there & (at < RANK)[None, :]
    return tl.load(rows[:, None] + at[None, :], mask=there, other=0.0)


@triton.jit
def _by_token(scales, start, at):  # type: ignore[no-untyped-def]
    """Pointers to the scales of some tokens; numbers that nobody reads where there are no scales."""
    if scales is None:
        return at
    else:  # noqa: RET505 - Triton compiles one branch alone
        return scales + start + at


@triton.jit
def _scaled(number, scale, like):  # type: ignore[no-untyped-def]
    """Latents of whole numbers, as wide as what they are multiplied with."""
    return (number.to(tl.float32) * scale[:, None]).to(like.dtype.element_ty)


@triton.jit  # type: ignore[untyped-decorator]
def _latents(  # type: ignore[no-untyped-def]
    rows, there, scales, like, RANK: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, BITS: tl.constexpr
):
    """Both parts of the latents of some tokens, ``(tokens, FIRST)`` and ``(tokens, REST)``; the first twice if alone.

    Args:
        rows: pointers to them; of few bits to bytes. scales: of few bits pointers to their scales.
        like: a pointer to numbers as they are to be.
    """
    if BITS == 4:
        scale = tl.load(scales, mask=there, other=0.0).to(tl.float32)
        both = _tile(rows, there, 0, FIRST, RANK // 2).to(tl.int32)
        return _scaled((both << 28) >> 28, scale, like), _scaled(both >> 4, scale, like)
    else:  # noqa: RET505 - Triton compiles one branch alone
        one = _tile(rows, there, 0, FIRST, RANK)
        two = one
        if REST:
            two = _tile(rows, there, FIRST, REST, RANK)
        if BITS:
            scale = tl.load(scales, mask=there, other=0.0).to(tl.float32)
            return _scaled(one, scale, like), _scaled(two, scale, like)
        else:  # noqa: RET505
            return one, two


@triton.jit  # type: ignore[untyped-decorator]
def _angles(turns, place, pair, ROTATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Cosines and sines of so many places; pairs past those that turn stay where they are."""
    at = turns + place[:, None] * ROTATED + pair[None, :]
    turning = (pair < ROTATED // 2)[None, :]
    return tl.load(at, mask=turning, other=1.0), tl.load(at + ROTATED // 2, mask=turning, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _columns(  # type: ignore[no-untyped-def]
    weight, feature, inside, START: tl.constexpr, WIDE: tl.constexpr, END: tl.constexpr, RANK: tl.constexpr
):
    """Rows of a factor ``(features, RANK)`` as columns, ``(WIDE, features)``; zeros from END on."""
    at = START + tl.arange(0, WIDE)
    there = inside[None, :] & (at < END)[:, None]
    return tl.load(weight + feature[None, :] * RANK + at[:, None], mask=there, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _factors(  # type: ignore[no-untyped-def]
    factor, row, first, second, inside,
    RANK: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """What makes the first and the second features, of each part of the rank; nothing without a factor.

    Args:
        row: of the factor, where the head begins.
    """
    if factor is None:
        return ()
    else:  # noqa: RET505 - Triton compiles one branch alone
        weight = factor + row * RANK
        START: tl.constexpr = RANK // 2 if BITS == 4 else FIRST  # where the rest begins
        END: tl.constexpr = RANK // 2 if BITS == 4 else RANK  # of the first part
        found = (
            _columns(weight, first, inside, 0, FIRST, END, RANK),
            _columns(weight, second, inside, 0, FIRST, END, RANK),
        )
        if REST:
            one = _columns(weight, first, inside, START, REST, RANK, RANK)
            two = _columns(weight, second, inside, START, REST, RANK, RANK)
            return found[0], found[1], one, two
        else:  # noqa: RET505
            return found


@triton.jit  # type: ignore[untyped-decorator]
def _keys(  # type: ignore[no-untyped-def]
    rows, there, scales, like, factors, bias, row, first, second, inside,
    RANK: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """The first and the second features of keys, made of latents or read as they are."""
    if len(factors) == 0:
        one, two = _picked(rows, there, first, inside), _picked(rows, there, second, inside)
    else:
        latent, rest = _latents(rows, there, scales, like, RANK, FIRST, REST, BITS)
        one, two = tl.dot(latent, factors[0]), tl.dot(latent, factors[1])
        if REST:
            one, two = tl.dot(rest, factors[2], one), tl.dot(rest, factors[3], two)
    if bias is not None:
        one += tl.load(bias + row + first, mask=inside, other=0.0).to(tl.float32)[None, :]
        two += tl.load(bias + row + second, mask=inside, other=0.0).to(tl.float32)[None, :]
    return one, two


@triton.jit  # type: ignore[untyped-decorator]
def _seen(score, there, mask, at, ADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scores of the tokens that are attended to; of others minus infinity."""
    if mask is not None:
        told = tl.load(mask + at, mask=there, other=0)
        if ADDED:
            score += (told.to(tl.float32) * _LOG2E)[:, None]
        else:
            there = there & (told != 0)
    return tl.where(there[:, None], score, float("-inf"))


@triton.jit  # type: ignore[untyped-decorator]
def _store_sums(  # type: ignore[no-untyped-def]
    sums, left, real, mixed, START: tl.constexpr, WIDE: tl.constexpr, END: tl.constexpr, RANK: tl.constexpr
):
    column = START + tl.arange(0, WIDE)[:, None]
    tl.store(sums + left[None, :] * RANK + column, mixed, mask=real[None, :] & (column < END))


@triton.jit  # type: ignore[untyped-decorator]
def attend(  # type: ignore[no-untyped-def]
    query, keys, values, k_scales, v_scales, factor, bias, mask, frequencies, turns, position, length, sums, peaks,
    totals, tokens, scale, q_batch, q_head, k_batch, k_token, v_batch, v_token, ks_batch, ks_token, vs_batch, vs_token,
    mask_batch, mask_token, position_batch,
    K_BITS: tl.constexpr, K_UNIT: tl.constexpr, V_BITS: tl.constexpr, V_UNIT: tl.constexpr,
    QUERIES: tl.constexpr, ROWS: tl.constexpr, K_SHARED: tl.constexpr, V_SHARED: tl.constexpr,
    SIZE: tl.constexpr, PAIRS: tl.constexpr, ROTATED: tl.constexpr,
    K_RANK: tl.constexpr, K_FIRST: tl.constexpr, K_REST: tl.constexpr,
    V_RANK: tl.constexpr, V_FIRST: tl.constexpr, V_REST: tl.constexpr,
    ADDED: tl.constexpr, TOKENS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program takes one head and one part of the context of a text; ``factor`` None: keys are read as they are.

    What it leaves of each query: the largest score, the sum of the weights, and of values weighted by them.

    Args:
        turns: cosines and sines of 0 to TOKENS places, ``(TOKENS + 1, 2, ROTATED / 2)``.
        position: that of the last token of each text. length: how many tokens there are; None: ``tokens``.
        K_BITS, V_BITS: of rounded numbers; 0: they are not rounded. K_UNIT, V_UNIT: in which strides are counted.
        QUERIES: of the head, in ROWS. K_SHARED, V_SHARED: heads of a group of latents.
        ADDED: the mask is added to scores; else it says who is seen.
    """
    head, text = tl.program_id(0), tl.program_id(2).to(tl.int64)
    there_are, begin, end = _part(length, tokens, TOKENS)
    row, pair = tl.arange(0, ROWS), tl.arange(0, PAIRS)
    real, inside = row < QUERIES, pair < SIZE // 2
    first, second = _places(pair, SIZE, ROTATED)
    asked = query + text * q_batch + (head * QUERIES + row) * q_head
    one = tl.trans(_picked(asked, real, first, inside).to(tl.float32))
    two = tl.trans(_picked(asked, real, second, inside).to(tl.float32))
    if ROTATED:
        place = tl.load(position + text * position_batch) + 1 - there_are + begin
        speed = tl.load(frequencies + pair, mask=pair < ROTATED // 2, other=0.0)
        angle = (place.to(tl.float32) * speed)[:, None]
        one, two = _turned(one, two, tl.cos(angle), -tl.sin(angle))
        cosine, sine = _angles(turns, tl.arange(0, TOKENS), pair, ROTATED)
        back_cosine, back_sine = _angles(turns, tl.full((1,), TOKENS, tl.int32), pair, ROTATED)

    narrow = query.dtype.element_ty
    factors = _factors(factor, head * SIZE, first, second, inside, K_RANK, K_FIRST, K_REST, K_BITS)
    by_key = keys + text * k_batch * K_UNIT + head // K_SHARED * (K_RANK // 2 if K_BITS == 4 else K_RANK)
    by_value = values + text * v_batch * V_UNIT + head // V_SHARED * (V_RANK // 2 if V_BITS == 4 else V_RANK)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((TOKENS, ROWS), tl.float32)
    mixed = tl.zeros((V_FIRST, ROWS), tl.float32)
    mixed_rest = tl.zeros((V_REST if V_REST else 1, ROWS), tl.float32)
    for start in tl.range(begin, end, TOKENS, num_stages=STAGES):
        at = start + tl.arange(0, TOKENS)
        there, far = at < end, at.to(tl.int64)
        k_at = _by_token(k_scales, text * ks_batch + head // K_SHARED, far * ks_token)
        key_one, key_two = _keys(
            by_key + far * k_token * K_UNIT, there, k_at, query, factors, bias, head * SIZE,
            first, second, inside, K_RANK, K_FIRST, K_REST, K_BITS,
        )  # fmt: skip
        if ROTATED:
            key_one, key_two = _turned(key_one, key_two, cosine, sine)
        score = tl.dot(key_one.to(narrow), one.to(narrow))
        score = tl.dot(key_two.to(narrow), two.to(narrow), score) * (scale * _LOG2E)
        score = _seen(score, there, mask, text * mask_batch + far * mask_token, ADDED)
        higher = tl.maximum(peak, tl.max(score, axis=0))
        level = tl.where(higher == float("-inf"), 0.0, higher)
        weights, fade = tl.exp2(score - level[None, :]), tl.exp2(peak - level)[None, :]
        peak, total = higher, total * fade + weights
        v_at = _by_token(v_scales, text * vs_batch + head // V_SHARED, far * vs_token)
        value, value_rest = _latents(
            by_value + far * v_token * V_UNIT, there, v_at, query, V_RANK, V_FIRST, V_REST, V_BITS
        )
        mixed = tl.dot(tl.trans(value), weights.to(narrow), mixed * fade)
        if V_REST:
            mixed_rest = tl.dot(tl.trans(value_rest), weights.to(narrow), mixed_rest * fade)
        if ROTATED:
            one, two = _turned(one, two, tl.trans(back_cosine), -tl.trans(back_sine))

    left = ((text * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + head) * QUERIES + row
    tl.store(peaks + left, peak, mask=real)
    tl.store(totals + left, tl.sum(total, axis=0), mask=real)
    _store_sums(sums, left, real, mixed, 0, V_FIRST, V_RANK // 2 if V_BITS == 4 else V_RANK, V_RANK)
    if V_REST:
        _store_sums(sums, left, real, mixed_rest, V_RANK // 2 if V_BITS == 4 else V_FIRST, V_REST, V_RANK, V_RANK)


@triton.jit  # type: ignore[untyped-decorator]
def join(  # type: ignore[no-untyped-def]
    sums, peaks, totals, factor, bias, out, parts,
    HEADS: tl.constexpr, SHARED: tl.constexpr, SIZE: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr,
    PARTS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """A program adds up what all parts left of a query, and multiplies it by its head's factor, if there is one.

    SHARED: queries of a head. PARTS: as many are added at once; FEATURES are made at once.
    """
    head, text = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at, column = tl.arange(0, PARTS), tl.arange(0, WIDE)
    inside = column < RANK
    peak = tl.full((PARTS,), float("-inf"), tl.float32)
    for start in range(0, parts, PARTS):
        own = (text * parts + start + at) * HEADS + head
        peak = tl.maximum(peak, tl.load(peaks + own, mask=start + at < parts, other=float("-inf")))
    highest = tl.max(peak, axis=0)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.zeros((PARTS,), tl.float32)
    mixed = tl.zeros((WIDE,), tl.float32)
    for start in range(0, parts, PARTS):
        there = start + at < parts
        own = (text * parts + start + at) * HEADS + head
        share = tl.exp2(tl.load(peaks + own, mask=there, other=float("-inf")) - highest)
        total += tl.load(totals + own, mask=there, other=0.0) * share
        left = sums + own[:, None] * RANK + column[None, :]
        found = tl.load(left, mask=there[:, None] & inside[None, :], other=0.0)
        mixed += tl.sum(found * share[:, None], axis=0)
    mixed = mixed / tl.sum(total, axis=0)
    to = out + (text * HEADS + head) * SIZE
    if factor is None:
        tl.store(to + column, mixed.to(out.dtype.element_ty), mask=inside)
    else:
        of_head = head // SHARED * SIZE
        for start in range(0, SIZE, FEATURES):
            feature = start + tl.arange(0, FEATURES)
            here = feature < SIZE
            weight = factor + (of_head + feature)[:, None] * RANK + column[None, :]
            read = tl.load(weight, mask=here[:, None] & inside[None, :], other=0.0).to(tl.float32)
            made = tl.sum(read * mixed[None, :], axis=1)
            if bias is not None:
                made += tl.load(bias + of_head + feature, mask=here, other=0.0).to(tl.float32)
            tl.store(to + feature, made.to(out.dtype.element_ty), mask=here)
