"""Products of small pieces of matrices in tensor cores, thread by thread, for Triton kernels.

A tensor has one element for each thread here: ``(32 * warps,)``. Thread ``4 * i + j`` of a warp is thread j of four,
and the four are number i of eight. A product is that of PTX, ``mma.m16n8k16``: 16 x 16 times 16 x 8, of 16 bits, with
sums in float32. What a thread holds of the matrices is as it says there:

- of the left one registers of rows i, i + 8, i, i + 8, the first two of columns 2j and 2j + 1, the others 8 further on;
- of the right one two registers of column i, of those rows;
- of the sums four of rows i, i, i + 8, i + 8, in columns 2j, 2j + 1, 2j, 2j + 1.

Triton's interpreter knows no PTX: it runs the same formulas in plain operations. COMPILED: it is not the interpreter.
"""

try:
    import triton
    import triton.language as tl
except ImportError as failure:  # transformers looks for what files import, but not here: a CPU needs no Triton
    raise RuntimeError("Triton is not installed") from failure


_MMA = (
    "mma.sync.aligned.m16n8k16.row.col.f32.{0}.{0}.f32 "
    "{{$0, $1, $2, $3}}, {{$4, $5, $6, $7}}, {{$8, $9}}, {{$10, $11, $12, $13}};"
)
_BF16, _F16 = tl.constexpr(_MMA.format("bf16")), tl.constexpr(_MMA.format("f16"))
_PAIR = "cvt.rn.{0}x2.f32 $0, $2, $1;"
_PAIR_BF16, _PAIR_F16 = tl.constexpr(_PAIR.format("bf16")), tl.constexpr(_PAIR.format("f16"))


@triton.jit  # type: ignore[untyped-decorator]
def halves(words, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """The 16 bits of either half, as numbers: one more dimension, the last."""
    low = words.to(tl.int16).to(dtype, bitcast=True)
    return tl.join(low, (words >> 16).to(tl.int16).to(dtype, bitcast=True))


@triton.jit
def in_turn(values):  # type: ignore[no-untyped-def]
    """Of values ``(threads, count)`` a tuple of count tensors; count is 1, 2 or 4."""
    threads: tl.constexpr = values.shape[0]
    count: tl.constexpr = values.shape[1]
    if count == 1:
        return (tl.reshape(values, (threads,)),)
    elif count == 2:  # noqa: RET505 - Triton compiles one branch alone
        return tl.split(values)
    else:
        even, odd = tl.split(tl.reshape(values, (threads, 2, 2)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        return first, second, third, fourth


@triton.jit  # type: ignore[untyped-decorator]
def packed(low, high, dtype: tl.constexpr, COMPILED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Two float32 rounded to 16 bits, in the halves of an int32."""
    if COMPILED:
        instruction: tl.constexpr = _PAIR_BF16 if dtype == tl.bfloat16 else _PAIR_F16
        return tl.inline_asm_elementwise(instruction, "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1)
    else:  # noqa: RET505 - Triton compiles one branch alone
        return (_bits(low, dtype) & 0xFFFF) | (_bits(high, dtype) << 16)


@triton.jit  # type: ignore[untyped-decorator]
def _bits(number, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of float32 rounded to 16 bits, which Triton's interpreter cuts off for bfloat16; in an int32."""
    if dtype == tl.bfloat16:
        bits = number.to(tl.int32, bitcast=True)
        return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    else:  # noqa: RET505 - Triton compiles one branch alone
        return number.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def transposed(pairs, COMPILED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of 8 x 8 numbers of 16 bits, of which a thread holds row i, columns 2j and 2j + 1, row i of the transpose."""
    if COMPILED:
        return tl.inline_asm_elementwise(
            "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [pairs], dtype=tl.int32, is_pure=True, pack=1
        )
    else:  # noqa: RET505 - Triton compiles one branch alone
        both = tl.reshape(tl.join(pairs & 0xFFFF, (pairs >> 16) & 0xFFFF), (pairs.shape[0] // 32, 8, 8))
        low, high = tl.split(tl.reshape(tl.permute(both, (0, 2, 1)), (pairs.shape[0], 2)))
        return low | (high << 16)


@triton.jit  # type: ignore[untyped-decorator]
def cosine_and_sine(angle, COMPILED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of angles in radians, up to 10^6 of them, within 2^-20: the GPU's own are exact near 0 alone."""
    if COMPILED:
        turns = tl.floor(angle * 0.15915494309189535 + 0.5)
        near = tl.fma(turns, -6.2831854820251465, angle)  # 2 pi as a float32 has it
        near = tl.fma(turns, 1.7484555314695172e-07, near)  # and what it has too much
        return tl.inline_asm_elementwise(
            "cos.approx.f32 $0, $2; sin.approx.f32 $1, $2;", "=&f,=f,f", [near],
            dtype=(tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:  # noqa: RET505 - Triton compiles one branch alone
        return tl.cos(angle), tl.sin(angle)


@triton.jit  # type: ignore[untyped-decorator]
def product(a, b, sums, dtype: tl.constexpr, COMPILED: tl.constexpr):  # type: ignore[no-untyped-def]
    """``sums + a @ b``: tuples of four, two and four tensors; the numbers of a and b are pairs in int32."""
    if not COMPILED:
        return _interpreted(a, b, sums, dtype)
    else:  # noqa: RET505 - Triton compiles one branch alone
        instruction: tl.constexpr = _BF16 if dtype == tl.bfloat16 else _F16
        return tl.inline_asm_elementwise(
            instruction,
            "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
            [a[0], a[1], a[2], a[3], b[0], b[1], sums[0], sums[1], sums[2], sums[3]],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def sum_of(part, COUNT: tl.constexpr, APART: tl.constexpr):  # type: ignore[no-untyped-def]
    """In each of COUNT threads that are APART the sum of what they have."""
    shape: tl.constexpr = (part.shape[0] // (COUNT * APART), COUNT, APART)
    found = tl.sum(tl.reshape(part, shape), axis=1, keep_dims=True)
    return tl.reshape(tl.broadcast_to(found, shape), part.shape)


@triton.jit  # type: ignore[untyped-decorator]
def highest_of(part, COUNT: tl.constexpr, APART: tl.constexpr):  # type: ignore[no-untyped-def]
    """In each of COUNT threads that are APART the highest of what they have."""
    shape: tl.constexpr = (part.shape[0] // (COUNT * APART), COUNT, APART)
    found = tl.max(tl.reshape(part, shape), axis=1, keep_dims=True)
    return tl.reshape(tl.broadcast_to(found, shape), part.shape)


@triton.jit  # type: ignore[untyped-decorator]
def keep_order(thread, COMPILED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The assembler moves no load from before this to behind it, nor the other way."""
    if COMPILED:
        tl.inline_asm_elementwise(
            "bar.warp.sync 0xffffffff; mov.b32 $0, $1;", "=r,r", [thread], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit  # type: ignore[untyped-decorator]
def _eight(register, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Its numbers by warp, row of the left matrix or column of the right one, and 2j or 2j + 1: float32."""
    return tl.reshape(halves(register, dtype).to(tl.float32), (register.shape[0] // 32, 8, 8))


@triton.jit  # type: ignore[untyped-decorator]
def _interpreted(a, b, sums, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    near, far = _eight(b[0], dtype)[:, None, :, :], _eight(b[1], dtype)[:, None, :, :]
    found = ()
    for half in tl.static_range(2):
        both = tl.sum(_eight(a[half], dtype)[:, :, None, :] * near, axis=3)
        both += tl.sum(_eight(a[half + 2], dtype)[:, :, None, :] * far, axis=3)
        even, odd = tl.split(tl.reshape(both, (both.shape[0], 8, 4, 2)))
        shape: tl.constexpr = sums[0].shape
        even, odd = sums[2 * half] + tl.reshape(even, shape), sums[2 * half + 1] + tl.reshape(odd, shape)
        found += (even, odd)  # type: ignore[assignment]
    return found
