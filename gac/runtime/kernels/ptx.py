"""Matrix products, loads and shared memory in PTX, thread by thread, for Triton kernels.

A tensor has one element for each thread here: ``(32 * warps,)``. Products are ``mma.m16n8k16`` of 16-bit numbers with
float32 sums; ``gac.runtime.kernels.latent_attention`` shows what a thread holds. Triton's interpreter knows no PTX: it
runs the same formulas in plain operations. COMPILED: it is not the interpreter.

Functions that several kernels call read no constants of the module. Triton 3.6 would compile a kernel again whenever
another kernel was compiled first.
"""

from gac.runtime.kernels.guard import jit, tl
from gac.runtime.kernels.latent_attention.layout import ROOM


@jit
def halves(words, dtype: tl.constexpr):
    """The 16 bits of either half, as numbers: one more dimension, the last."""
    low = words.to(tl.int16).to(dtype, bitcast=True)
    return tl.join(low, (words >> 16).to(tl.int16).to(dtype, bitcast=True))


@jit
def in_turn(values):
    """Of values ``(threads, count)`` a tuple of count tensors; count is 1, 2 or 4."""
    threads: tl.constexpr = values.shape[0]
    count: tl.constexpr = values.shape[1]
    if count == 1:
        return (tl.reshape(values, (threads,)),)
    elif count == 2:
        return tl.split(values)
    else:
        even, odd = tl.split(tl.reshape(values, (threads, 2, 2)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        return first, second, third, fourth


@jit
def packed(low, high, dtype: tl.constexpr, COMPILED: tl.constexpr):
    """Two float32 rounded to 16 bits, in the halves of an int32."""
    if COMPILED:
        bfloat16: tl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
        float16: tl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;"
        instruction: tl.constexpr = bfloat16 if dtype == tl.bfloat16 else float16
        return tl.inline_asm_elementwise(instruction, "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1)
    else:
        return (_bits(low, dtype) & 0xFFFF) | (_bits(high, dtype) << 16)


@jit
def paired(low, high, UPPER: tl.constexpr, COMPILED: tl.constexpr):
    """The UPPER halves of two words, else the lower ones, in one word."""
    if COMPILED:
        instruction: tl.constexpr = "prmt.b32 $0, $1, $2, 0x7632;" if UPPER else "prmt.b32 $0, $1, $2, 0x5410;"
        return tl.inline_asm_elementwise(instruction, "=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=1)
    elif UPPER:
        return ((low >> 16) & 0xFFFF) | (high & -0x10000)
    else:
        return (low & 0xFFFF) | (high << 16)


@jit
def plus(pairs, others, dtype: tl.constexpr, COMPILED: tl.constexpr):
    """Sums of numbers of 16 bits, which are pairs in int32."""
    if COMPILED:
        bfloat16: tl.constexpr = "{ .reg .b32 one; mov.b32 one, 0x3F803F80; fma.rn.bf16x2 $0, $1, one, $2; }"
        float16: tl.constexpr = "{ .reg .b32 one; mov.b32 one, 0x3C003C00; fma.rn.f16x2 $0, $1, one, $2; }"
        instruction: tl.constexpr = bfloat16 if dtype == tl.bfloat16 else float16
        return tl.inline_asm_elementwise(instruction, "=r,r,r", [pairs, others], dtype=tl.int32, is_pure=True, pack=1)
    else:
        low, high = tl.split(halves(pairs, dtype).to(tl.float32) + halves(others, dtype).to(tl.float32))
        return packed(low, high, dtype, COMPILED)


@jit
def _bits(number, dtype: tl.constexpr):
    """Of float32 rounded to 16 bits, which Triton's interpreter cuts off for bfloat16; in an int32."""
    if dtype == tl.bfloat16:
        bits = number.to(tl.int32, bitcast=True)
        return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    else:
        return number.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)


@jit
def transposed(pairs, COMPILED: tl.constexpr):
    """Of 8 x 8 numbers of 16 bits, of which a thread holds row i, columns 2j and 2j + 1, row i of the transpose."""
    if COMPILED:
        return tl.inline_asm_elementwise(
            "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [pairs], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        both = tl.reshape(tl.join(pairs & 0xFFFF, (pairs >> 16) & 0xFFFF), (pairs.shape[0] // 32, 8, 8))
        low, high = tl.split(tl.reshape(tl.permute(both, (0, 2, 1)), (pairs.shape[0], 2)))
        return low | (high << 16)


@jit
def cosine_and_sine(angle, COMPILED: tl.constexpr):
    """Of angles in radians, up to 10^6 of them, within 2^-20: the GPU's own are exact near 0 alone."""
    if COMPILED:
        turns = tl.floor(angle * 0.15915494309189535 + 0.5)
        near = tl.fma(turns, -6.2831854820251465, angle)  # 2 pi as a float32 has it
        near = tl.fma(turns, 1.7484555314695172e-07, near)  # and what it has too much
        return tl.inline_asm_elementwise(
            "cos.approx.f32 $0, $2; sin.approx.f32 $1, $2;", "=&f,=f,f", [near],
            dtype=(tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.cos(angle), tl.sin(angle)


@jit
def product(a, b, sums, dtype: tl.constexpr, COMPILED: tl.constexpr):
    """``sums + a @ b``: tuples of four, two and four tensors; the numbers of a and b are pairs in int32."""
    if not COMPILED:
        return _interpreted(a, b, sums, dtype)
    else:
        operands: tl.constexpr = " {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
        bfloat16: tl.constexpr = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
        float16: tl.constexpr = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
        instruction: tl.constexpr = bfloat16 if dtype == tl.bfloat16 else float16
        return tl.inline_asm_elementwise(
            instruction + operands,
            "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
            [a[0], a[1], a[2], a[3], b[0], b[1], sums[0], sums[1], sums[2], sums[3]],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip


@jit
def sum_of(part, COUNT: tl.constexpr, APART: tl.constexpr):
    """In each of COUNT threads that are APART the sum of what they have."""
    shape: tl.constexpr = (part.shape[0] // (COUNT * APART), COUNT, APART)
    result = tl.sum(tl.reshape(part, shape), axis=1, keep_dims=True)
    return tl.reshape(tl.broadcast_to(result, shape), part.shape)


@jit
def highest_of(part, COUNT: tl.constexpr, APART: tl.constexpr):
    shape: tl.constexpr = (part.shape[0] // (COUNT * APART), COUNT, APART)
    result = tl.max(tl.reshape(part, shape), axis=1, keep_dims=True)
    return tl.reshape(tl.broadcast_to(result, shape), part.shape)


@jit
def keep_order(thread, COMPILED: tl.constexpr):
    """The assembler moves no load from before this to behind it, nor the other way."""
    if COMPILED:
        tl.inline_asm_elementwise(
            "bar.warp.sync 0xffffffff; mov.b32 $0, $1;", "=r,r", [thread], dtype=tl.int32, is_pure=False, pack=1
        )


@jit
def _eight(register, dtype: tl.constexpr):
    return tl.reshape(halves(register, dtype).to(tl.float32), (register.shape[0] // 32, 8, 8))


@jit
def _interpreted(a, b, sums, dtype: tl.constexpr):
    near, far = _eight(b[0], dtype)[:, None, :, :], _eight(b[1], dtype)[:, None, :, :]
    result = ()
    for half in tl.static_range(2):
        both = tl.sum(_eight(a[half], dtype)[:, :, None, :] * near, axis=3)
        both += tl.sum(_eight(a[half + 2], dtype)[:, :, None, :] * far, axis=3)
        even, odd = tl.split(tl.reshape(both, (both.shape[0], 8, 4, 2)))
        shape: tl.constexpr = sums[0].shape
        even, odd = sums[2 * half] + tl.reshape(even, shape), sums[2 * half + 1] + tl.reshape(odd, shape)
        result += (even, odd)
    return result


# Loads of neighbouring words.

_FURTHER = tl.constexpr("mad.wide.s32 $0, $1, $2, $3;")
_PREFETCH = tl.constexpr("prefetch.global.L2 [$1]; mov.b32 $0, 0;")
_LINE = tl.constexpr(1024)  # bits of a line of the L2 cache


@jit
def further(base, count, words, COMPILED: tl.constexpr):
    """Advance a pointer by count times so many words: in PTX one instruction, of which LLVM makes three."""
    if COMPILED:
        apart = words * (base.dtype.element_ty.primitive_bitwidth // 8)
        ptrs = tl.inline_asm_elementwise(
            _FURTHER, "=l,r,r,l", [count, apart, base.to(tl.int64)], dtype=tl.int64, is_pure=True, pack=1
        )
        return ptrs.to(base.dtype)
    else:
        return base + count.to(tl.int64) * words


@jit
def prefetched(row, WORDS: tl.constexpr, COMPILED: tl.constexpr):
    """Prefetch so many words of each thread's row into L2, a line for every 128 bytes from its beginning on.

    The last line of a row that begins within a line is left to the thread whose row begins there.
    """
    if COMPILED:
        for start in tl.static_range(0, WORDS, _LINE // row.dtype.element_ty.primitive_bitwidth):
            ptrs = (row + start).to(tl.int64)
            tl.inline_asm_elementwise(_PREFETCH, "=r,l", [ptrs], dtype=tl.int32, is_pure=False, pack=1)


def _load(count: int, kind: str) -> str:
    """PTX that reads so many words at once where the last operand is not 0, and leaves zeros elsewhere."""
    to = [f"${ptrs}" for ptrs in range(count)]
    zeros = " ".join(f"mov.b32 {item}, 0;" for item in to)
    into = f".v{count}.{kind} {{{', '.join(to)}}}" if count > 1 else f".{kind} $0"
    return f"{{ .reg .pred p; setp.ne.s32 p, ${count + 1}, 0; {zeros} @p ld.global{into}, [${count}]; }}"


_FOUR_32, _TWO_32, _ONE_32 = (tl.constexpr(_load(count, "b32")) for count in (4, 2, 1))
_FOUR_16, _TWO_16, _ONE_16 = (tl.constexpr(_load(count, "s16")) for count in (4, 2, 1))  # to 32 bits, with their sign


@jit
def _four(ptrs, there):
    load: tl.constexpr = _FOUR_16 if ptrs.dtype.element_ty == tl.int16 else _FOUR_32
    return tl.inline_asm_elementwise(
        load, "=&r,=&r,=&r,=&r,l,r", [ptrs, there],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
    )  # fmt: skip


@jit
def _two(ptrs, there):
    load: tl.constexpr = _TWO_16 if ptrs.dtype.element_ty == tl.int16 else _TWO_32
    return tl.inline_asm_elementwise(
        load, "=&r,=&r,l,r", [ptrs, there], dtype=(tl.int32, tl.int32), is_pure=False, pack=1
    )


@jit
def _one_word(ptrs, there):
    load: tl.constexpr = _ONE_16 if ptrs.dtype.element_ty == tl.int16 else _ONE_32
    return (tl.inline_asm_elementwise(load, "=&r,l,r", [ptrs, there], dtype=tl.int32, is_pure=False, pack=1),)


@jit
def neighbours(ptrs, there, COUNT: tl.constexpr, ALIGNED: tl.constexpr, COMPILED: tl.constexpr):
    """So many words (1, 2 or 4) of 16 or 32 bits from each thread's place on, as int32; zeros where not ``there``.

    Each place is a multiple of ALIGNED words; at most so many are read at once.
    """
    if COMPILED:
        return _compiled(ptrs, 1 if there is None else there.to(tl.int32), COUNT, ALIGNED)
    else:
        places = ptrs[:, None] + tl.arange(0, COUNT)[None, :]
        if there is None:
            return in_turn(tl.load(places).to(tl.int32))
        else:
            return in_turn(tl.load(places, mask=there[:, None], other=0).to(tl.int32))


@jit
def _compiled(ptrs, there, COUNT: tl.constexpr, ALIGNED: tl.constexpr):
    if COUNT == 1:
        return _one_word(ptrs, there)
    elif ALIGNED < COUNT:
        half: tl.constexpr = COUNT // 2
        return _compiled(ptrs, there, half, ALIGNED) + _compiled(ptrs + half, there, half, ALIGNED)
    elif COUNT == 2:
        return _two(ptrs, there)
    else:
        return _four(ptrs, there)


# Words in shared memory: what all warps of a program read again and again.

_RESERVE = tl.constexpr(f".shared .align 16 .b8 gac_words[{ROOM}]; mov.u32 $0, gac_words;")
_COPY = tl.constexpr(
    "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p cp.async.cg.shared.global [$1], [$2], 16; mov.b32 $0, 0; }"
)
_WAIT = tl.constexpr("cp.async.wait_all; mov.b32 $0, $1;")
_LEAVE = tl.constexpr("{ .reg .pred p; setp.ne.s32 p, $4, 0; @p st.shared.v2.b32 [$1], {$2, $3}; mov.b32 $0, 0; }")
_FOUR = tl.constexpr("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];")
_TWO = tl.constexpr("ld.shared.v2.b32 {$0, $1}, [$2];")


@jit
def reserved(thread):
    """Return where the program's own ROOM begins; a kernel calls it once."""
    return tl.inline_asm_elementwise(_RESERVE, "=r,r", [thread], dtype=tl.int32, is_pure=False, pack=1)


@jit
def copied(place, ptrs, thread, WORDS: tl.constexpr, THREADS: tl.constexpr):
    """Begin to copy so many words from memory, four of each thread at a time."""
    for start in tl.static_range(0, WORDS, 4 * THREADS):
        word = start + thread * 4
        tl.inline_asm_elementwise(
            _COPY, "=r,r,l,r", [place + 4 * word, ptrs + word, (word < WORDS).to(tl.int32)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@jit
def all_copied(thread, COMPILED: tl.constexpr):
    """Wait for the copies, and what has been left, of all threads."""
    if COMPILED:
        tl.inline_asm_elementwise(_WAIT, "=r,r", [thread], dtype=tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()


@jit
def store_two(place, words, first, two, there):
    """Write two words, so many words past each place."""
    if place.dtype.is_ptr():
        tl.store(place + words, first, mask=there)
        tl.store(place + words + 1, two, mask=there)
    else:
        tl.inline_asm_elementwise(
            _LEAVE, "=r,r,r,r,r", [place + 4 * words, first, two, there.to(tl.int32)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@jit
def load_words(place, words, COUNT: tl.constexpr, COMPILED: tl.constexpr):
    """2 or 4 words of each thread, so many words past its place, which is a multiple of COUNT words."""
    if place.dtype.is_ptr():
        return neighbours(place + words, None, COUNT, COUNT, COMPILED)
    elif COUNT == 2:
        return tl.inline_asm_elementwise(
            _TWO, "=r,=r,r", [place + 4 * words], dtype=(tl.int32, tl.int32), is_pure=False, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            _FOUR, "=r,=r,=r,=r,r", [place + 4 * words],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
