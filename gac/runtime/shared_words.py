"""Words in shared memory, thread by thread, for Triton kernels: what all warps of a program read again and again.

Triton gives no places in shared memory, so they are written in PTX. A load from there does not wait behind loads from
memory, as one does that the L1 cache answers. A place there is a number of bytes, in int32. Triton's interpreter knows
no PTX: its words lie in memory, where a place is a pointer.
"""

try:
    import triton
    import triton.language as tl

    from .latent_layout import ROOM
    from .word_loads import neighbours
except ImportError as failure:  # transformers looks for what files import, but not here: a CPU needs no Triton
    raise RuntimeError("Triton is not installed") from failure

_RESERVE = tl.constexpr(f".shared .align 16 .b8 gac_words[{ROOM}]; mov.u32 $0, gac_words;")
_COPY = tl.constexpr(
    "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p cp.async.cg.shared.global [$1], [$2], 16; mov.b32 $0, 0; }"
)
_WAIT = tl.constexpr("cp.async.wait_all; mov.b32 $0, $1;")
_LEAVE = tl.constexpr("{ .reg .pred p; setp.ne.s32 p, $4, 0; @p st.shared.v2.b32 [$1], {$2, $3}; mov.b32 $0, 0; }")
_FOUR = tl.constexpr("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];")
_TWO = tl.constexpr("ld.shared.v2.b32 {$0, $1}, [$2];")


@triton.jit
def reserved(thread):  # type: ignore[no-untyped-def]
    """Where the program's own ROOM begins; a kernel calls it once."""
    return tl.inline_asm_elementwise(_RESERVE, "=r,r", [thread], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit  # type: ignore[untyped-decorator]
def copied(place, at, thread, WORDS: tl.constexpr, THREADS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Begin to copy so many words from memory, four of each thread at a time."""
    for start in tl.static_range(0, WORDS, 4 * THREADS):
        word = start + thread * 4
        tl.inline_asm_elementwise(
            _COPY, "=r,r,l,r", [place + 4 * word, at + word, (word < WORDS).to(tl.int32)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def all_copied(thread, COMPILED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait for the copies, and what has been left, of all threads."""
    if COMPILED:
        tl.inline_asm_elementwise(_WAIT, "=r,r", [thread], dtype=tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()


@triton.jit
def leave_two(place, words, one, two, there):  # type: ignore[no-untyped-def]
    """Write two words, so many words past each place."""
    if place.dtype.is_ptr():
        tl.store(place + words, one, mask=there)
        tl.store(place + words + 1, two, mask=there)
    else:
        tl.inline_asm_elementwise(
            _LEAVE, "=r,r,r,r,r", [place + 4 * words, one, two, there.to(tl.int32)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def held(place, words, COUNT: tl.constexpr, COMPILED: tl.constexpr):  # type: ignore[no-untyped-def]
    """2 or 4 words of each thread, so many words past its place, which is a multiple of COUNT words."""
    if place.dtype.is_ptr():
        return neighbours(place + words, None, COUNT, COUNT, COMPILED)
    elif COUNT == 2:  # noqa: RET505 - Triton compiles one branch alone
        return tl.inline_asm_elementwise(
            _TWO, "=r,=r,r", [place + 4 * words], dtype=(tl.int32, tl.int32), is_pure=False, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            _FOUR, "=r,=r,=r,=r,r", [place + 4 * words],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
