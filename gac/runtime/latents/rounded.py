"""Keys and values of few bits in a cache, rounded as KIVI does (arXiv 2402.02750), and attention over them.

Of the tokens before a query the last ``EXACT`` ones are read as they are, and those of the block that is not full yet.
All before are rounded, ``BLOCK`` at a time: keys, rotated already, channel by channel over the tokens of a block, for
some channels are always large; values token by token, in groups of ``BLOCK`` channels. Each of these has a middle and a
step of 16 bits. A query reads the same whether its token is decoded or lies in a prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import DynamicLayer

from gac.runtime.limits import BLOCK, EXACT, WORD, group_words
from gac.runtime.plain.modeling_gac import unpack

QUERIES = 512
"""Queries of a prompt that attend at a time."""


def rounded_tokens(before: int) -> int:
    """Of so many tokens before a query, how many it reads rounded."""
    return max(before - EXACT, 0) // BLOCK * BLOCK


@dataclass(frozen=True)
class Rounding:
    """Rounds keys or values ``(batch, tokens, channels)``, whole blocks of them, and packs what it rounds."""

    bits: int
    keys: bool

    def rounded(self, x: Tensor) -> Tensor:
        """Rounded x, in its dtype; gradients pass as they are."""
        result = self._values(*self._numbers(x.detach()), x.shape[-1]).to(x.dtype)
        return x + (result - x.detach()) if torch.is_grad_enabled() and x.requires_grad else result

    def packed(self, x: Tensor) -> Tensor:
        """Pack x as a cache keeps it: int16 words ``(batch, blocks, words)``."""
        numbers, middle, step = self._numbers(x)
        scales = torch.cat((middle, step), -1).to(torch.bfloat16).view(torch.int16)
        return torch.cat([pack(numbers, self.bits).flatten(2), scales.flatten(2)], -1)

    def unpacked(self, words: Tensor, channels: int) -> Tensor:
        """Unpack the rounded numbers, float32 ``(batch, tokens, channels)``."""
        lines, length = self._lines(channels)
        size = group_words(length, self.bits)
        packed, scales = torch.split(words, [lines * size, 2 * lines], -1)
        numbers = unpack(packed.reshape(-1, size).contiguous().view(torch.uint8), self.bits, length)
        scales = scales.contiguous().view(torch.bfloat16).float().view(*words.shape[:2], lines, 2)
        numbers = numbers.view(*words.shape[:2], lines, length).float()
        return self._values(numbers, scales[..., :1], scales[..., 1:], channels)

    def _lines(self, channels: int) -> tuple[int, int]:
        """Rows of numbers with one step that a block has, and their length."""
        if self.keys:
            return channels, BLOCK
        length = BLOCK if channels % BLOCK == 0 else channels
        return BLOCK * channels // length, length

    def _numbers(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Whole numbers ``(batch, blocks, rows, length)``, and the middle and the step of each row."""
        blocks = x.float().reshape(len(x), -1, BLOCK, x.shape[-1])
        blocks = blocks.mT if self.keys else blocks.reshape(*blocks.shape[:2], *self._lines(x.shape[-1]))
        least, most = blocks.aminmax(dim=-1, keepdim=True)
        middle, step = ((least + most) / 2).bfloat16().float(), ((most - least) / self._top).bfloat16().float()
        units = (blocks - middle) / step.clamp_min(2.0**-126) + self._top / 2
        return units.round().clamp(0, self._top), middle, step

    def _values(self, numbers: Tensor, middle: Tensor, step: Tensor, channels: int) -> Tensor:
        values = (numbers - self._top / 2) * step + middle
        values = values.mT if self.keys else values.reshape(*values.shape[:2], BLOCK, channels)
        return values.flatten(1, 2)

    @property
    def _top(self) -> int:
        return (1 << self.bits) - 1


def pack(numbers: Tensor, bits: int) -> Tensor:
    """Pack whole numbers ``(..., n)`` into int16 words ``(..., words)``: a row is a string of bits, lowest first."""
    places = torch.arange(WORD, dtype=torch.int32, device=numbers.device)
    string = (numbers.to(torch.int32)[..., None] >> places[:bits] & 1).flatten(-2)
    string = functional.pad(string, (0, group_words(numbers.shape[-1], bits) * WORD - string.shape[-1]))
    words: Tensor = (string.view(*string.shape[:-1], -1, WORD) << places).sum(-1)
    return words.to(torch.int16)


@dataclass(frozen=True, eq=False)
class Parts:
    """Keys or values of all tokens: the first of them as they are rounded, the rest exact."""

    old: Tensor
    exact: Tensor

    @property
    def joined_tokens(self) -> int:
        return self.old.shape[-2] + self.exact.shape[-2]

    @property
    def joined(self) -> Tensor:
        return torch.cat((self.old, self.exact), -2) if self.old.shape[-2] else self.exact


class RoundedLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """A cache layer whose keys or values are rounded once they are old; ``None`` in place of one: it stays as it is.

    ``keys`` and ``values`` are those of the last tokens, and of all where they stay; ``old`` are the words of the rest.
    A layer that is cropped into its blocks goes on with the rounded numbers of what is left of the last one.
    """

    _layer_type = None

    def __init__(self, roundings: Sequence[Rounding | None] = (None, None)) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.roundings, self.old = tuple(roundings), [torch.empty(0, 0, 0, dtype=torch.int16)] * 2

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any) -> Any:
        """Keep new tokens ``(batch, 1, tokens, channels)``; returns keys and values, ``Parts`` of what is rounded."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            empty = torch.empty(len(key_states), 0, 0, dtype=torch.int16, device=key_states.device)
            self.old = [empty, empty]
        read = self._read(key_states, value_states)
        self._round()
        return read

    def _read(self, *states: Tensor) -> tuple[Tensor | Parts, ...]:
        kept: Any = (self.keys, self.values)
        stored = [torch.cat(both, -2) for both in zip(kept, states, strict=True)]
        self.keys, self.values = stored
        return tuple(
            exact if rounding is None else Parts(self._unpacked(index, exact), exact)
            for index, (rounding, exact) in enumerate(zip(self.roundings, stored, strict=True))
        )

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.keys, self.values = (states[..., :0, :] for states in (key_states, value_states))

    @property
    def blocks(self) -> int:
        return max(int(old.shape[1]) for old in self.old)

    def _unpacked(self, index: int, like: Tensor) -> Tensor:
        old, rounding = self.old[index], self.roundings[index]
        if not old.shape[1]:
            return like[..., :0, :]
        assert rounding is not None
        return rounding.unpacked(old.to(like.device), like.shape[-1]).to(like.dtype).unsqueeze(1)

    def _round(self) -> None:
        count = rounded_tokens(self.get_seq_length()) - self.blocks * BLOCK
        for index, name in enumerate(("keys", "values") if count > 0 else ()):
            states, rounding = getattr(self, name), self.roundings[index]
            if rounding is not None:
                words = rounding.packed(states[:, 0, :count])
                self.old[index] = torch.cat((self.old[index], words), 1) if self.old[index].shape[1] else words
                setattr(self, name, states[..., count:, :].contiguous())

    def get_seq_length(self) -> int:
        """The number of all tokens."""
        if not self.is_initialized:
            return 0
        index = 0 if self.roundings[0] is not None else 1
        exact: Any = (self.keys, self.values)[index]
        return int(exact.shape[-2]) + self.old[index].shape[1] * BLOCK

    def crop(self, length: int) -> None:
        """Drop the last tokens, all but ``length`` of them or, below 0, so many."""
        if not self.is_initialized:
            return
        kept = length if length > 0 else self.get_seq_length() + length
        blocks = min(self.blocks, kept // BLOCK)
        for index, name in enumerate(("keys", "values")):
            states = getattr(self, name)
            if self.roundings[index] is not None:
                states = Parts(self._unpacked(index, states)[..., blocks * BLOCK :, :], states).joined
                self.old[index] = self.old[index][:, :blocks]
                setattr(self, name, states[..., : kept - blocks * BLOCK, :])
            else:
                setattr(self, name, states[..., :kept, :])

    def reset(self) -> None:
        super().reset()
        self.keys = self.values = None
        self.is_initialized = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.is_initialized:
            self._select(lambda states: states.index_select(0, beam_idx.to(states.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self._select(lambda states: states.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.is_initialized:
            self._select(lambda states: states[indices, ...])

    def offload(self) -> None:
        super().offload()  # type: ignore[no-untyped-call]
        self.old = [words.to("cpu", non_blocking=True) for words in self.old]

    def _select(self, rows: Any) -> None:
        self.keys, self.values, *self.old = map(rows, (self.keys, self.values, *self.old))


def attend_rounded(
    attend: Any,
    attention: Any,
    query: Tensor,
    states: Sequence[Tensor | Parts],
    mask: Tensor | None,
    roundings: Sequence[Rounding | None],
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend over keys and values ``(batch, heads, tokens, length)``, some queries at a time.

    ``attend`` is the model's own attention, ``query (batch, query heads, tokens, length)`` and ``mask (batch, 1,
    tokens, all tokens)`` are what it takes.
    """
    exact = [item.joined if isinstance(item, Parts) else item for item in states]  # but for what was rounded before
    tokens, count = exact[0].shape[-2], query.shape[-2]
    begin, old_tokens = tokens - count, rounded_tokens(tokens - 1)
    old = [_with_old(item, rounding, old_tokens) for item, rounding in zip(states, roundings, strict=True)]
    mixed = []
    for start in range(begin, tokens, QUERIES):
        stop = min(start + QUERIES, tokens)
        low, high = rounded_tokens(start), rounded_tokens(stop - 1)
        columns = torch.cat((torch.arange(high), torch.arange(low, stop))).to(query.device)
        befores = torch.tensor([rounded_tokens(index) for index in range(start, stop)], device=query.device)[:, None]
        is_old = torch.arange(len(columns), device=query.device) < high
        visible = (columns < befores) == is_old
        if mask is None:
            visible = visible & (columns <= torch.arange(start, stop, device=query.device)[:, None])
            part = _as_mask(visible[None, None], attention, query)
        elif mask.dtype == torch.bool:
            part = mask[..., start - begin : stop - begin, :][..., columns] & visible
        else:
            part = mask[..., start - begin : stop - begin, :][..., columns]
            part = part.masked_fill(~visible, torch.finfo(part.dtype).min)
        keys, values = (
            torch.cat((before[..., :high, :], now[..., low:stop, :]), -2)
            for before, now in zip(old, exact, strict=True)
        )
        output, _ = attend(attention, query[..., start - begin : stop - begin, :], keys, values, part, **options)
        mixed.append(output)
    return torch.cat(mixed, 1), None


def _as_mask(visible: Tensor, attention: Any, query: Tensor) -> Tensor:
    if attention.config._attn_implementation == "sdpa":
        return visible
    return torch.zeros_like(visible, dtype=query.dtype).masked_fill(~visible, torch.finfo(query.dtype).min)


def _with_old(states: Tensor | Parts, rounding: Rounding | None, count: int) -> Tensor:
    """The first ``count`` tokens as queries read them when they are old, ``(batch, heads, tokens, length)``."""
    if rounding is None:
        return (states.joined if isinstance(states, Parts) else states)[..., :count, :]
    old, exact = (states.old, states.exact) if isinstance(states, Parts) else (states[..., :0, :], states)
    new = exact[..., : count - old.shape[-2], :]
    if not new.shape[-2]:
        return old
    by_token = new.transpose(1, 2)
    flat = rounding.rounded(by_token.flatten(2)).view(by_token.shape).transpose(1, 2)
    return torch.cat((old, flat), -2)
