"""Keys and values of few bits: whole numbers on a grid of each channel, which lie in a cache as words of 16 bits.

KVQuant (arXiv 2401.18079) rounds keys so, before the rotary embedding, on grids that are known before any text is read.
So the numbers of a token depend on no other token, and every cache of transformers copies, reorders and drops tokens as
it always does.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from gac.runtime.limits import WORD, group_words
from gac.runtime.plain import modeling_gac


class ChannelGrid(modeling_gac.ChannelGrid):
    """``modeling_gac.ChannelGrid`` that also packs what it rounds; gradients pass the rounding as they are."""

    def forward(self, x: Tensor, is_rounded: bool = False) -> Tensor:
        return x if is_rounded else self.pack(x)[1]

    def pack(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What a cache keeps of x, int16 words ``(..., words)``, and the numbers that they stand for, like x."""
        exact = self.units(x)
        numbers = exact.detach().round()
        return pack_numbers(numbers, self.bits), self.values(numbers + (exact - exact.detach()), x.dtype)

    def extra_repr(self) -> str:
        return f"channels={len(self.step)}, bits={self.bits}"


@dataclass(frozen=True, eq=False)
class PackedChannels:
    """Keys or values of all tokens, as a cache holds them."""

    words: Tensor  # int16, ``(batch, tokens, words)``
    grid: ChannelGrid

    def values(self, dtype: torch.dtype) -> Tensor:
        """What was packed, rounded, ``(batch, tokens, channels)``."""
        words = self.words.flatten(0, 1).contiguous().view(torch.uint8)
        numbers = modeling_gac.unpack(words, self.grid.bits, len(self.grid.step))
        return self.grid.values(numbers.view(*self.words.shape[:-1], -1), dtype)


def pack_numbers(numbers: Tensor, bits: int) -> Tensor:
    """Pack whole numbers ``(..., n)`` of so many bits into int16 words ``(..., words)``: a string of bits, lowest first."""
    places = torch.arange(WORD, device=numbers.device)
    string = (numbers.to(torch.int32)[..., None] >> places[:bits] & 1).flatten(-2)
    string = functional.pad(string, (0, group_words(numbers.shape[-1], bits) * WORD - string.shape[-1]))
    return (string.unflatten(-1, (-1, WORD)) << places).sum(-1).to(torch.int16)
