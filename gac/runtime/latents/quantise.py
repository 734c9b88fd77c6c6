"""Latents of few bits: whole numbers, and a scale of 16 bits for each token and group of heads.

PaLU (arXiv 2407.21118) rounds its latents token by token too, and turns them by a Hadamard matrix before; KIVI
(arXiv 2402.02750) rounds values so, and keys by channel, for some channels of keys are always large. Here latents are
turned when the factors are made (``gac.forms.latent.torch.RoundedLatentTensors``), so that none is.

Latents of fewer bits lie in a cache as words, int16, which every cache copies bit by bit.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from gac.runtime.fusion.elementwise import can_run
from gac.runtime.kernels.elementwise.rows import by_row, power_of_two
from gac.runtime.kernels.gpu import launching_on, operator
from gac.runtime.kernels.guard import jit, tl
from gac.runtime.kernels.quantise_rows import nearest
from gac.runtime.limits import LARGEST, WORD, group_words, token_words
from gac.runtime.plain import modeling_gac

_HALF = 4  # bits, of which a byte holds two numbers


def rounded_latents(latents: Tensor, groups: int, bits: int | None) -> Tensor:
    """Latents ``(..., groups * rank)`` as the cache has them, in their own dtype; gradients pass as they are.

    Each is ``scale * round(latent / scale)``, the scale of a token and group being its largest over that of ``bits``.
    Without ``bits`` they stay as they are.
    """
    return latents if bits is None else pack_latents(latents, groups, bits)[1]


def pack_latents(latents: Tensor, groups: int, bits: int) -> tuple[Tensor, Tensor]:
    """Quantise latents ``(..., groups * rank)``; on a GPU and in 16 bits that is one launch.

    Returns what a cache keeps, int16 words ``(..., token_words(groups, rank, bits))``, and latents as
    ``rounded_latents`` gives them.
    """
    if can_run(latents):
        return round_latents(latents, groups, bits)
    numbers, scales = modeling_gac.quantise_latents(latents.detach(), groups, bits)
    result = (numbers * scales).flatten(-2).to(latents.dtype)
    if torch.is_grad_enabled() and latents.requires_grad:
        result = latents + (result - latents.detach())
    return _packed(numbers.to(torch.int8), scales, bits), result


def _packed(numbers: Tensor, scales: Tensor, bits: int) -> Tensor:
    if short := -numbers.shape[-1] % (WORD // bits):
        numbers = functional.pad(numbers, (0, short))
    if bits == _HALF:
        low, high = numbers.view(torch.uint8).chunk(2, dim=-1)
        numbers = (low & 15) | (high << _HALF)
    stored = numbers.contiguous().view(torch.int16).flatten(-2)
    return torch.cat((stored, scales.to(torch.bfloat16).view(torch.int16).flatten(-2)), dim=-1)


def _like(x: Tensor, groups: int, bits: int) -> tuple[Tensor, Tensor]:
    words = token_words(groups, x.shape[-1] // groups, bits)
    return x.new_empty(*x.shape[:-1], words, dtype=torch.int16), x.new_empty(x.shape)


@operator(_like)
def round_latents(x: Tensor, groups: int, bits: int) -> tuple[Tensor, Tensor]:
    """``pack_latents`` in one launch."""
    value, (words, result) = by_row(x), _like(x, groups, bits)
    rank = x.shape[-1] // groups
    stored = 2 * group_words(rank, bits)
    with launching_on(x):
        round_latents_kernel[(len(value), groups)](
            value, words.view(torch.int8), words, result, value.stride(0), 2 * words.shape[-1],
            MOST=float(LARGEST[bits]), RANK=rank, BYTES=stored, BITS=bits, BLOCK_SIZE=power_of_two(stored), num_warps=1,
        )  # fmt: skip
    return words, result


@dataclass(frozen=True, eq=False)
class QuantisedLatents:
    """Quantised latents of all tokens, as a cache holds them."""

    words: Tensor  # int16, ``(batch, tokens, words)``
    groups: int
    rank: int  # of a group
    bits: int  # of a number

    @property
    def numbers(self) -> Tensor:
        """The bytes that hold numbers, int8, ``(batch, tokens, bytes)``, a view.

        Of 4 bits a byte j of a group holds number j in its lower half, and in its upper half that which lies half a
        group further.
        """
        return self.words[..., : self.groups * group_words(self.rank, self.bits)].view(torch.int8)

    @property
    def scales(self) -> Tensor:
        """bfloat16, ``(batch, tokens, groups)``, a view."""
        return self.words[..., -self.groups :].view(torch.bfloat16)

    def values(self, dtype: torch.dtype) -> Tensor:
        """The latents, ``(batch, tokens, groups * rank)``, as ``rounded_latents`` gives them."""
        numbers = self.numbers.reshape(*self.words.shape[:-1], self.groups, -1)
        if self.bits == _HALF:
            low = (numbers << _HALF) >> _HALF  # of int8, whose sign is shifted in
            numbers = torch.cat((low, numbers >> _HALF), dim=-1)
        result: Tensor = numbers[..., : self.rank].float() * self.scales[..., None].float()
        return result.flatten(-2).to(dtype)


# The Triton kernel that rounds new latents to few bits: words for a cache, and the latents that they stand for.

_LEAST_SCALE = tl.constexpr(2.0**-126)
_NONE = tl.constexpr(0x7FC0)  # of bfloat16, no number


@jit
def _nearest(value, scale, MOST: tl.constexpr):
    units = nearest(tl.div_rn(value, tl.maximum(scale, _LEAST_SCALE)))
    return tl.minimum(tl.maximum(units, -MOST), MOST)


@jit
def _scale_of(largest, is_none):
    bits = largest.to(tl.int32, bitcast=True)
    near = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(is_none, _NONE, near)


@jit
def round_latents_kernel(
    x_ptr, numbers_ptr, scales_ptr, out_ptr, stride, bytes_of_token, MOST: tl.constexpr,
    RANK: tl.constexpr, BYTES: tl.constexpr, BITS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """A program takes a token and a group.

    Args:
        numbers: bytes of words, of each token from its first one on. scales: the same words, int16.
        BYTES: of the numbers of a group. BLOCK_SIZE: a power of two, no less.
    """
    row, group, index = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK_SIZE)
    value = x_ptr + row * stride + group * RANK
    near = (index < BYTES) & (index < RANK)
    far = (index < BYTES) & (index + BYTES < RANK) & (BITS == 4)
    low = tl.load(value + index, mask=near, other=0.0).to(tl.float32)
    high = tl.load(value + index + BYTES, mask=far, other=0.0).to(tl.float32)
    larger = tl.maximum(tl.abs(low), tl.abs(high))
    is_none = tl.max(((low != low) | (high != high)).to(tl.int32), axis=0) > 0
    bits = _scale_of(tl.div_rn(tl.max(larger, axis=0), MOST), is_none)
    scale = (bits << 16).to(tl.float32, bitcast=True)
    low, high = _nearest(low, scale, MOST), _nearest(high, scale, MOST)
    out = out_ptr + (row * tl.num_programs(1) + group) * RANK + index
    tl.store(out, (low * scale).to(out_ptr.dtype.element_ty), mask=near)
    tl.store(out + BYTES, (high * scale).to(out_ptr.dtype.element_ty), mask=far)
    stored = low.to(tl.int32)
    if BITS == 4:
        stored = (stored & 15) | (high.to(tl.int32) << 4)
    tl.store(numbers_ptr + row * bytes_of_token + group * BYTES + index, stored.to(tl.int8), mask=index < BYTES)
    behind = (row + 1) * (bytes_of_token // 2) - tl.num_programs(1) + group
    tl.store(scales_ptr + behind, bits.to(tl.int16))
