"""Layout of second factors, positions and rotations in attention over latents."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.weak import WeakIdKeyDictionary

from gac.runtime.kernels.gpu import ceil_div

WARPS = 4  # of a program
ROOM = 40 * 2**10
"""Bytes of a program in shared memory; with what Triton takes itself they are within the 48 KiB that each may have."""
TILE = 32 * WARPS  # tokens that a program reads at once, a warp two tiles of 16
PAIRS = 8  # of features, that a warp makes at once
WORDS = 8  # of a token's latents, that a step of a product takes: 16 numbers of 16 bits, or of 8
HALVES = 4  # bits of a number of which a byte holds two
_STEP = 2 * WORDS  # numbers that a product takes
_arranged: Any = WeakIdKeyDictionary()  # by factor its state, and how it is laid


def arranged(factor: Tensor, size: int, rotated: int, bits: int | None) -> Tensor:
    """The second factor ``(groups, rows, rank)`` of keys as warps read it, ``(heads, tiles, numbers of a tile)``.

    A tile has 8 pairs of features that are turned together: first ones, then second ones. Thread ``4 i + j`` takes
    numbers 8j to 8j + 7 of each 32 for feature i, and 4j to 4j + 3 of 16 that are left: those of a first feature and of
    the second one lie beside each other, behind all else. What is not there is 0. ``rotated`` features of a head's
    ``size`` are; latents of 4 ``bits`` come in two halves of the rank.
    """
    local = factor.reshape(-1, size, factor.shape[-1])
    halves = local.chunk(2, -1) if bits == HALVES else (local,)
    wide = torch.stack([pad(halve, (0, -halve.shape[-1] % _STEP)) for halve in halves], 2)
    half, still = rotated // 2, rotated + (size - rotated) // 2
    first = torch.cat((wide[:, :half], wide[:, rotated:still]), 1)
    second = torch.cat((wide[:, half:rotated], wide[:, still:]), 1)
    both = pad(torch.stack((first, second), 1), (0, 0, 0, 0, 0, -first.shape[1] % PAIRS))
    heads, _, pairs, parts, numbers = both.shape
    tiles, odd = (heads, 2, pairs // PAIRS, PAIRS, parts), numbers % (2 * _STEP)
    even, rest = torch.split(both, [numbers - odd, odd], -1)
    even = even.reshape(*tiles, numbers // (2 * _STEP), 4, _STEP // 2).permute(0, 2, 1, 4, 5, 3, 6, 7)
    rest = rest.reshape(*tiles, 4, odd // 4).permute(0, 2, 4, 3, 5, 1, 6)
    return torch.cat((even.flatten(2), rest.flatten(2)), -1)


def asked_words(queries: int, size: int) -> int:
    """Words that the queries of a head fill, as warps read them."""
    return ceil_div(queries, 4) * ceil_div(size, 2 * PAIRS) * 128


def turns_of(frequencies: Tensor, size: int) -> Tensor:
    """Return how far a step turns keys, as warps read it: cosines of two pairs, then their sines, ``(pairs / 2, 4)``.

    Frequencies are radians a place, of the pairs of a head of this size that turn; others stay where they are.
    """
    angles = pad(TILE * frequencies, (0, ceil_div(size, 2 * PAIRS) * PAIRS - len(frequencies)))
    return torch.stack((angles.cos().view(-1, 2), angles.sin().view(-1, 2)), 1).flatten(1)


def with_runs(position_ids: Tensor, previous: Tensor | None = None) -> Tensor:
    """Positions, and how many tokens up to each one have positions that count up by one, int32, ``(batch, tokens, 2)``.

    Args:
        position_ids: shape ``(batch, tokens)``.
        previous: the same of the token before, shape ``(batch, 1, 2)``; None: these are the first.

    >>> with_runs(torch.tensor([[0, 1, 2, 2, 3]]))[..., 1]
    tensor([[1, 2, 3, 1, 2]], dtype=torch.int32)
    """
    ids = position_ids.to(torch.int32)
    if previous is None:
        previous = torch.stack((ids[:, :1], torch.zeros_like(ids[:, :1])), -1)
    before = torch.cat((previous[..., 0], ids[:, :-1]), 1)
    index = torch.arange(ids.shape[1], device=ids.device, dtype=torch.int32)
    start = torch.where(ids == before + 1, -1, index).cummax(1).values  # -1: the run goes on from the token before
    return torch.stack((ids, index - start + torch.where(start < 0, previous[..., 1], 1)), -1)


def kept(factor: Tensor, *how: Any) -> Tensor:
    """``arranged``, once for each state of a factor."""
    state = factor.data_ptr(), 0 if factor.is_inference() else factor._version, how
    made: Tensor
    known, made = _arranged.get(factor, (None, factor))
    if known == state:
        return made
    made = arranged(factor, *how)
    if not (factor.is_cuda and torch.cuda.is_current_stream_capturing()):  # of a graph it is made when that is run
        _arranged[factor] = state, made
    return made
