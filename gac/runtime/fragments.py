"""Products of small pieces of matrices in tensor cores, thread by thread, for Triton kernels.

A tensor has one element for each thread here: ``(32 * warps,)``. Thread ``4 * i + j`` of a warp is thread j of four,
and the four are number i of eight. A product is that of PTX, ``mma.m16n8k16``: 16 x 16 times 16 x 8, of 16 bits, with
sums in float32. What a thread holds of the matrices is as it says there:

- of the left one registers of rows i, i + 8, i, i + 8, the first two of columns 2j and 2j + 1, the others 8 further on;
- of the right one two registers of column i, of those rows;
- of the sums four of rows i, i, i + 8, i + 8, in columns 2j, 2j + 1, 2j, 2j + 1.

Triton's interpreter knows no PTX: it runs the same formulas in plain operations.
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


@triton.jit  # type: ignore[untyped-decorator]
def halves(words, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """The 16 bits of either half, as numbers: one more dimension, the last."""
    low = words.to(tl.int16).to(dtype, bitcast=True)
    return tl.join(low, (words >> 16).to(tl.int16).to(dtype, bitcast=True))


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
