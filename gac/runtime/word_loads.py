"""Loads of neighbouring words, thread by thread, for Triton kernels: a tensor has one element for each thread.

They are written in PTX. One pass of Triton's compiler looks at each of its own loads together with all that hangs on
it, and took nine tenths of the time in which kernels of attention over latents were compiled. Triton's interpreter
knows no PTX, and runs plain loads. COMPILED: it is not the interpreter.
"""

try:
    import triton
    import triton.language as tl

    from .fragments import in_turn
except ImportError as failure:  # transformers looks for what files import, but not here: a CPU needs no Triton
    raise RuntimeError("Triton is not installed") from failure


_FURTHER = tl.constexpr("mad.wide.s32 $0, $1, $2, $3;")
_PREFETCH = tl.constexpr("prefetch.global.L2 [$1]; mov.b32 $0, 0;")
_LINE = tl.constexpr(1024)
"""Bits of a line of the L2 cache."""


@triton.jit  # type: ignore[untyped-decorator]
def further(held, count, words, COMPILED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where count times so many words have gone by; a compiled place is one instruction, which LLVM makes three of."""
    if COMPILED:
        apart = words * (held.dtype.element_ty.primitive_bitwidth // 8)
        at = tl.inline_asm_elementwise(
            _FURTHER, "=l,r,r,l", [count, apart, held.to(tl.int64)], dtype=tl.int64, is_pure=True, pack=1
        )
        return at.to(held.dtype)
    else:  # noqa: RET505 - Triton compiles one branch alone
        return held + count.to(tl.int64) * words


@triton.jit  # type: ignore[untyped-decorator]
def prefetched(row, WORDS: tl.constexpr, COMPILED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Prefetch so many words of each thread's row into L2, a line for every 128 bytes from its beginning on.

    The last line of a row that begins within a line is left to the thread whose row begins there.
    """
    if COMPILED:
        for start in tl.static_range(0, WORDS, _LINE // row.dtype.element_ty.primitive_bitwidth):
            at = (row + start).to(tl.int64)
            tl.inline_asm_elementwise(_PREFETCH, "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1)


def _load(count: int, kind: str) -> str:
    """PTX that reads so many words at once where the last operand is not 0, and leaves zeros elsewhere."""
    to = [f"${at}" for at in range(count)]
    zeros = " ".join(f"mov.b32 {one}, 0;" for one in to)
    into = f".v{count}.{kind} {{{', '.join(to)}}}" if count > 1 else f".{kind} $0"
    return f"{{ .reg .pred p; setp.ne.s32 p, ${count + 1}, 0; {zeros} @p ld.global{into}, [${count}]; }}"


_FOUR_32, _TWO_32, _ONE_32 = (tl.constexpr(_load(count, "b32")) for count in (4, 2, 1))
_FOUR_16, _TWO_16, _ONE_16 = (tl.constexpr(_load(count, "s16")) for count in (4, 2, 1))  # to 32 bits, with their sign


@triton.jit
def _four(at, there):  # type: ignore[no-untyped-def]
    load: tl.constexpr = _FOUR_16 if at.dtype.element_ty == tl.int16 else _FOUR_32
    return tl.inline_asm_elementwise(
        load, "=&r,=&r,=&r,=&r,l,r", [at, there],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _two(at, there):  # type: ignore[no-untyped-def]
    load: tl.constexpr = _TWO_16 if at.dtype.element_ty == tl.int16 else _TWO_32
    return tl.inline_asm_elementwise(
        load, "=&r,=&r,l,r", [at, there], dtype=(tl.int32, tl.int32), is_pure=False, pack=1
    )


@triton.jit
def _one(at, there):  # type: ignore[no-untyped-def]
    load: tl.constexpr = _ONE_16 if at.dtype.element_ty == tl.int16 else _ONE_32
    return (tl.inline_asm_elementwise(load, "=&r,l,r", [at, there], dtype=tl.int32, is_pure=False, pack=1),)


@triton.jit  # type: ignore[untyped-decorator]
def neighbours(at, there, COUNT: tl.constexpr, ALIGNED: tl.constexpr, COMPILED: tl.constexpr):  # type: ignore[no-untyped-def]
    """So many words of 16 or 32 bits from each thread's place on, as int32; zeros where they are not there.

    Args:
        there: boolean; None: all are. COUNT: 1, 2 or 4.
        ALIGNED: words that each place is a multiple of; at most so many are read at once.
    """
    if COMPILED:
        return _compiled(at, 1 if there is None else there.to(tl.int32), COUNT, ALIGNED)
    else:  # noqa: RET505 - Triton compiles one branch alone
        places = at[:, None] + tl.arange(0, COUNT)[None, :]
        if there is None:
            return in_turn(tl.load(places).to(tl.int32))
        else:  # noqa: RET505 - Triton compiles one branch alone
            return in_turn(tl.load(places, mask=there[:, None], other=0).to(tl.int32))


@triton.jit  # type: ignore[untyped-decorator]
def _compiled(at, there, COUNT: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    if COUNT == 1:
        return _one(at, there)
    elif ALIGNED < COUNT:  # noqa: RET505 - Triton compiles one branch alone
        half: tl.constexpr = COUNT // 2
        return _compiled(at, there, half, ALIGNED) + _compiled(at + half, there, half, ALIGNED)
    elif COUNT == 2:
        return _two(at, there)
    else:
        return _four(at, there)
