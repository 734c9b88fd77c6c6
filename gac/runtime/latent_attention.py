"""Attention of one new token over a cache of latents on a GPU, in two launches that a CUDA graph can hold.

Keys of all tokens are made anew at every token: at 32,768 tokens of Llama-3-8B, half of the cache, 4.3 GFLOP a layer in
groups of one head (rank 64), 8.6 of two, 17 of four: 4, 9 and 17 us of an H200's tensor cores at their peak. Its bytes
take 16 us (67 MB at 4.2 TB/s), those of the dense cache 32 us: groups of one head, or two, stay near the bytes.

So a program takes one head of keys and values. Heads of one group read the same latents at about the same time, the
first from memory and the others from the L2 cache. Where texts are few, several programs share the context of a head,
and the second launch adds up what they found, and multiplies it by the second factor of the values. How the kernels
work is told in ``gac.runtime.latent_kernels``; Triton is imported when they first run.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import Tensor

from . import tiles
from .gpu import ceil_div, launching_on, make_operator
from .kernel_limits import latents as refused
from .rows import power_of_two

TILE = 64
"""Tokens of a tile, at most."""
_LEAST = 16  # numbers that a tensor core sums, and rows that it has
_MOST_PARTS = 128
_WAVES = 4  # of programs, at most, where a context is cut
_WARPS = 4
_WHOLE = 64
_BEFORE = 2  # tiles that a program could have read before it begins
_STAGES = 1
"""Tiles that are on their way at once. With more, tiles of 64 tokens gave wrong sums on an H200 where heads are 96 or
longer (Triton 3.6), though not in Triton's interpreter."""
_HALVES = 4  # bits, of which a byte holds two numbers
_ALIGNED_BYTES = 16
_PARTS, _NUMBERS = 16, 4096  # what the second launch adds up, and multiplies, at once


@dataclass(frozen=True)
class Program:
    """How a program reads the context.

    Attributes:
        tokens: of a tile.
        stages: tiles that are on their way at once.
        crowd: programs for each SM.
    """

    tokens: int
    warps: int
    stages: int
    crowd: int

    @staticmethod
    def of(
        size: int,
        queries: int,
        k_rank: int,
        v_rank: int,
        device: torch.device,
        itemsize: int = 2,
        bits: tuple[int | None, int | None] = (None, None),
    ) -> "Program | None":
        """The fastest; None: not even the smallest finds room in shared memory.

        Args:
            size: of a head.
            queries: of a head.
            k_rank: of the keys; 0: they are read as they are.
            bits: of numbers of keys, and of values, that are rounded; None: they are as wide as the query's.
        """
        pairs = max(_LEAST, power_of_two(size // 2))
        k_wide, v_wide = (sum(widths(rank, own)) for rank, own in zip((k_rank, v_rank), bits, strict=True))
        held = 2 * pairs * k_wide if k_rank else 0
        tile = TILE * ((k_wide if k_rank else 2 * pairs) + v_wide)
        own = rows_of(queries) * (TILE + 2 * pairs)  # weights and queries
        room = tiles._shared_memory(device)
        for crowd in (2, 1):
            if crowd * itemsize * (held + own + _STAGES * tile) <= room:
                return Program(TILE, _WARPS, _STAGES, crowd)
        return None

    def parts(self, tokens: int, programs: int, device: torch.device) -> int:
        """Into how many parts so many tokens are cut, where there are so many programs for each part."""
        count, slots = ceil_div(tokens, self.tokens), self.crowd * tiles._processors(device)
        most = min(count, _MOST_PARTS)
        waves = {max(1, min(most, wave * slots // programs)) for wave in range(1, _WAVES + 1)}
        fastest = min(
            sorted(waves), key=lambda parts: ceil_div(parts * programs, slots) * (ceil_div(count, parts) + _BEFORE)
        )
        return ceil_div(count, ceil_div(count, fastest))


@dataclass(frozen=True, eq=False)
class Attention:
    """What one new token of each text attends to.

    Attributes:
        query: rotated, ``(batch, heads, 1, head_dim)``.
        keys, values: as ``gac.runtime.latent_tokens.Latents`` has them; of rounded ones the numbers.
        k_scales, v_scales: of rounded ones, ``(batch, tokens, groups)``; None: they are not rounded.
        k_factor, v_factor: ``(groups, rows, rank)``; None: keys, or values, are read as they are.
        k_bias, v_bias: ``(rows,)``; None: there is none.
        mask: boolean, or added to scores, ``(1 or batch, 1, 1, tokens)``; None: every token is attended to.
        frequencies, turns: of ``gac.runtime.latent_tokens.Angles``; None: keys are not rotated.
        last: position of the new token of each text, ``(1 or batch, 1)``.
        length: how many tokens there are, one number; None: as many as the cache has room for.
        scale: of scores.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    k_scales: Tensor | None
    v_scales: Tensor | None
    k_factor: Tensor | None
    k_bias: Tensor | None
    v_factor: Tensor | None
    v_bias: Tensor | None
    mask: Tensor | None
    frequencies: Tensor | None
    turns: Tensor | None
    last: Tensor | None
    length: Tensor | None
    scale: float

    @property
    def size(self) -> int:
        """Of a head of keys."""
        return self.query.shape[-1]

    @property
    def heads(self) -> int:
        """Of keys and values."""
        return _features(self.keys, self.k_factor) // self.size

    @property
    def queries(self) -> int:
        """Of a head."""
        return self.query.shape[1] // self.heads

    @property
    def v_size(self) -> int:
        """Of a head of what comes out."""
        return _features(self.values, self.v_factor) // self.heads

    @property
    def k_rank(self) -> int:
        """0: keys are read as they are."""
        return 0 if self.k_factor is None else self.k_factor.shape[-1]

    @property
    def v_rank(self) -> int:
        """Numbers that a head reads of each token."""
        return self.v_size if self.v_factor is None else self.v_factor.shape[-1]

    @property
    def bits(self) -> tuple[int | None, int | None]:
        """Of a rounded number of keys, and of values; None: they are not rounded."""
        return _bits(self.keys, self.k_scales, self.k_rank), _bits(self.values, self.v_scales, self.v_rank)

    def run(self, how: Program | None = None) -> Tensor:
        """What it mixed, ``(batch, 1, heads, length of a value)``: two launches."""
        how = how or Program.of(
            self.size, self.queries, self.k_rank, self.v_rank, self.query.device, self.query.itemsize, self.bits
        )
        assert how is not None, f"ranks {self.k_rank} and {self.v_rank} find no room in shared memory"
        batch, count = self.query.shape[:2]
        parts = how.parts(self.keys.shape[1], batch * self.heads, self.query.device)
        left = batch, parts, count
        sums = self.query.new_empty(*left, self.v_rank, dtype=torch.float32)
        peaks, totals = self.query.new_empty(2, *left, dtype=torch.float32)
        self._attend(how, parts, sums, peaks, totals)
        return self._joined(parts, sums, peaks, totals)

    def _attend(self, how: Program, parts: int, sums: Tensor, peaks: Tensor, totals: Tensor) -> None:
        from .latent_kernels import attend

        batch = len(self.query)
        mask = None if self.mask is None else self.mask.expand(batch, 1, 1, self.keys.shape[1])
        last = None if self.last is None else self.last.expand(batch, 1)
        with launching_on(self.query):
            attend[(self.heads, parts, batch)](
                self.query, self.keys, self.values, self.k_scales, self.v_scales, self.k_factor, self.k_bias, mask,
                self.frequencies, self.turns, last, self.length, sums, peaks, totals, self.keys.shape[1], self.scale,
                *self.query.stride()[:2], *_units(self.keys), *_units(self.values),
                *_strides(self.k_scales), *_strides(self.v_scales),
                *((0, 0) if mask is None else (mask.stride(0), mask.stride(3))), 0 if last is None else last.stride(0),
                QUERIES=self.queries, ROWS=rows_of(self.queries),
                ADDED=mask is not None and mask.dtype != torch.bool, **self._sizes(),
                TOKENS=how.tokens, STAGES=how.stages, num_warps=how.warps,
            )  # fmt: skip

    def _sizes(self) -> dict[str, int]:
        k_shared = 1 if self.k_factor is None else self.k_factor.shape[1] // self.size
        v_shared = 1 if self.v_factor is None else self.v_factor.shape[1] // self.v_size
        k_bits, v_bits = self.bits
        (k_first, k_rest), (v_first, v_rest) = widths(self.k_rank or self.size, k_bits), widths(self.v_rank, v_bits)
        return {
            "K_BITS": k_bits or 0, "K_UNIT": _unit(self.keys), "V_BITS": v_bits or 0, "V_UNIT": _unit(self.values),
            "K_SHARED": k_shared, "K_RANK": self.k_rank or self.size, "K_FIRST": k_first, "K_REST": k_rest,
            "V_SHARED": v_shared, "V_RANK": self.v_rank, "V_FIRST": v_first, "V_REST": v_rest,
            "SIZE": self.size, "PAIRS": max(_LEAST, power_of_two(self.size // 2)),
            "ROTATED": 0 if self.frequencies is None else 2 * len(self.frequencies),
        }  # fmt: skip

    def _joined(self, parts: int, sums: Tensor, peaks: Tensor, totals: Tensor) -> Tensor:
        from .latent_kernels import join

        batch, count = self.query.shape[:2]
        out = self.query.new_empty(batch, 1, count, self.v_size)
        wide = power_of_two(self.v_rank)
        with launching_on(out):
            join[(count, batch)](
                sums, peaks, totals, self.v_factor, self.v_bias, out, parts,
                HEADS=count, SHARED=self.queries, SIZE=self.v_size, RANK=self.v_rank, WIDE=wide,
                PARTS=_PARTS, FEATURES=max(1, _NUMBERS // wide), num_warps=4,
            )  # fmt: skip
        return out


def _features(held: Tensor, factor: Tensor | None) -> int:
    """Of all heads of a token, as they are attended to."""
    return held.shape[-1] if factor is None else factor.shape[:2].numel()


def _bits(held: Tensor, scales: Tensor | None, rank: int) -> int | None:
    """Of a number, of which the bytes of each group hold as many as the rank."""
    return None if scales is None else 8 * held.shape[-1] // (scales.shape[-1] * rank)


def _unit(held: Tensor) -> int:
    """Of how many of its numbers strides are multiples: a power of two, of which so many bytes are read at once."""
    return 1 if held.itemsize > 1 else gcd(_ALIGNED_BYTES, *held.stride()[:2])


def _units(held: Tensor) -> tuple[int, int]:
    """From text to text, and from token to token, in units."""
    batch, token = (stride // _unit(held) for stride in held.stride()[:2])
    return batch, token


def _strides(scales: Tensor | None) -> tuple[int, int]:
    """From text to text, and from token to token."""
    return (0, 0) if scales is None else (scales.stride(0), scales.stride(1))


def widths(rank: int, bits: int | None = None) -> tuple[int, int]:
    """Two powers of two, or one and 0, that are no less together: tiles have such widths.

    One where the rank is at most 64, of which Hopper's tensor cores have as many rows at least. Of 4 bits they are the
    halves of a group, which lie in the halves of bytes.
    """
    if bits == _HALVES:
        half = max(_LEAST, power_of_two(rank // 2))
        return half, half
    whole = max(_LEAST, power_of_two(rank))
    first, rest = whole // 2, max(_LEAST, power_of_two(rank - whole // 2)) if rank < whole else whole // 2
    return (whole, 0) if whole <= _WHOLE or rest == first else (first, rest)


def rows_of(queries: int) -> int:
    """In which a program holds the queries of a head: Triton 3.6 has no products of fewer on Hopper's tensor cores."""
    return max(_LEAST, power_of_two(queries))


def unfit(
    query: Tensor, heads: int, k_rank: int, v_rank: int, bits: tuple[int | None, int | None] = (None, None)
) -> str | None:
    """Why the kernels cannot attend with a query ``(batch, heads, 1, head_dim)``; None where they can.

    Args:
        heads: of keys and values.
        k_rank: of the keys; 0: they are read as they are.
        v_rank: numbers that a head reads of the values of a token.
        bits: as for ``Program.of``.
    """
    size, queries = query.shape[-1], query.shape[1] // heads
    if (reason := refused(size, k_rank, v_rank)) is not None:
        return reason
    if Program.of(size, queries, k_rank, v_rank, query.device, query.itemsize, bits) is None:
        return f"ranks {k_rank} and {v_rank} of heads of {size} need more shared memory than the GPU has"
    return None


def attend(attention: Attention) -> Tensor:
    """What ``Attention.run`` finds, as an operator."""
    given: Mapping[str, Any] = vars(attention)
    mixed: Tensor = torch.ops.gac.latent_attention(*given.values())
    return mixed


def _run(*given: Any) -> Tensor:
    return Attention(*given).run()


def _like(*given: Any) -> Tensor:
    one = Attention(*given)
    return one.query.new_empty(len(one.query), 1, one.query.shape[1], one.v_size)


make_operator(
    "latent_attention",
    "(Tensor query, Tensor keys, Tensor values, Tensor? k_scales, Tensor? v_scales, Tensor? k_factor, Tensor? k_bias, "
    "Tensor? v_factor, Tensor? v_bias, Tensor? mask, Tensor? frequencies, Tensor? turns, Tensor? last, "
    "Tensor? length, float scale) -> Tensor",
    _run,
    _like,
)
