"""Attention of one new token over a cache of latents on a GPU, in two launches that a CUDA graph can hold.

Keys of all tokens are made anew at every token: at 32,768 tokens of Llama-3-8B, half of the cache, 4.3 GFLOP a layer in
groups of one head (rank 64), 8.6 of two, 17 of four: 4, 9 and 17 us of an H200's tensor cores at their peak. Its bytes
take 16 us (67 MB at 4.2 TB/s), those of the dense cache 32 us. Products, reads of the second factor and waiting come on
top: groups of one head are faster than the dense cache (results/cache.md).

So a program takes one head of keys and values. Heads of one group read the same latents at about the same time, the
first from memory and the others from the L2 cache. Where texts are few, several programs share the context of a head.
The second launch adds up what all warps found, and multiplies it by the second factor of the values. How the kernels
work is told in ``gac.runtime.kernels.latent_attention.attend``; Triton is imported when they first run.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import Tensor

from gac.runtime.kernels import gpu
from gac.runtime.kernels.elementwise.rows import power_of_two
from gac.runtime.kernels.gpu import ceil_div, launching_on, operator
from gac.runtime.kernels.latent_attention.attend import attend_kernel, join_kernel
from gac.runtime.kernels.latent_attention.layout import HALVES, PAIRS, ROOM, TILE, WARPS, WORDS, asked_words, kept
from gac.runtime.limits import ALIGNED

_MOST_PARTS = 128
_WAVES = 4  # of programs, at most, where a context is cut
_BEFORE = 2  # tiles that a program could have read before it begins
_ALIGNED_BYTES = 16
_NUMBERS = 1024  # what a warp of the second launch adds up, and multiplies, at once
_CROWD = 2  # programs of an SM; 3 and 4 were no faster
_REGISTERS = 156  # of a thread, beside those that it works with


def in_registers(sizes: Mapping[str, Any], biased: bool) -> dict[str, bool]:
    """Decide if a thread has registers to load values before keys are scored, and to hold queries.

    Its use is added up here, of the ``sizes`` that the kernel is compiled for. The bound is so low that ptxas spills
    nothing where queries are held, or 24 bytes beside a mask. They are not held beside a bias (``biased``) or a norm of
    keys, beside rounded numbers, nor where keys are not rotated.
    """
    tiles_of, fours = ceil_div(sizes["SIZE"], 2 * PAIRS), ceil_div(sizes["QUERIES"], 4)
    halves = {name: 2 if sizes[f"{name}_BITS"] == HALVES else 1 for name in "KV"}
    keys, angles = 10 * sizes["K_STEPS"] * halves["K"], 4 * tiles_of if sizes["ROTATED"] else 0
    left = _REGISTERS - keys - angles - sizes["V_STEPS"] * (8 + 4 * fours * halves["V"])
    plain = sizes["ROTATED"] > 0 and not (biased or sizes["KIND"] or sizes["K_BITS"] or sizes["V_BITS"])
    return {"EARLY": left >= 0, "HELD": plain and left > sizes["ASKED"] // 32}


def parts_of(tokens: int, programs: int, device: torch.device) -> int:
    """Into how many parts so many tokens are cut, where there are so many programs for each part."""
    count, slots = ceil_div(tokens, TILE), _CROWD * gpu.processors(device)
    most = min(count, _MOST_PARTS)
    waves = {max(1, min(most, wave * slots // programs)) for wave in range(1, _WAVES + 1)}
    fastest = min(
        sorted(waves), key=lambda parts: ceil_div(parts * programs, slots) * (ceil_div(count, parts) + _BEFORE)
    )
    return ceil_div(count, ceil_div(count, fastest))


@dataclass(frozen=True, eq=False)
class Attention:
    """Attention of one new token in each sequence."""

    query: Tensor  # rotated, ``(batch, heads, 1, head_dim)``
    # keys and values: as ``gac.runtime.latents.rotation.Latents`` has them; of rounded ones the numbers
    keys: Tensor
    values: Tensor
    # k_scales and v_scales: of rounded ones, ``(batch, tokens, groups)``; None: they are not rounded
    k_scales: Tensor | None
    v_scales: Tensor | None
    k_factor: Tensor | None  # ``(groups, rows, rank)``; None: keys are read as they are
    k_bias: Tensor | None  # ``(rows,)``
    v_factor: Tensor | None  # as for keys
    v_bias: Tensor | None
    mask: Tensor | None  # boolean, or added to scores, ``(1 or batch, 1, 1, tokens)``; None: every token is attended to
    # frequencies and turns: of ``gac.runtime.latents.rotation.Angles``; None: keys are not rotated
    frequencies: Tensor | None
    turns: Tensor | None
    # ``layout.with_runs`` of all tokens, ``(1 or batch, tokens, 2)``; None: keys are not rotated
    positions: Tensor | None
    length: Tensor | None  # how many tokens there are, one number; None: as many as the cache has room for
    scale: float  # of scores
    # weight of the keys' norm, ``(head_dim,)``, which they pass before they are rotated; None: there is none
    norm: Tensor | None = None
    eps: float = 0.0  # of the norm
    kind: str = ""  # of the norm, in ``gac.runtime.kernels.elementwise.rows.NORMS``

    @property
    def size(self) -> int:  # of a head of keys
        return self.query.shape[-1]

    @property
    def heads(self) -> int:  # of keys and values
        return _features(self.keys, self.k_factor) // self.size

    @property
    def queries(self) -> int:  # of a head
        return self.query.shape[1] // self.heads

    @property
    def v_size(self) -> int:  # of a head of the result
        return _features(self.values, self.v_factor) // self.heads

    @property
    def k_rank(self) -> int:  # 0: keys are read as they are
        return 0 if self.k_factor is None else self.k_factor.shape[-1]

    @property
    def v_rank(self) -> int:
        """Numbers that a head reads of each token."""
        return self.v_size if self.v_factor is None else self.v_factor.shape[-1]

    @property
    def bits(self) -> tuple[int | None, int | None]:
        """Of a rounded number of keys, and of values; None: they are not rounded."""
        return _bits(self.keys, self.k_scales, self.k_rank), _bits(self.values, self.v_scales, self.v_rank)

    def run(self) -> Tensor:
        """Return what it mixed, ``(batch, 1, heads, length of a value)``: two launches."""
        batch, count = self.query.shape[:2]
        parts = parts_of(self.keys.shape[1], batch * self.heads, self.query.device)
        left = batch, parts * WARPS, count
        sums = self.query.new_empty(*left, self.v_rank, dtype=torch.float32)
        peaks, totals = self.query.new_empty(2, *left, dtype=torch.float32)
        room, words = None, asked_words(self.queries, self.size)
        if not self.query.is_cuda or 4 * words > ROOM:
            room = self.query.new_empty(batch, parts, self.heads, words, dtype=torch.int32)
        self._attend(parts, room, sums, peaks, totals)
        return self._joined(parts * WARPS, sums, peaks, totals)

    def _attend(self, parts: int, room: Tensor | None, sums: Tensor, peaks: Tensor, totals: Tensor) -> None:
        batch = len(self.query)
        mask = None if self.mask is None else self.mask.expand(batch, 1, 1, self.keys.shape[1])
        positions = None if self.positions is None else self.positions.expand(batch, -1, 2)
        keys, values, sizes, factor = _words(self.keys), _words(self.values), self._sizes(), self.k_factor
        if factor is not None:
            factor = kept(factor, self.size, self._rotated, self.bits[0]).view(torch.int32)
        with launching_on(self.query):
            attend_kernel[(self.heads, parts, batch)](
                self.query, keys, values, self.k_scales, self.v_scales, factor, self.k_bias, self.norm, mask,
                self.frequencies, self.turns, positions, self.length, room, sums, peaks, totals, keys.shape[1],
                self.scale, self.eps, (self.k_rank or self.size) // ALIGNED, self.v_rank // ALIGNED,
                *self.query.stride()[:2], *(stride // sizes["K_UNIT"] for stride in keys.stride()[:2]),
                *(stride // sizes["V_UNIT"] for stride in values.stride()[:2]),
                *_strides(self.k_scales), *_strides(self.v_scales),
                *((0, 0) if mask is None else (mask.stride(0), mask.stride(3))), *_strides(positions),
                SHOWN=mask is not None and mask.dtype == torch.bool, **sizes,
                **in_registers(sizes, self.k_bias is not None),
                WARPS=WARPS, COMPILED=self.query.is_cuda, num_warps=WARPS,
            )  # fmt: skip

    @property
    def _rotated(self) -> int:
        return 0 if self.frequencies is None else 2 * len(self.frequencies)

    def _sizes(self) -> dict[str, Any]:
        k_bits, v_bits = self.bits
        k_shared = 1 if self.k_factor is None else self.k_factor.shape[1] // self.size
        v_shared = 1 if self.v_factor is None else self.v_factor.shape[1] // self.v_size
        return {
            **_read("K", _words(self.keys), self.k_rank or self.size, k_bits, k_shared),
            **_read("V", _words(self.values), self.v_rank, v_bits, v_shared),
            "QUERIES": self.queries, "ASKED": asked_words(self.queries, self.size),
            "SIZE": self.size, "ROTATED": self._rotated, "KIND": self.kind,
        }  # fmt: skip

    def _joined(self, parts: int, sums: Tensor, peaks: Tensor, totals: Tensor) -> Tensor:
        batch, count = self.query.shape[:2]
        out = self.query.new_empty(batch, 1, count, self.v_size)
        wide, warps = power_of_two(self.v_rank), WARPS
        if batch * count <= gpu.processors(out.device):  # where each program has an SM, it may take all that it has
            warps *= 2
        most = max(1, warps * _NUMBERS // wide)
        with launching_on(out):
            join_kernel[(count, batch)](
                sums, peaks, totals, self.v_factor, self.v_bias, out, parts, self.v_rank // ALIGNED,
                HEADS=count, SHARED=self.queries, SIZE=self.v_size, BLOCK_SIZE=wide,
                PARTS=most, FEATURES=most, num_warps=warps,
            )  # fmt: skip
        return out


def _features(base: Tensor, factor: Tensor | None) -> int:
    return base.shape[-1] if factor is None else factor.shape[:2].numel()


def _bits(base: Tensor, scales: Tensor | None, rank: int) -> int | None:
    return None if scales is None else 8 * base.shape[-1] // (scales.shape[-1] * rank)


def _words(base: Tensor) -> Tensor:
    return base.view(torch.int32 if base.itemsize > 1 else torch.int16)


def _read(which: str, words: Tensor, rank: int, bits: int | None, shared: int) -> dict[str, int | bool]:
    count = rank // 4 if bits == HALVES else rank // 2
    steps, even = ceil_div(count, WORDS), count % WORDS == 0
    unit = gcd(_ALIGNED_BYTES // words.itemsize, words.data_ptr() // words.itemsize, count, *words.stride()[:2])
    read = {"BITS": bits or 0, "UNIT": unit, "STEPS": steps, "EVEN": even, "SHARED": shared}
    return {f"{which}_{name}": value for name, value in read.items()}


def _strides(tensor: Tensor | None) -> tuple[int, int]:
    return (0, 0) if tensor is None else (tensor.stride(0), tensor.stride(1))


def attend(attention: Attention) -> Tensor:
    """Return what ``Attention.run`` finds, as an operator."""
    return latent_attention(*vars(attention).values())


def _like(*inputs: Any) -> Tensor:
    attention = Attention(*inputs)
    batch, heads = attention.query.shape[:2]
    return attention.query.new_empty(batch, 1, heads, attention.v_size)


@operator(
    _like,
    schema="(Tensor query, Tensor keys, Tensor values, Tensor? k_scales, Tensor? v_scales, Tensor? k_factor, "
    "Tensor? k_bias, Tensor? v_factor, Tensor? v_bias, Tensor? mask, Tensor? frequencies, Tensor? turns, "
    "Tensor? positions, Tensor? length, float scale, Tensor? norm, float eps, str kind) -> Tensor",
)
def latent_attention(*inputs: Any) -> Tensor:
    return Attention(*inputs).run()
