"""Rows of inputs as threads have them that multiply them with weights of few bits."""

from gac.runtime.kernels.guard import jit, tl
from gac.runtime.kernels.ptx import in_turn, paired


@jit
def _two(inputs, AT: tl.constexpr, APART: tl.constexpr, COMPILED: tl.constexpr):
    """Number AT of what a thread has loaded below that APART further on: int32."""
    first = inputs[AT // 8][AT % 8 // 2]
    second = inputs[(AT + APART) // 8][(AT + APART) % 8 // 2]
    return paired(first, second, AT % 2 == 1, COMPILED)


@jit
def input_chunks(offsets, left, COUNT: tl.constexpr, APART: tl.constexpr, WHOLE: tl.constexpr):
    """Numbers of the row in COUNT times 16 bytes, APART words from each other: zeros where fewer are left."""
    result = ()
    for chunk in tl.static_range(COUNT):
        four = tl.arange(0, 4)[None, :] + chunk * APART
        there = left > 0 if WHOLE else four < left
        result += (tl.load(offsets[:, None] + four, mask=there, other=0),)
    return result


@jit
def paired_inputs(chunks, FIRST: tl.constexpr, COUNT: tl.constexpr, DEEP: tl.constexpr, COMPILED: tl.constexpr):
    """Numbers for DEEP units, in pairs like theirs, of COUNT chunks from FIRST on."""
    inputs = ()
    for chunk in tl.static_range(COUNT):
        inputs += (in_turn(chunks[FIRST + chunk]),)
    pairs: tl.constexpr = COUNT * 4 // DEEP
    result = ()
    for pair in tl.static_range(COUNT * 4):
        result += (_two(inputs, pair // pairs * 2 * pairs + pair % pairs, pairs, COMPILED),)
    return result


@jit
def input_pairs(
    offsets, left, BITS: tl.constexpr, DEEP: tl.constexpr, WHOLE: tl.constexpr, COMPILED: tl.constexpr
):  # fmt: skip
    """Numbers of the row for DEEP units of each thread, in pairs like theirs: zeros where fewer are left."""
    count: tl.constexpr = DEEP * (16 if BITS == 3 else 16 // BITS) // 4
    return paired_inputs(input_chunks(offsets, left, count, 4, WHOLE), 0, count, DEEP, COMPILED)
