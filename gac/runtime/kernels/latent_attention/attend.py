"""Softmax over scores and the weighted sum of value latents; the package's docstring has the layout.

Keys of the next step are prefetched into L2 when a step begins, and loaded into registers when its own are scored. The
second factor of the keys lies in shared memory where it finds room, and so do queries, or in registers. Each warp
writes its peaks and sums; a second kernel joins them and multiplies by the second factor of the values.

Keys are rotated by one angle from step to step, so a part of the context is read run by run, from its end: tokens whose
positions count up by one. Mostly that is one run; padding that a boolean mask hides divides none.
"""

from gac.runtime.kernels.guard import jit, tl
from gac.runtime.kernels.latent_attention.layout import ROOM
from gac.runtime.kernels.latent_attention.read import left_of_numbers, prefetch, scale_of, tiles
from gac.runtime.kernels.latent_attention.scores import (
    advance_rotation,
    angles_at,
    load_queries,
    scores,
    store_queries_to_smem,
)
from gac.runtime.kernels.ptx import (
    all_copied,
    copied,
    highest_of,
    keep_order,
    packed,
    product,
    reserved,
    sum_of,
    transposed,
)

_LOG2E = tl.constexpr(1.4426950408889634)
_ROOM = tl.constexpr(ROOM)
_ANY = [
    *("tokens", "k_eighths", "v_eighths", "k_batch", "k_token", "v_batch", "v_token"),
    *("ks_batch", "ks_token", "vs_batch", "vs_token", "mask_batch", "mask_token", "p_batch", "p_token"),
]


@jit
def _part(length, tokens, STEP: tl.constexpr):
    """Return where the program's part of the tokens begins and ends."""
    there_are = tokens
    if length is not None:
        there_are = tl.minimum(tl.load(length), tokens).to(tl.int32)
    each = tl.cdiv(tl.cdiv(there_are, STEP), tl.num_programs(1)) * STEP
    begin = tl.program_id(1) * each
    return begin, tl.minimum(begin + each, there_are)


@jit
def _last_shown(mask, begin, end, thread, token_stride, STEP: tl.constexpr):
    """The end of the last token from begin to end that a boolean mask shows; begin: it shows none."""
    shown = tl.where(tl.load(mask + (tl.maximum(end, 1) - 1).to(tl.int64) * token_stride) != 0, end, begin)
    while (shown <= begin) & (end > begin):
        token = end - STEP + thread
        message = tl.load(mask + token.to(tl.int64) * token_stride, mask=token >= begin, other=0)
        shown = tl.max(tl.where(message != 0, token + 1, begin), axis=0)
        end -= STEP
    return shown


@jit
def _last_run(
    positions, mask, frequencies, begin, end, thread, text, p_batch, p_token, mask_batch, mask_token,
    SIZE: tl.constexpr, ROTATED: tl.constexpr, SHOWN: tl.constexpr, STEP: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """The last tokens from begin to end whose positions count up by one: where they begin and end, and their angles.

    Tokens behind the last one that a boolean mask shows are no part of them: their positions may be anything.
    """
    first, angles = begin, ()
    if ROTATED:
        if SHOWN:
            end = _last_shown(mask + text * mask_batch, begin, end, thread, mask_token, STEP)
        last = positions + text * p_batch + (tl.maximum(end, 1) - 1).to(tl.int64) * p_token
        first = tl.maximum(begin, end - tl.maximum(tl.load(last + 1), 1))
        place = tl.load(last) - (end - 1 - first) + thread // 32 * 32 + thread // 4 % 8
        angles = angles_at(frequencies, place, thread % 4, SIZE, ROTATED, COMPILED)
    return first, end, angles


@jit
def _seen(score, there, mask, offsets, SHOWN: tl.constexpr):
    """Scores of the tokens that are attended to; of others minus infinity."""
    if mask is not None:
        message = tl.load(mask + offsets, mask=there, other=0)
        if SHOWN:
            there = there & (message != 0)
        else:
            score += message.to(tl.float32) * _LOG2E
    return tl.where(there, score, float("-inf"))


@jit
def _level(peak):
    return tl.where(peak == float("-inf"), 0.0, peak)


@jit
def _weights(score, peak, total):
    """Of a column in both tiles; how much of what was before stays; and its peak and the thread's sum of weights."""
    higher = tl.maximum(peak, highest_of(tl.maximum(score[0], score[1]), 8, 4))
    level = _level(higher)
    first, two, fade = tl.exp2(score[0] - level), tl.exp2(score[1] - level), tl.exp2(peak - level)
    return (first, two), fade, higher, total * fade + (first + two)


@jit
def _mixed(
    mixed, read, rights, fades, BITS: tl.constexpr, dtype: tl.constexpr, COMPILED: tl.constexpr
):  # fmt: skip
    """Sums of values with those of both tiles, 16 numbers of a value in the rows of each."""
    low, high = fades
    first, two = left_of_numbers(read[0], BITS, dtype, COMPILED), left_of_numbers(read[1], BITS, dtype, COMPILED)
    result = ()
    for offsets in tl.static_range(len(mixed)):
        sums = mixed[offsets]
        sums = (sums[0] * low, sums[1] * high, sums[2] * low, sums[3] * high)
        sums = product(first[offsets], rights[0], sums, dtype, COMPILED)
        result += (product(two[offsets], rights[1], sums, dtype, COMPILED),)
    return result


@jit
def _of_query(part):
    """The sum of both columns of a query: of the first tokens, and of the others."""
    return sum_of(part, 2, 2)


@jit
def _leave_product(sums, first, there, low, high, item, end, row, AT: tl.constexpr, APART: tl.constexpr):
    """Write what a product has left, of numbers AT and on: ``left_of_numbers`` says which, every APART of them two."""
    number = AT + row // 2 * APART + row % 2
    for half in tl.static_range(2):
        result = tl.where(first, _of_query(item[2 * half] * low), _of_query(item[2 * half + 1] * high))
        tl.store(sums + number + 2 * half, result, mask=there & (number + 2 * half < end))


@jit
def _leave(
    sums, peaks, totals, left, state, rank, row, quarter,
    QUERIES: tl.constexpr, HALVES: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Write what each warp has found for up to four queries, from where left says.

    Of four threads the first two write for queries 0 and 2, the others for 1 and 3.
    """
    peak, total, mixed = state
    first = quarter < 2
    query = quarter % 2 * 2 + quarter // 2
    there, local = query < QUERIES, left + query
    top, other = highest_of(peak[0], 2, 2), highest_of(peak[1], 2, 2)
    low, high = tl.exp2(peak[0] - _level(top)), tl.exp2(peak[1] - _level(other))
    tl.store(peaks + local, tl.where(first, top, other), mask=there & (row == 0))
    result = tl.where(first, _of_query(sum_of(total[0], 8, 4) * low), _of_query(sum_of(total[1], 8, 4) * high))
    tl.store(totals + local, result, mask=there & (row == 0))
    sums += local * rank
    paired: tl.constexpr = STEPS // 2 * 2
    end = rank // HALVES
    for half in tl.static_range(HALVES):
        to = sums + half * (rank // 2)
        for offsets in tl.static_range(paired):
            item = mixed[half * paired + offsets]
            _leave_product(to, first, there, low, high, item, end, row, offsets // 2 * 32 + offsets % 2 * 4, 8)
        if STEPS % 2:
            item = mixed[HALVES * paired + half]
            _leave_product(to, first, there, low, high, item, end, row, paired * 16, 4)


@jit
def _none(COUNT: tl.constexpr, SUMS: tl.constexpr, nothing):
    """Of COUNT times four queries peaks, sums of weights, and SUMS products of values, before the first token."""
    lowest = tl.full(nothing.shape, float("-inf"), tl.float32)
    sums = ()
    for _ in tl.static_range(SUMS):
        sums += ((nothing, nothing, nothing, nothing),)
    result = ()
    for _ in tl.static_range(COUNT):
        result += (((lowest, lowest), (nothing, nothing), sums),)
    return result


@jit
def _column(score, scale, there, mask, seen_at, quarter, SHOWN: tl.constexpr):
    """Both columns' scores of each thread's token in a tile."""
    first = tl.where(quarter < 2, score[0], score[2]) * (scale * _LOG2E)
    two = tl.where(quarter < 2, score[1], score[3]) * (scale * _LOG2E)
    return _seen(first, there, mask, seen_at, SHOWN), _seen(two, there, mask, seen_at, SHOWN)


@jit
def _attended(
    state, scores, read, scale, v_scales, there, mask, seen_at, eighth, quarter,
    BITS: tl.constexpr, SHOWN: tl.constexpr, dtype: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Return what four queries have with two more tiles of tokens; ``read`` are ``read.tiles``."""
    peaks, totals, mixed = state
    first = _column(scores[0], scale, there[0], mask, seen_at[0], quarter, SHOWN)
    two = _column(scores[1], scale, there[1], mask, seen_at[1], quarter, SHOWN)
    ones, low, low_peak, low_total = _weights((first[0], two[0]), peaks[0], totals[0])
    twos, high, high_peak, high_total = _weights((first[1], two[1]), peaks[1], totals[1])
    rights = ()
    for which in tl.static_range(2):
        inputs = packed(ones[which] * v_scales[which], twos[which] * v_scales[which], dtype, COMPILED)
        weights = transposed(inputs, COMPILED)
        rights += ((tl.where(eighth < 4, weights, 0), tl.where(eighth < 4, 0, weights)),)
    mixed = _mixed(mixed, read, rights, (low, high), BITS, dtype, COMPILED)
    return (low_peak, high_peak), (low_total, high_total), mixed


@jit
def _all_attended(
    state, scores, read, scale, v_scales, there, mask, seen_at, apart, eighth, quarter,
    BITS: tl.constexpr, SHOWN: tl.constexpr, dtype: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    result = ()
    for four in tl.static_range(len(state)):
        result += (
            _attended(
                state[four], (scores[0][four], scores[1][four]), read, scale, v_scales, there, mask,
                (seen_at, seen_at + 16 * apart), eighth, quarter, BITS, SHOWN, dtype, COMPILED,
            ),
        )  # fmt: skip
    return result


@jit
def _kept(
    room, part, factor, turns, thread,
    ASKED: tl.constexpr, MADE_OF: tl.constexpr, TURNS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Return where each thread's queries will lie, and its parts of the head's factor and of the turns of a step.

    These are copied to shared memory where they find room there; without a ``room`` of the program so are queries.
    ASKED, MADE_OF and TURNS are words of each; 0: there are none, and factor or turns anything, for Triton returns no
    None.
    """
    lane = thread % 32
    factor_at, turns_at = factor + lane * 4, turns + lane % 4 * 4
    if room is None:
        room_at = reserved(thread)
        asked_at = room_at + lane * 8
        filled: tl.constexpr = ASKED + (MADE_OF if 4 * (ASKED + MADE_OF) <= _ROOM else 0)
        if filled > ASKED:
            copied(room_at + 4 * ASKED, factor, thread, MADE_OF, 32 * WARPS)
            factor_at = room_at + 4 * ASKED + lane * 16
        if TURNS and 4 * (filled + TURNS) <= _ROOM:
            copied(room_at + 4 * filled, turns, thread, TURNS, 32 * WARPS)
            turns_at = room_at + 4 * filled + lane % 4 * 16
    else:
        asked_at = room + part * ASKED + lane * 2
    return asked_at, factor_at, turns_at


@jit(do_not_specialize=_ANY)
def attend_kernel(
    query, keys, values, k_scales, v_scales, factor, bias, norm, mask, frequencies, turns, positions, length,
    room, sums, peaks, totals, tokens, scale, eps, k_eighths, v_eighths, q_batch, q_head, k_batch, k_token,
    v_batch, v_token, ks_batch, ks_token, vs_batch, vs_token, mask_batch, mask_token, p_batch, p_token,
    K_BITS: tl.constexpr, K_UNIT: tl.constexpr, K_STEPS: tl.constexpr, K_EVEN: tl.constexpr, K_SHARED: tl.constexpr,
    V_BITS: tl.constexpr, V_UNIT: tl.constexpr, V_STEPS: tl.constexpr, V_EVEN: tl.constexpr, V_SHARED: tl.constexpr,
    QUERIES: tl.constexpr, ASKED: tl.constexpr, SIZE: tl.constexpr, ROTATED: tl.constexpr, KIND: tl.constexpr,
    SHOWN: tl.constexpr, WARPS: tl.constexpr, EARLY: tl.constexpr, HELD: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """A program takes one head and one part of the context of a text; ``factor`` None: keys are read as they are.

    Each warp leaves of each query the largest score, the sum of the weights, and that of values weighted by them.

    Args:
        keys, values: words. factor: ``layout.arranged``, in words. turns: ``layout.turns_of``.
        norm, eps: of keys, of this KIND.
        positions: ``layout.with_runs``. length: how many tokens there are; None: ``tokens``.
        k_eighths, v_eighths: of ranks. room: of each program, for its queries; None: they lie in shared memory.
        K_BITS, V_BITS: of rounded numbers; 0: they are not rounded. K_UNIT, V_UNIT: words that strides are counted
            in, and that the part of a group is a multiple of.
        K_STEPS, V_STEPS: of 8 words of a token. K_EVEN, V_EVEN: all are whole.
        K_SHARED, V_SHARED: heads of a group of latents. QUERIES: of the head. ASKED: words that they fill.
        SHOWN: the mask says which tokens are attended to; else it is added to scores.
        EARLY: values are asked for before the keys of their tokens are scored. HELD: queries stay in registers.
    """
    dtype: tl.constexpr = query.dtype.element_ty
    step: tl.constexpr = 32 * WARPS
    k_halves: tl.constexpr = 2 if K_BITS == 4 else 1
    v_halves: tl.constexpr = 2 if V_BITS == 4 else 1
    matrices: tl.constexpr = k_halves * K_STEPS  # that make one feature of each pair
    fours: tl.constexpr = (QUERIES + 3) // 4
    k_words = K_STEPS * 8 if K_EVEN else k_eighths * (4 // k_halves)
    v_words = V_STEPS * 8 if V_EVEN else v_eighths * (4 // v_halves)
    head, text = tl.program_id(0), tl.program_id(2).to(tl.int64)
    part = text * tl.num_programs(1) + tl.program_id(1)
    begin, end = _part(length, tokens, step)
    thread = tl.arange(0, 32 * WARPS)
    eighth, quarter, local = thread // 4 % 8, thread % 4, thread // 32 * 32
    keys += text * k_batch * K_UNIT + head // K_SHARED * k_words
    values += text * v_batch * V_UNIT + head // V_SHARED * v_words
    k_scales_at, v_scales_at = text * ks_batch + head // K_SHARED, text * vs_batch + head // V_SHARED
    ahead = tiles(keys, begin + local + eighth, end, quarter, k_token, k_words, K_UNIT, K_STEPS, K_EVEN, COMPILED)
    tiles_of: tl.constexpr = (SIZE + 15) // 16
    made_of: tl.constexpr = 0 if factor is None else tiles_of * matrices * 128
    asked_at, factor_at, turns_at = _kept(
        room, part * tl.num_programs(0) + head, keys if factor is None else factor + head * made_of,
        keys if turns is None else turns.to(tl.pointer_type(tl.int32), bitcast=True), thread,
        ASKED, made_of, tiles_of * 16 if ROTATED else 0, WARPS,
    )  # fmt: skip
    first, stop, angles = _last_run(
        positions, mask, frequencies, begin, end, thread, text, p_batch, p_token, mask_batch, mask_token,
        SIZE, ROTATED, SHOWN, step, COMPILED,
    )  # fmt: skip
    store_queries_to_smem(
        asked_at, query + (text * q_batch + head * QUERIES * q_head), q_head, factor, frequencies, thread // 32,
        eighth, quarter, WARPS, QUERIES, SIZE, ROTATED, dtype, COMPILED,
    )  # fmt: skip
    all_copied(thread, COMPILED)
    asked = load_queries(asked_at, ASKED // 64 if HELD else 0, COMPILED)
    state, loaded = _none(fours, v_halves * V_STEPS, tl.zeros(thread.shape, tl.float32)), begin
    while stop > begin:
        if first != loaded:  # keys in registers are those of another place
            ahead = tiles(
                keys, first + local + eighth, stop, quarter, k_token, k_words, K_UNIT, K_STEPS, K_EVEN, COMPILED
            )  # fmt: skip
        for start in tl.range(first, stop, step):
            offsets = start + local + eighth
            prefetch(keys, start + step + thread, stop, k_token, K_UNIT, K_STEPS, COMPILED)
            if EARLY:
                read = tiles(values, offsets, stop, quarter, v_token, v_words, V_UNIT, V_STEPS, V_EVEN, COMPILED)
                keep_order(thread, COMPILED)
            scales = (
                scale_of(k_scales, k_scales_at, offsets, ks_token, stop),
                scale_of(k_scales, k_scales_at, offsets + 8, ks_token, stop),
            )  # fmt: skip
            score = scores(
                ahead, stop >> 31, scales, None if factor is None else factor_at, bias, head * SIZE, norm, eps,
                asked_at, asked, angles, quarter, fours, SIZE, ROTATED, K_BITS, KIND, dtype, COMPILED,
            )  # fmt: skip
            keep_order(thread, COMPILED)
            if not EARLY:
                read = tiles(values, offsets, stop, quarter, v_token, v_words, V_UNIT, V_STEPS, V_EVEN, COMPILED)
            behind = tiles(keys, offsets + step, stop, quarter, k_token, k_words, K_UNIT, K_STEPS, K_EVEN, COMPILED)
            keep_order(thread, COMPILED)
            token = tl.where(quarter < 2, offsets, offsets + 8)
            v_scale = scale_of(v_scales, v_scales_at, token, vs_token, stop)
            state = _all_attended(
                state, score, read, scale, v_scale, (token < stop, token + 16 < stop), mask,
                text * mask_batch + token.to(tl.int64) * mask_token, mask_token, eighth, quarter,
                V_BITS, SHOWN, dtype, COMPILED,
            )  # fmt: skip
            ahead, angles = behind, advance_rotation(angles, turns_at, COMPILED)
        end, stop, loaded = first, begin, begin - 1
        if end > begin:
            first, stop, angles = _last_run(
                positions, mask, frequencies, begin, end, thread, text, p_batch, p_token, mask_batch, mask_token,
                SIZE, ROTATED, SHOWN, step, COMPILED,
            )  # fmt: skip
    left = (part * WARPS + thread // 32) * (tl.num_programs(0) * QUERIES) + head * QUERIES
    for four in tl.static_range(fours):
        _leave(
            sums, peaks, totals, left + four * 4, state[four], v_eighths * 8, eighth, quarter,
            QUERIES - four * 4, v_halves, V_STEPS,
        )  # fmt: skip


@jit
def _some_rows(factor, row, size, column, rank):
    """Some rows of a head's factor, in float32."""
    there = (row < size)[:, None] & (column < rank)[None, :]
    return tl.load(factor + row[:, None] * rank + column[None, :], mask=there, other=0.0).to(tl.float32)


@jit(do_not_specialize=["parts", "eighths"])
def join_kernel(
    sums, peaks, totals, factor, bias, out, parts, eighths,
    HEADS: tl.constexpr, SHARED: tl.constexpr, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    PARTS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """A program adds up what all warps left of a query, and multiplies it by its head's factor, if there is one.

    eighths: of the rank; BLOCK_SIZE is a power of two that holds it. SHARED: queries of a head. PARTS: as many are
    added at once; FEATURES are made at once, and the first of them read before all else.
    """
    head, text = tl.program_id(0), tl.program_id(1).to(tl.int64)
    offsets, column, feature = tl.arange(0, PARTS), tl.arange(0, BLOCK_SIZE), tl.arange(0, FEATURES)
    rank = eighths * 8
    of_head = head // SHARED * SIZE
    if factor is not None:
        factor += of_head * rank
        read = _some_rows(factor, feature, SIZE, column, rank)
    highest, total = float("-inf"), 0.0
    mixed = tl.zeros((BLOCK_SIZE,), tl.float32)
    for start in range(0, parts, PARTS):
        there = start + offsets < parts
        local = (text * parts + start + offsets) * HEADS + head
        peak = tl.load(peaks + local, mask=there, other=float("-inf"))
        weight = tl.load(totals + local, mask=there, other=0.0)
        left = sums + local[:, None] * rank + column[None, :]
        result = tl.load(left, mask=there[:, None] & (column < rank)[None, :], other=0.0)
        higher = tl.maximum(highest, tl.max(peak, axis=0))
        share, fade = tl.exp2(peak - _level(higher)), tl.exp2(highest - _level(higher))
        total = total * fade + tl.sum(weight * share, axis=0)
        mixed = mixed * fade + tl.sum(result * share[:, None], axis=0)
        highest = higher
    mixed = mixed / total
    to = out + (text * HEADS + head) * SIZE
    if factor is None:
        tl.store(to + column, mixed.to(out.dtype.element_ty), mask=column < rank)
    else:
        for start in range(0, SIZE, FEATURES):
            row = start + feature
            if start > 0:
                read = _some_rows(factor, row, SIZE, column, rank)
            made = tl.sum(read * mixed[None, :], axis=1)
            if bias is not None:
                made += tl.load(bias + of_head + row, mask=row < SIZE, other=0.0).to(tl.float32)
            tl.store(to + row, made.to(out.dtype.element_ty), mask=row < SIZE)
