"""RMSNorms, gated activations, rotary embeddings and static caches of 16 bits on a GPU, each in one launch.

Transformers runs an RMSNorm in six launches, a gated activation in two, a rotary embedding in ten, and writes to a
static cache in four. The kernels round where PyTorch does between them, so they find what it finds, up to the order of
a norm's sums and the last bit of an exponential. Triton is imported when a kernel first runs.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from gac.runtime.kernels.gpu import ceil_div, launching_on, operator
from gac.runtime.kernels.guard import gdc_launch_dependents, gdc_wait, jit, tl

NUMBERS = 2048  # a program takes about as many
OF_A_WARP = 512  # a warp rotates about as many


def llama_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """An RMSNorm whose output is rounded to x's dtype before the gain multiplies it."""
    return weight * _normed(x, eps).to(x.dtype)


def gemma_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """An RMSNorm whose gain is 1 + weight and multiplies in float32."""
    return (_normed(x, eps) * (1.0 + weight.float())).type_as(x)


def _normed(x: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


NORMS: Mapping[str, Callable[[Tensor, Tensor, float], Tensor]] = {"llama": llama_norm, "gemma": gemma_norm}
"""RMSNorms that the kernel runs, of x ``(..., features)``, weight ``(features,)`` and eps."""

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}
"""Activations that the kernel runs."""


def rotate_half(x: Tensor) -> Tensor:
    first, two = x.chunk(2, dim=-1)
    return torch.cat((-two, first), dim=-1)


def plainly_rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary embedding (arXiv 2104.09864, equation 34, in halves) in plain PyTorch.

    q and k have shape ``(batch, heads, tokens, size)``, cos and sin ``(batch or 1, tokens, size)``.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class AddNorm(NamedTuple):
    """An RMSNorm (``NORMS["llama"]``) of x plus a residual stream, in the launch that prepares inputs of a product."""

    residual: Tensor  # ``(rows, features)``, contiguous as x is
    weight: Tensor
    eps: float
    into: tuple[Tensor, Tensor]  # take the norm and the sum: x and the residual stream, or others
    full: bool  # the norm is written too; else its first number is NaN, so that nothing reads the others


def by_row(x: Tensor) -> Tensor:
    """Rows ``(rows, columns)`` that may lie apart, as parts of a shared GEMM's output do, but not their numbers."""
    inputs = x.reshape(-1, x.shape[-1])
    return inputs if inputs.stride(1) == 1 else inputs.contiguous()


def power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()  # the least that is no smaller


def warps_for(columns: int) -> int:
    return 4 if columns <= 4096 else 8 if columns <= 8192 else 16


@operator(lambda x, *_: x.new_empty(x.shape))
def normed(x: Tensor, weight: Tensor, eps: float, kind: str) -> Tensor:
    """Return what one of ``NORMS`` makes of x ``(..., features)``."""
    inputs, size, out = by_row(x), x.shape[-1], x.new_empty(x.shape)
    wide = power_of_two(size)
    rows = max(1, NUMBERS // wide)
    with launching_on(x):
        norm_kernel[(ceil_div(len(inputs), rows),)](
            inputs, weight, out, inputs.stride(0), len(inputs), size, eps,
            ADDED=kind == "gemma", BLOCK_M=rows, BLOCK_SIZE=wide, num_warps=warps_for(wide),
        )  # fmt: skip
    return out


@operator(lambda gate, *_: gate.new_empty(gate.shape))
def gated(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """One of ``ACTIVATIONS`` of the gate ``(..., neurons)``, times up."""
    inputs, other, size, out = by_row(gate), by_row(up), gate.shape[-1], gate.new_empty(gate.shape)
    with launching_on(gate):
        gate_kernel[(len(inputs), ceil_div(size, NUMBERS))](
            inputs, other, out, inputs.stride(0), other.stride(0), size, TANH=kind == "gelu_tanh", BLOCK_SIZE=NUMBERS
        )
    return out


@operator(lambda q, k, *_: tuple(item.new_empty(item.transpose(1, 2).shape).transpose(1, 2) for item in (q, k)))
def rotated_heads(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    q, k = (item if item.stride(-1) == 1 else item.contiguous() for item in (q, k))
    cos, sin = cos.contiguous(), sin.contiguous()
    (batch, q_heads, tokens, size), k_heads = q.shape, k.shape[1]
    outs = [item.new_empty(batch, tokens, item.shape[1], size) for item in (q, k)]
    half = power_of_two(size // 2)
    heads = max(1, min(NUMBERS // half // 2, power_of_two(q_heads)))
    with launching_on(q):  # products are rounded before they are added, so nothing is fused
        rotate_kernel[(batch * tokens, ceil_div(q_heads, heads) + ceil_div(k_heads, heads))](
            q, k, *outs, cos, sin, tokens, q_heads, k_heads, size, *q.stride()[:3], *k.stride()[:3],
            cos.stride(0) if len(cos) > 1 else 0, cos.stride(1), HEADS=heads, HALF=half,
            num_warps=max(1, heads * half * 2 // OF_A_WARP), enable_fp_fusion=False,
        )  # fmt: skip
    return outs[0].transpose(1, 2), outs[1].transpose(1, 2)


def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return what ``plainly_rotated`` finds, to the last bit.

    With float32 angles the result is rounded to q's dtype. Angles get no gradients.
    """
    run: Any = _Rotated.apply if torch.is_grad_enabled() else rotated_heads
    result: tuple[Tensor, Tensor] = run(q, k, cos, sin)
    return result


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return rotated_heads(q, k, cos, sin)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[2:])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (q, k), (cos, sin) = gradients, ctx.saved_tensors
        return *rotated(q, k, cos, -sin.roll(sin.shape[-1] // 2, -1)), None, None


@operator(lambda *_: None, mutates=("keys", "values"))
def write_to_cache(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, length: Tensor) -> None:
    """Write new tokens k and v ``(batch, heads, tokens, size)`` to a static cache, behind those that there are.

    Keys and values of the cache are ``(batch, heads, most, size)``, contiguous; sizes of keys and values may differ.
    ``length`` (int64) is how many tokens there are. Where there is no room left the first one becomes NaN.
    """
    k, v = (item if item.stride(-1) == 1 else item.contiguous() for item in (k, v))
    (batch, heads, tokens, size), most, other = k.shape, keys.shape[2], v.shape[3]
    with launching_on(k):
        cache_kernel[(batch * heads, tokens)](
            k, v, keys, values, length, heads, tokens, most, size, other, *k.stride()[:3], *v.stride()[:3],
            BLOCK_SIZE=power_of_two(max(size, other)), num_warps=1,
        )  # fmt: skip


_CUBE = tl.constexpr(0.044715)
_TWICE = tl.constexpr(1.5957691216057308)  # 2 * sqrt(2 / pi)


@jit
def normed_values(value, gain, size, eps, ADDED: tl.constexpr, NARROW: tl.constexpr):
    """An RMSNorm along the last axis of float32 values, zeros past the size, in 16 bits.

    ADDED: the gain is 1 + weight and multiplies in float32, as Gemma's; else it is the weight and multiplies in 16
    bits, as Llama's.
    """
    mean = tl.div_rn(tl.sum(value * value, axis=-1, keep_dims=True), size.to(tl.float32))
    value = value * tl.rsqrt(mean + eps)
    value = value * (1.0 + gain) if ADDED else value.to(NARROW).to(tl.float32) * gain
    return value.to(NARROW)


@jit
def gated_values(value, other, TANH: tl.constexpr, NARROW: tl.constexpr):
    """SiLU, or GELU by tanh, of float32 values, times others, in 16 bits."""
    slope = _TWICE * (value + _CUBE * value * value * value) if TANH else value
    value = tl.div_rn(value, 1.0 + tl.exp(-slope)).to(NARROW).to(tl.float32)
    return (value * other).to(NARROW)


@jit
def norm_kernel(
    x_ptr, weight_ptr, out_ptr, stride, rows, n_cols, eps,
    ADDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """A program takes BLOCK_M rows through an RMSNorm."""
    row = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    offsets = tl.arange(0, BLOCK_SIZE)[None, :]
    there = (row < rows) & (offsets < n_cols)
    value = tl.load(x_ptr + row * stride + offsets, mask=there, other=0.0).to(tl.float32)
    gain = tl.load(weight_ptr + offsets, mask=offsets < n_cols, other=0.0).to(tl.float32)
    value = normed_values(value, gain, n_cols, eps, ADDED, x_ptr.dtype.element_ty)
    tl.store(out_ptr + row * n_cols + offsets, value, mask=there)


@jit
def gate_kernel(
    gate_ptr, up, out_ptr, of_gate, of_up, n_cols,
    TANH: tl.constexpr, BLOCK_SIZE: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """A program takes BLOCK_SIZE columns of a row."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    value = tl.load(gate_ptr + row * of_gate + offsets, mask=offsets < n_cols, other=0.0).to(tl.float32)
    other = tl.load(up + row * of_up + offsets, mask=offsets < n_cols, other=0.0).to(tl.float32)
    tl.store(
        out_ptr + row * n_cols + offsets,
        gated_values(value, other, TANH, gate_ptr.dtype.element_ty),
        mask=offsets < n_cols,
    )


@jit
def rotate(
    x, out, cos, sin, heads, first, x_head, out_head, size, other_angles,
    HEADS: tl.constexpr, HALF: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """Some heads of a token, in halves: x and out at the token's first number, cos and sin at the token's angles.

    The angles of the second half lie ``other_angles`` behind those of the first: 0 where they are the same.

    ROUNDED: products are rounded to the dtype of the angles, as PyTorch does where that is x's or float32.
    """
    head = (first + tl.arange(0, HEADS)).to(tl.int64)[:, None]
    offsets = tl.arange(0, HALF)[None, :]
    half = size // 2
    there = (head < heads) & (offsets < half)
    narrow = x.dtype.element_ty
    rounds = cos.dtype.element_ty if ROUNDED else tl.float32
    low = tl.load(x + head * x_head + offsets, mask=there, other=0.0).to(tl.float32)
    two = tl.load(x + head * x_head + offsets + half, mask=there, other=0.0).to(tl.float32)
    for second in tl.static_range(2):
        beyond = offsets + second * half
        place = offsets + second * other_angles
        angle = tl.load(cos + place, mask=offsets < half, other=0.0).to(tl.float32)
        other = tl.load(sin + place, mask=offsets < half, other=0.0).to(tl.float32)
        local = ((two if second else low) * angle).to(rounds).to(tl.float32)
        turned = ((low if second else -two) * other).to(rounds).to(tl.float32)
        tl.store(out + head * out_head + beyond, (local + turned).to(narrow), mask=there)


@jit(do_not_specialize=["q_heads", "k_heads"])  # a count of 1 would become a constant, of another type
def rotate_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, cos_ptr, sin_ptr, tokens, q_heads, k_heads, n_cols,
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
        x, out = q_ptr + batch * q_batch + token * q_token, q_out_ptr + row * q_heads * n_cols
        heads, first, stride = q_heads, part * HEADS, q_head
    else:
        x, out = k_ptr + batch * k_batch + token * k_token, k_out_ptr + row * k_heads * n_cols
        heads, first, stride = k_heads, (part - parts) * HEADS, k_head
    cos, sin = cos_ptr + angles, sin_ptr + angles
    rotate(x, out, cos, sin, heads, first, stride, n_cols, n_cols, n_cols // 2, HEADS, HALF, True)


@jit
def _cache(
    new, cache, place, there, row, most, size, of_batch, of_head, of_token, batch, head, token, BLOCK_SIZE: tl.constexpr
):
    offsets = tl.arange(0, BLOCK_SIZE)
    value = tl.load(
        new + batch * of_batch + head * of_head + token * of_token + offsets, mask=offsets < size, other=0.0
    )
    value = tl.where(there, value, float("nan")).to(cache.dtype.element_ty)
    tl.store(cache + (row * most + place) * size + offsets, value, mask=offsets < size)


@jit
def cache_kernel(
    k_ptr, v_ptr, keys_ptr, values_ptr, length_ptr, heads, tokens, most, k_size, v_size,
    k_batch, k_head, k_token, v_batch, v_head, v_token, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """A program takes one head of a new token to its place behind ``length`` others in a cache of ``most``.

    Where there is no room the first token becomes NaN, and so does all that attends to it.
    """
    pair, token = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    batch, head = pair // heads, pair % heads
    place = tl.load(length_ptr) + token
    there = place < most
    place = tl.where(there, place, 0)
    _cache(k_ptr, keys_ptr, place, there, pair, most, k_size, k_batch, k_head, k_token, batch, head, token, BLOCK_SIZE)
    _cache(
        v_ptr, values_ptr, place, there, pair, most, v_size, v_batch, v_head, v_token, batch, head, token, BLOCK_SIZE
    )
