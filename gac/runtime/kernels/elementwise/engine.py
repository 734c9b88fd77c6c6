"""Kernels between the GEMMs of an engine's layer: norms, rotary embeddings, a paged KV cache and gated activations.

For few tokens they are launched early (programmatic dependent launch), so that a kernel begins while the one before it
ends. For thousands of tokens they read and write as fast as memory is.
"""

from torch import Tensor

from gac.runtime.kernels.elementwise.rows import (
    NUMBERS,
    OF_A_WARP,
    gate_kernel,
    normed_values,
    power_of_two,
    rotate,
    warps_for,
)
from gac.runtime.kernels.gpu import ceil_div, launch_options, launching_on
from gac.runtime.kernels.guard import gdc_launch_dependents, gdc_wait, jit, tl

Pair = tuple[Tensor, Tensor]


def apply_rotary(
    positions: Tensor, q: Tensor, k: Tensor, angles: Tensor, size: int, early: bool = False, into: Pair | None = None
) -> None:
    """Rotate queries and keys in halves (arXiv 2104.09864, equation 34), and round once, as vLLM does.

    Args:
        positions: of the tokens, int64, shape ``(tokens,)``.
        q, k: shape ``(tokens, heads * size)``; rows may lie apart.
        angles: cosines, then sines, of each position, shape ``(positions, size)``.
        early: launch before the kernel before it has ended; on Hopper GPUs.
        into: of the sizes of q and k; None: rotate these in place.
    """
    into = into or (q, k)
    strides = [x.stride(0) for x in (q, k, *into)]
    heads = [x.shape[1] // size for x in (q, k)]
    half = power_of_two(size // 2)
    block = max(1, min(NUMBERS // half // 2, power_of_two(heads[0])))
    with launching_on(q):
        rotate_paged_kernel[(len(positions), sum(ceil_div(count, block) for count in heads))](
            positions, q, k, *into, angles, *heads, size, *strides, angles.stride(0), HEADS=block, HALF=half,
            EARLY=early, num_warps=max(1, block * half * 2 // OF_A_WARP), enable_fp_fusion=False,
            **launch_options(early),
        )  # fmt: skip


def write_to_pages(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, early: bool = False) -> None:
    """Write keys and values of tokens to their slots of a paged cache.

    Args:
        k, v: shape ``(tokens, heads, size)``; tokens and heads may lie apart.
        keys, values: shape ``(pages, tokens of a page, heads, size)``, with the same strides; the last is 1.
        slots: of the tokens, int64; a negative one is not written. There may be fewer slots than tokens.
        early: launch before the kernel before it has ended; on Hopper GPUs.
    """
    heads, size = k.shape[1:]
    block, wide = power_of_two(heads), power_of_two(size)
    with launching_on(k):
        write_paged_kernel[(len(slots), 2)](
            k, v, keys, values, slots, heads, size, keys.shape[1], *k.stride()[:2], *v.stride()[:2], *keys.stride()[:3],
            HEADS=block, SIZE=wide, EARLY=early, num_warps=max(1, min(4, block * wide // OF_A_WARP)),
            **launch_options(early),
        )  # fmt: skip


def add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, early: bool = False, into: Pair | None = None
) -> None:
    """Add x to the residual stream, and take its RMSNorm (``rows.NORMS["llama"]``).

    Args:
        x, residual: shape ``(tokens, features)``, contiguous.
        weight: shape ``(features,)``.
        early: launch before the kernel before it has ended; on Hopper GPUs.
        into: the norm and the sum, contiguous; None: in place of x and the residual stream.
    """
    tokens, size = x.shape
    wide = power_of_two(size)
    with launching_on(x):
        add_norm_kernel[(tokens,)](
            x, residual, weight, *(into or (x, residual)), size, eps,
            BLOCK_SIZE=wide, EARLY=early, num_warps=warps_for(wide), **launch_options(early),
        )  # fmt: skip


def gate(x: Tensor, out: Tensor, early: bool = False) -> None:
    """Write ``silu(gate) * up`` to ``out`` ``(tokens, n)``, of gate and up in x ``(tokens, 2 n)``, both contiguous."""
    tokens, size = out.shape
    with launching_on(x):
        gate_kernel[(tokens, ceil_div(size, NUMBERS))](
            x[:, :size], x[:, size:], out, 2 * size, 2 * size, size,
            TANH=False, BLOCK_SIZE=NUMBERS, EARLY=early, **launch_options(early),
        )  # fmt: skip


# The Triton kernels.


@jit(do_not_specialize=["q_heads", "k_heads"])
def rotate_paged_kernel(
    positions_ptr, q_ptr, k_ptr, q_out_ptr, k_out_ptr, angles_ptr, q_heads, k_heads, n_cols,
    q_token, k_token, q_out_token, k_out_token, angle_token,
    HEADS: tl.constexpr, HALF: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program takes HEADS heads of a token: those of the queries first, then those of the keys."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if EARLY:
        gdc_launch_dependents()
    cos = angles_ptr + tl.load(positions_ptr + token) * angle_token
    sin = cos + n_cols // 2
    parts = tl.cdiv(q_heads, HEADS)
    if EARLY:
        gdc_wait()
    if part < parts:
        x, out, heads, first = q_ptr + token * q_token, q_out_ptr + token * q_out_token, q_heads, part * HEADS
    else:
        x, out, heads, first = k_ptr + token * k_token, k_out_ptr + token * k_out_token, k_heads, (part - parts) * HEADS
    rotate(x, out, cos, sin, heads, first, n_cols, n_cols, n_cols, 0, HEADS, HALF, False)


@jit
def write_paged_kernel(
    k_ptr, v_ptr, keys_ptr, values_ptr, slots_ptr, heads, n_cols, page_tokens, k_token, k_head, v_token, v_head,
    page_stride, token_stride, head_stride, HEADS: tl.constexpr, SIZE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program takes all keys or all values of a token."""
    token = tl.program_id(0).to(tl.int64)
    if EARLY:
        gdc_launch_dependents()
    slot = tl.load(slots_ptr + token)
    head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, SIZE)[None, :]
    there = (head < heads) & (column < n_cols)
    place = slot // page_tokens * page_stride + slot % page_tokens * token_stride + head * head_stride + column
    if EARLY:
        gdc_wait()
    if slot >= 0:
        if tl.program_id(1) == 0:
            keys = tl.load(k_ptr + token * k_token + head * k_head + column, mask=there)
            tl.store(keys_ptr + place, keys, mask=there)
        else:
            values = tl.load(v_ptr + token * v_token + head * v_head + column, mask=there)
            tl.store(values_ptr + place, values, mask=there)


@jit
def add_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, norm_ptr, sum_ptr, n_cols, eps, BLOCK_SIZE: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """A program takes a token."""
    offsets = tl.arange(0, BLOCK_SIZE)
    there = offsets < n_cols
    if EARLY:
        gdc_launch_dependents()
    gain = tl.load(weight_ptr + offsets, mask=there, other=0.0).to(tl.float32)
    place = tl.program_id(0).to(tl.int64) * n_cols + offsets
    if EARLY:
        gdc_wait()
    narrow = x_ptr.dtype.element_ty
    value = tl.load(x_ptr + place, mask=there, other=0.0).to(tl.float32)
    value = (value + tl.load(residual_ptr + place, mask=there, other=0.0).to(tl.float32)).to(narrow)
    tl.store(sum_ptr + place, value, mask=there)
    tl.store(norm_ptr + place, normed_values(value.to(tl.float32), gain, n_cols, eps, False, narrow), mask=there)
