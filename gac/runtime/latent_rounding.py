"""Latents of few bits: whole numbers, and a scale of 16 bits for each token and group of heads.

PaLU (arXiv 2407.21118) rounds its latents token by token too, and turns them by a Hadamard matrix before; KIVI
(arXiv 2402.02750) rounds values so, and keys by channel, for some channels of keys are always large. Here latents are
turned when the factors are made (``gac.forms.latent.rounded``), so that none is.

Latents of fewer bits lie in a cache as words, int16, which every cache copies bit by bit; ``latent_words`` has how.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from .latent_words import LARGEST, WORD, group_words

_BYTE = 8
_HALF = 4  # bits, of which a byte holds two numbers
_TINY = torch.finfo(torch.bfloat16).tiny


def rounded(latents: Tensor, groups: int, bits: int | None) -> Tensor:
    """Latents ``(..., groups * rank)`` as the cache has them, in their own dtype; gradients pass as they are.

    Each is ``scale * round(latent / scale)``, the scale of a token and group being its largest over that of ``bits``.

    Args:
        bits: None: they stay as they are.
    """
    if bits is None:
        return latents
    numbers, scales = _numbers(latents.detach(), groups, bits)
    found = (numbers * scales).flatten(-2).to(latents.dtype)
    if not (torch.is_grad_enabled() and latents.requires_grad):
        return found
    return latents + (found - latents.detach())


def words_of(latents: Tensor, groups: int, bits: int) -> Tensor:
    """What a cache keeps of latents ``(..., groups * rank)``: words, int16, ``(..., token_words(...))``."""
    found, scales = _numbers(latents, groups, bits)
    numbers = found.to(torch.int8)
    if short := -numbers.shape[-1] % (WORD // bits):
        numbers = functional.pad(numbers, (0, short))
    if bits == _HALF:
        low, high = numbers.view(torch.uint8).chunk(2, dim=-1)
        numbers = (low & 15) | (high << _HALF)
    held = numbers.contiguous().view(torch.int16).flatten(-2)
    return torch.cat((held, scales.to(torch.bfloat16).view(torch.int16).flatten(-2)), dim=-1)


def _numbers(latents: Tensor, groups: int, bits: int) -> tuple[Tensor, Tensor]:
    """Whole numbers ``(..., groups, rank)`` and scales ``(..., groups, 1)`` that bfloat16 holds, both float32."""
    parts = latents.view(*latents.shape[:-1], groups, -1).float()
    largest = LARGEST[bits]
    scales = (parts.abs().amax(-1, keepdim=True) / largest).to(torch.bfloat16).float()
    return (parts / scales.clamp_min(_TINY)).round().clamp(-largest, largest), scales


@dataclass(frozen=True, eq=False)
class RoundedLatents:
    """What a cache holds of the latents of all tokens.

    Attributes:
        words: int16, ``(batch, tokens, words)``.
        groups, rank: of latents.
        bits: of a number.
    """

    words: Tensor
    groups: int
    rank: int
    bits: int

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
        """The latents, ``(batch, tokens, groups * rank)``, as ``rounded`` gives them."""
        numbers = self.numbers.reshape(*self.words.shape[:-1], self.groups, -1)
        if self.bits == _HALF:
            low = (numbers << _HALF) >> _HALF  # of int8, whose sign is shifted in
            numbers = torch.cat((low, numbers >> _HALF), dim=-1)
        found: Tensor = numbers[..., : self.rank].float() * self.scales[..., None].float()
        return found.flatten(-2).to(dtype)
