"""The Triton kernel that rounds new latents to few bits: words for a cache, and the latents that they stand for."""

try:
    import triton
    import triton.language as tl

    from .rounding_kernels import nearest
except ImportError as failure:  # transformers looks for what files import, but not here: a CPU needs no Triton
    raise RuntimeError("Triton is not installed") from failure

_TINY = tl.constexpr(2.0**-126)
_NONE = tl.constexpr(0x7FC0)  # of bfloat16, no number


@triton.jit  # type: ignore[untyped-decorator]
def _nearest(value, scale, MOST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whole numbers of values over their scale."""
    units = nearest(tl.div_rn(value, tl.maximum(scale, _TINY)))
    return tl.minimum(tl.maximum(units, -MOST), MOST)


@triton.jit
def _scale_of(largest, is_none):  # type: ignore[no-untyped-def]
    """The bits of the nearest number of bfloat16, ties to even."""
    bits = largest.to(tl.int32, bitcast=True)
    near = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(is_none, _NONE, near)


@triton.jit  # type: ignore[untyped-decorator]
def round_latents(  # type: ignore[no-untyped-def]
    x, numbers, scales, whole, stride, bytes_of_token, MOST: tl.constexpr,
    RANK: tl.constexpr, BYTES: tl.constexpr, BITS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A program takes a token and a group.

    Args:
        numbers: bytes of words, of each token from its first one on. scales: the same words, int16.
        BYTES: of the numbers of a group. WIDE: a power of two, no less.
    """
    row, group, at = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, WIDE)
    given = x + row * stride + group * RANK
    near = (at < BYTES) & (at < RANK)
    far = (at < BYTES) & (at + BYTES < RANK) & (BITS == 4)
    low = tl.load(given + at, mask=near, other=0.0).to(tl.float32)
    high = tl.load(given + at + BYTES, mask=far, other=0.0).to(tl.float32)
    larger = tl.maximum(tl.abs(low), tl.abs(high))
    is_none = tl.max(((low != low) | (high != high)).to(tl.int32), axis=0) > 0
    bits = _scale_of(tl.div_rn(tl.max(larger, axis=0), MOST), is_none)
    scale = (bits << 16).to(tl.float32, bitcast=True)
    low, high = _nearest(low, scale, MOST), _nearest(high, scale, MOST)
    out = whole + (row * tl.num_programs(1) + group) * RANK + at
    tl.store(out, (low * scale).to(whole.dtype.element_ty), mask=near)
    tl.store(out + BYTES, (high * scale).to(whole.dtype.element_ty), mask=far)
    held = low.to(tl.int32)
    if BITS == 4:
        held = (held & 15) | (high.to(tl.int32) << 4)
    tl.store(numbers + row * bytes_of_token + group * BYTES + at, held.to(tl.int8), mask=at < BYTES)
    behind = (row + 1) * (bytes_of_token // 2) - tl.num_programs(1) + group
    tl.store(scales + behind, bits.to(tl.int16))
