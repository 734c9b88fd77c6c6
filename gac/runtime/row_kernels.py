"""Triton kernels of 16-bit rows: RMSNorms, gated activations, rotary embeddings and caches, as PyTorch rounds."""

try:
    import triton
    import triton.language as tl
except ImportError as failure:  # transformers looks for what files import, but not here: a CPU needs no Triton
    raise RuntimeError("Triton is not installed") from failure

_CUBE = tl.constexpr(0.044715)
_TWICE = tl.constexpr(1.5957691216057308)  # 2 * sqrt(2 / pi)


@triton.jit  # type: ignore[untyped-decorator]
def normed_values(value, gain, size, eps, ADDED: tl.constexpr, NARROW: tl.constexpr):  # type: ignore[no-untyped-def]
    """An RMSNorm along the last axis of float32 values, zeros past the size, in 16 bits.

    ADDED: 1 where the gain is 1 + weight and multiplies in float32, as Gemma's does; 0 where it is the weight and
    multiplies in 16 bits, as Llama's does.
    """
    mean = tl.div_rn(tl.sum(value * value, axis=-1, keep_dims=True), size.to(tl.float32))
    value = value * tl.rsqrt(mean + eps)
    value = value * (1.0 + gain) if ADDED else value.to(NARROW).to(tl.float32) * gain
    return value.to(NARROW)


@triton.jit  # type: ignore[untyped-decorator]
def gated_values(value, other, TANH: tl.constexpr, NARROW: tl.constexpr):  # type: ignore[no-untyped-def]
    """SiLU, or GELU by tanh, of float32 values, times others, in 16 bits."""
    slope = _TWICE * (value + _CUBE * value * value * value) if TANH else value
    value = tl.div_rn(value, 1.0 + tl.exp(-slope)).to(NARROW).to(tl.float32)
    return (value * other).to(NARROW)


@triton.jit  # type: ignore[untyped-decorator]
def norm_rows(  # type: ignore[no-untyped-def]
    x, weight, out, stride, rows, size, eps, ADDED: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr
):
    """A program takes ROWS rows through an RMSNorm."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    at = tl.arange(0, WIDE)[None, :]
    there = (row < rows) & (at < size)
    value = tl.load(x + row * stride + at, mask=there, other=0.0).to(tl.float32)
    gain = tl.load(weight + at, mask=at < size, other=0.0).to(tl.float32)
    value = normed_values(value, gain, size, eps, ADDED, x.dtype.element_ty)
    tl.store(out + row * size + at, value, mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def gate_rows(  # type: ignore[no-untyped-def]
    gate, up, out, of_gate, of_up, size, TANH: tl.constexpr, WIDE: tl.constexpr
):
    """A program takes WIDE columns of a row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    value = tl.load(gate + row * of_gate + at, mask=at < size, other=0.0).to(tl.float32)
    other = tl.load(up + row * of_up + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(out + row * size + at, gated_values(value, other, TANH, gate.dtype.element_ty), mask=at < size)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate(  # type: ignore[no-untyped-def]
    x, out, cos, sin, token, heads, first, of_head, size, HEADS: tl.constexpr, HALF: tl.constexpr
):
    """Some heads of a token, in halves: x at the token's first number, cos and sin at the token's angles.

    Products are rounded to the dtype of the angles, as PyTorch does where that is x's or float32.
    """
    head = (first + tl.arange(0, HEADS)).to(tl.int64)[:, None]
    at = tl.arange(0, HALF)[None, :]
    half = size // 2
    there = (head < heads) & (at < half)
    narrow = x.dtype.element_ty
    rounds = cos.dtype.element_ty
    one = tl.load(x + head * of_head + at, mask=there, other=0.0).to(tl.float32)
    two = tl.load(x + head * of_head + at + half, mask=there, other=0.0).to(tl.float32)
    for second in tl.static_range(2):
        beyond = at + second * half
        angle = tl.load(cos + beyond, mask=at < half, other=0.0).to(tl.float32)
        other = tl.load(sin + beyond, mask=at < half, other=0.0).to(tl.float32)
        own = ((two if second else one) * angle).to(rounds).to(tl.float32)
        turned = ((one if second else -two) * other).to(rounds).to(tl.float32)
        tl.store(out + (token * heads + head) * size + beyond, (own + turned).to(narrow), mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def rotate_heads(  # type: ignore[no-untyped-def]
    q, k, q_out, k_out, cos, sin, tokens, q_heads, k_heads, size,
    q_batch, q_head, q_token, k_batch, k_head, k_token, angle_batch, angle_token,
    HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """A program takes HEADS heads of a token: those of the queries first, then those of the keys.

    What is written is ``(batch, tokens, heads, size)`` without gaps.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, token = row // tokens, row % tokens
    angles = batch * angle_batch + token * angle_token
    parts = tl.cdiv(q_heads, HEADS)
    if part < parts:
        of = q + batch * q_batch + token * q_token
        _rotate(of, q_out, cos + angles, sin + angles, row, q_heads, part * HEADS, q_head, size, HEADS, HALF)
    else:
        of = k + batch * k_batch + token * k_token
        first = (part - parts) * HEADS
        _rotate(of, k_out, cos + angles, sin + angles, row, k_heads, first, k_head, size, HEADS, HALF)


@triton.jit  # type: ignore[untyped-decorator]
def _cache(  # type: ignore[no-untyped-def]
    new, cache, place, there, row, most, size, of_batch, of_head, of_token, batch, head, token, WIDE: tl.constexpr
):
    at = tl.arange(0, WIDE)
    value = tl.load(new + batch * of_batch + head * of_head + token * of_token + at, mask=at < size, other=0.0)
    value = tl.where(there, value, float("nan")).to(cache.dtype.element_ty)
    tl.store(cache + (row * most + place) * size + at, value, mask=at < size)


@triton.jit  # type: ignore[untyped-decorator]
def cache_tokens(  # type: ignore[no-untyped-def]
    k, v, keys, values, length, heads, tokens, most, k_size, v_size,
    k_batch, k_head, k_token, v_batch, v_head, v_token, WIDE: tl.constexpr,
):  # fmt: skip
    """A program takes one head of a new token to its place behind ``length`` others in a cache of ``most``.

    Where there is no room the first token becomes NaN, and so does all that attends to it.
    """
    pair, token = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    batch, head = pair // heads, pair % heads
    place = tl.load(length) + token
    there = place < most
    place = tl.where(there, place, 0)
    _cache(k, keys, place, there, pair, most, k_size, k_batch, k_head, k_token, batch, head, token, WIDE)
    _cache(v, values, place, there, pair, most, v_size, v_batch, v_head, v_token, batch, head, token, WIDE)
