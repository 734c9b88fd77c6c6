"""Scores of a new token's queries with two tiles of 16 cached keys; the package's docstring has the layout."""

from gac.runtime.kernels.guard import jit, tl
from gac.runtime.kernels.latent_attention.read import left
from gac.runtime.kernels.ptx import cosine_and_sine, load_words, neighbours, packed, product, store_two, sum_of


@jit
def _places(pair, SIZE: tl.constexpr, ROTATED: tl.constexpr):
    """Return where the first and the second feature of each pair lie in a head."""
    turns = pair < ROTATED // 2
    first = pair + tl.where(turns, 0, ROTATED // 2)
    second = pair + tl.where(turns, ROTATED // 2, SIZE // 2)
    return first, second


@jit
def _features(offsets, quarter, SIZE: tl.constexpr, ROTATED: tl.constexpr):
    """Return where the first and second features of each thread's two pairs lie, and whether they are there."""
    low, high = 8 * offsets + 2 * quarter, 8 * offsets + 2 * quarter + 1
    first, second = _places(low, SIZE, ROTATED)
    third, fourth = _places(high, SIZE, ROTATED)
    return (first, third), (second, fourth), (low < SIZE // 2, high < SIZE // 2)


@jit
def _turned(first, two, cosine, sine):
    return first * cosine - two * sine, two * cosine + first * sine


@jit
def _angles(frequencies, place, offsets, quarter, ROTATED: tl.constexpr, COMPILED: tl.constexpr):
    """Cosines of each thread's two pairs, and their sines; pairs past those that turn stay where they are."""
    pair = 8 * offsets + 2 * quarter
    low = _number(frequencies + pair, pair < ROTATED // 2, COMPILED)
    high = _number(frequencies + pair + 1, pair + 1 < ROTATED // 2, COMPILED)
    first, two = cosine_and_sine(place * low, COMPILED), cosine_and_sine(place * high, COMPILED)
    return first[0], two[0], first[1], two[1]


@jit
def angles_at(frequencies, place, quarter, SIZE: tl.constexpr, ROTATED: tl.constexpr, COMPILED: tl.constexpr):
    """Angles of all pairs of each thread at its place; nothing where keys are not rotated."""
    result = ()
    if ROTATED:
        for offsets in tl.static_range((SIZE + 15) // 16):
            result += (_angles(frequencies, place.to(tl.float32), offsets, quarter, ROTATED, COMPILED),)
    return result


@jit
def _float(word):
    return word.to(tl.float32, bitcast=True)


@jit
def advance_rotation(angles, turns, COMPILED: tl.constexpr):
    """Angles that are a step further; turns is where each thread's part of ``layout.turns_of`` begins."""
    result = ()
    for offsets in tl.static_range(len(angles)):
        by = load_words(turns, offsets * 16, 4, COMPILED)
        first, two = _turned(angles[offsets][0], angles[offsets][2], _float(by[0]), _float(by[2]))
        three, four = _turned(angles[offsets][1], angles[offsets][3], _float(by[1]), _float(by[3]))
        result += ((first, three, two, four),)
    return result


@jit
def _pairs_asked(query, there, offsets, quarter, SIZE: tl.constexpr, ROTATED: tl.constexpr, COMPILED: tl.constexpr):
    """First and second features of each thread's two pairs of its query."""
    first, second, inside = _features(offsets, quarter, SIZE, ROTATED)
    low, high = there & inside[0], there & inside[1]
    item, two = _number(query + first[0], low, COMPILED), _number(query + second[0], low, COMPILED)
    return item, two, _number(query + first[1], high, COMPILED), _number(query + second[1], high, COMPILED)


@jit
def _turned_back(pairs, angles, dtype: tl.constexpr, COMPILED: tl.constexpr):
    """Both pairs as a right matrix; angles None: as they are."""
    first, two, three, four = pairs
    if angles is not None:
        first, two = _turned(first, two, angles[0], -angles[2])
        three, four = _turned(three, four, angles[1], -angles[3])
    return packed(first, three, dtype, COMPILED), packed(two, four, dtype, COMPILED)


@jit
def store_queries_to_smem(
    to, query, stride, factor, frequencies, warp, eighth, quarter, WARPS: tl.constexpr,
    QUERIES: tl.constexpr, SIZE: tl.constexpr, ROTATED: tl.constexpr, dtype: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Write a head's queries as right matrices, by matrix, tile and four; a thread's place is 2 words of each 64.

    Every warp makes some of the matrices, and later reads all of them: for each product, or once where registers hold
    them. Queries of the second tile are turned back by 16 places, of the second 8 tokens by 8 more.
    """
    fours: tl.constexpr = (QUERIES + 3) // 4
    matrices: tl.constexpr = (SIZE + 15) // 16
    paired: tl.constexpr = matrices // 2 * 2
    each: tl.constexpr = (matrices + WARPS - 1) // WARPS
    behind = tl.where(eighth < 4, 0, 8).to(tl.float32)
    for which in tl.static_range(each):
        offsets = warp * each + which
        angles = (None, None)
        if factor is not None and ROTATED:
            angles = (
                _angles(frequencies, behind, offsets, quarter, ROTATED, COMPILED),
                _angles(frequencies, behind + 16, offsets, quarter, ROTATED, COMPILED),
            )
        for four in tl.static_range(fours):
            number = four * 4 + eighth % 4
            local, there = query + number * stride, (number < QUERIES) & (offsets < matrices)
            for tile in tl.static_range(2):
                if factor is None:
                    first = tl.where(
                        offsets < paired, offsets // 2 * 32 + 8 * quarter + offsets % 2 * 4, offsets * 16 + 4 * quarter
                    )
                    made = (
                        _two(local, first, there, SIZE, dtype, COMPILED),
                        _two(local, first + 2, there, SIZE, dtype, COMPILED),
                    )
                else:
                    pairs = _pairs_asked(local, there, offsets, quarter, SIZE, ROTATED, COMPILED)
                    made = _turned_back(pairs, angles[tile], dtype, COMPILED)
                store_two(to, ((offsets * 2 + tile) * fours + four) * 64, made[0], made[1], offsets < matrices)


@jit
def load_queries(queries, COUNT: tl.constexpr, COMPILED: tl.constexpr):
    """So many right matrices, as ``store_queries_to_smem`` leaves them, in registers."""
    result = ()
    for offsets in tl.static_range(COUNT):
        result += (load_words(queries, offsets * 64, 2, COMPILED),)
    return result


@jit
def _number(offsets, there, COMPILED: tl.constexpr):
    kind: tl.constexpr = offsets.dtype.element_ty
    if kind == tl.float32:
        return _float(neighbours(offsets.to(tl.pointer_type(tl.int32), bitcast=True), there, 1, 1, COMPILED)[0])
    else:
        word = neighbours(offsets.to(tl.pointer_type(tl.int16), bitcast=True), there, 1, 1, COMPILED)[0]
        return word.to(tl.int16).to(kind, bitcast=True).to(tl.float32)


@jit
def _two(query, offsets, there, SIZE: tl.constexpr, dtype: tl.constexpr, COMPILED: tl.constexpr):
    here = there & (offsets < SIZE)
    return packed(
        _number(query + offsets, here, COMPILED), _number(query + offsets + 1, here, COMPILED), dtype, COMPILED
    )


# --- keys ---


@jit
def _rights(factor, AT: tl.constexpr, STEPS: tl.constexpr, HALVES: tl.constexpr, COMPILED: tl.constexpr):
    """Right matrices that make the first features of tile AT, and those that make the second ones.

    They are as ``layout.arranged`` lays them: two of each 128 words, then an odd one of both, for each half.
    """
    full: tl.constexpr = HALVES * (STEPS // 2)
    first, second = (), ()
    for offsets in tl.static_range(full):
        low = load_words(factor, (AT * HALVES * STEPS + offsets) * 128, 4, COMPILED)
        two = load_words(factor, (AT * HALVES * STEPS + full + offsets) * 128, 4, COMPILED)
        first += ((low[0], low[1]), (low[2], low[3]))
        second += ((two[0], two[1]), (two[2], two[3]))
    for half in tl.static_range(HALVES if STEPS % 2 else 0):
        both = load_words(factor, (AT * HALVES * STEPS + 2 * full + half) * 128, 4, COMPILED)
        first += ((both[0], both[1]),)
        second += ((both[2], both[3]),)
    return first, second


@jit
def _of_pairs(numbers, start, feature, inside, like, COMPILED: tl.constexpr):
    """Numbers of both pairs, as a product has them: for the first token and for the second. None: zeros."""
    if numbers is None:
        return like, like, like, like
    else:
        low = _number(numbers + start + feature[0], inside[0], COMPILED)
        high = _number(numbers + start + feature[1], inside[1], COMPILED)
        return low, high, low, high


@jit
def _of_both(numbers, start, first, second, inside, like, COMPILED: tl.constexpr):
    item = _of_pairs(numbers, start, first, inside, like, COMPILED)
    return item, _of_pairs(numbers, start, second, inside, like, COMPILED)


@jit
def _made(left, right, scales, begun, BITS: tl.constexpr, dtype: tl.constexpr, COMPILED: tl.constexpr):
    """8 features of both tokens' keys; ``begun`` are their biases."""
    nothing = tl.zeros(begun[0].shape, tl.float32)
    sums = begun
    if BITS:
        sums = (nothing, nothing, nothing, nothing)
    for offsets in tl.static_range(len(left)):
        sums = product(left[offsets], right[offsets], sums, dtype, COMPILED)
    if BITS:
        first, second = scales
        return (
            sums[0] * first + begun[0], sums[1] * first + begun[1],
            sums[2] * second + begun[2], sums[3] * second + begun[3],
        )  # fmt: skip
    else:
        return sums


@jit
def _squares(sums, low, two):
    """Sums of squares of both tokens, with those of some more features."""
    first = sums[0] + low[0] * low[0] + low[1] * low[1] + two[0] * two[0] + two[1] * two[1]
    return first, sums[1] + low[2] * low[2] + low[3] * low[3] + two[2] * two[2] + two[3] * two[3]


@jit
def _weighed(made, weights, KIND: tl.constexpr):
    more: tl.constexpr = 1.0 if KIND == "gemma" else 0.0
    return (
        made[0] * (weights[0] + more), made[1] * (weights[1] + more),
        made[2] * (weights[2] + more), made[3] * (weights[3] + more),
    )  # fmt: skip


@jit
def _turned_keys(first, two, turn):
    a, b = _turned(first[0], two[0], turn[0], turn[2])
    c, d = _turned(first[1], two[1], turn[1], turn[3])
    e, f = _turned(first[2], two[2], turn[0], turn[2])
    g, h = _turned(first[3], two[3], turn[1], turn[3])
    return (a, c, e, g), (b, d, f, h)


@jit
def _as_left(first, two, dtype: tl.constexpr, COMPILED: tl.constexpr):
    return (
        packed(first[0], first[1], dtype, COMPILED), packed(first[2], first[3], dtype, COMPILED),
        packed(two[0], two[1], dtype, COMPILED), packed(two[2], two[3], dtype, COMPILED),
    )  # fmt: skip


@jit
def _keys(
    latents, matrices, first_scale, second_scale, biases, squares, weights, turns, AT: tl.constexpr,
    ROTATED: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr, dtype: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Of 8 pairs of features both tokens' keys, as a left matrix; and their sums of squares before the norm."""
    scales = first_scale, second_scale
    first = _made(latents, matrices[0], scales, biases[0], BITS, dtype, COMPILED)
    two = _made(latents, matrices[1], scales, biases[1], BITS, dtype, COMPILED)
    if weights is not None:
        squares = _squares(squares, first, two)
        first, two = _weighed(first, weights[0], KIND), _weighed(two, weights[1], KIND)
    if ROTATED:
        first, two = _turned_keys(first, two, turns[AT])
    return _as_left(first, two, dtype, COMPILED), squares


# --- scores ---


@jit
def scores(
    read, nil, scales, factor, bias, bias_at, norm, eps, queries, asked, turns, quarter,
    FOURS: tl.constexpr, SIZE: tl.constexpr, ROTATED: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr,
    dtype: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """By tile and four queries what a product leaves in each thread: of the first token two, of the second two.

    A right matrix is read once for both tiles. ``read`` are ``read.tiles``, ``nil`` is as ``read.left`` takes it,
    ``scales`` are by tile; ``factor`` is where each thread's part of it begins, ``queries`` where
    ``store_queries_to_smem`` leaves them, unless registers hold them (``asked``).
    """
    halves: tl.constexpr = 2 if BITS == 4 else 1
    nothing = tl.zeros(quarter.shape, tl.float32)
    latents = left(read[0], nil, BITS, dtype, COMPILED), left(read[1], nil, BITS, dtype, COMPILED)
    low, high = (nothing, nothing), (nothing, nothing)
    sums = ()
    for _ in tl.static_range(2 * FOURS):
        sums += ((nothing, nothing, nothing, nothing),)
    if factor is None:
        for offsets in tl.static_range(len(latents[0])):
            sums = _added(
                (latents[0][offsets], latents[1][offsets]), queries, asked, offsets, sums, FOURS, dtype, COMPILED
            )
    else:
        for offsets in tl.static_range((SIZE + 15) // 16):
            first, second, inside = _features(offsets, quarter, SIZE, ROTATED)
            matrices = _rights(factor, offsets, len(latents[0]) // halves, halves, COMPILED)
            biases = _of_both(bias, bias_at, first, second, inside, nothing, COMPILED)
            weights = norm
            if norm is not None:
                weights = _of_both(norm, 0, first, second, inside, nothing, COMPILED)
            item, low = _keys(
                latents[0], matrices, scales[0][0], scales[1][0], biases, low, weights, turns, offsets,
                ROTATED, BITS, KIND, dtype, COMPILED,
            )  # fmt: skip
            two, high = _keys(
                latents[1], matrices, scales[0][1], scales[1][1], biases, high, weights, turns, offsets,
                ROTATED, BITS, KIND, dtype, COMPILED,
            )  # fmt: skip
            sums = _added((item, two), queries, asked, offsets, sums, FOURS, dtype, COMPILED)
    return _by_tile(sums, (low, high), norm, eps, FOURS, SIZE)


@jit
def _by_tile(sums, squares, norm, eps, FOURS: tl.constexpr, SIZE: tl.constexpr):
    result = ()
    for tile in tl.static_range(2):
        of_tile = ()
        for four in tl.static_range(FOURS):
            score = sums[tile * FOURS + four]
            of_tile += (score if norm is None else _normed(score, squares[tile], eps, SIZE),)
        result += (of_tile,)
    return result


@jit
def _right(queries, asked, AT: tl.constexpr, COMPILED: tl.constexpr):
    if len(asked):
        return asked[AT]
    else:
        return load_words(queries, AT * 64, 2, COMPILED)


@jit
def _added(
    keys, queries, asked, AT: tl.constexpr, sums, FOURS: tl.constexpr, dtype: tl.constexpr, COMPILED: tl.constexpr
):  # fmt: skip
    """Sums of all tiles and queries with one more product."""
    result = ()
    for tile in tl.static_range(len(keys)):
        for four in tl.static_range(FOURS):
            right = _right(queries, asked, (AT * len(keys) + tile) * FOURS + four, COMPILED)
            result += (product(keys[tile], right, sums[tile * FOURS + four], dtype, COMPILED),)
    return result


@jit
def _normed(score, squares, eps, SIZE: tl.constexpr):
    """Scores with keys over the root of the mean of their squares, of which each of four threads has a part."""
    first = tl.rsqrt(sum_of(squares[0], 4, 1) / SIZE + eps)
    second = tl.rsqrt(sum_of(squares[1], 4, 1) / SIZE + eps)
    return score[0] * first, score[1] * first, score[2] * second, score[3] * second
