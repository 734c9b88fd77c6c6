"""Tiles of a GEMM, and split-K: several programs share a tile, every one with a part of the columns."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

from gac.runtime.kernels import gpu
from gac.runtime.kernels.gpu import ceil_div
from gac.runtime.kernels.guard import jit, tl

T = TypeVar("T")

COUNTERS = 1024
"""More than there are shared tiles: several programs share each, and there are a few for each SM at most."""
_MAX_SPLIT_K = 8
_KEPT = 1024  # bytes of shared memory that the GPU keeps for itself


@dataclass(frozen=True)
class Tile:
    """The tile that a program computes."""

    rows: int  # of the input
    outputs: int  # rows of the weight
    numbers: int  # of each in a step
    warps: int
    stages: int
    programs_per_sm: int = 2  # programs for each SM, at most, where several share a tile

    def count(self, rows: int, outputs: int) -> int:
        return ceil_div(rows, self.rows) * ceil_div(outputs, self.outputs)

    def fitted(self, step: int, device: torch.device) -> "Tile":
        """With fewer stages where the GPU has less shared memory; ``step`` is the bytes of one."""
        return replace(self, stages=max(2, min(self.stages, _shared_memory(device) // step)))


def tile_for(rows: int, tiles: Mapping[int, T]) -> T:
    """The tile, or other parameters, for so many rows; they are by the most rows, the last one for more, too."""
    return tiles[min((most for most in tiles if rows <= most), default=max(tiles))]


@dataclass(frozen=True, eq=False)
class SplitK:
    """Programs that share tiles, every one with a part of the columns."""

    split: int  # programs of a tile
    sums: Tensor  # of each program, ``(tiles, split, numbers of a tile)``
    # of programs that are done, int32, one a tile at least; they are zeros when the product is launched
    counters: Tensor

    @staticmethod
    def of(
        tile: Tile,
        rows: int,
        outputs: int,
        columns: int,
        like: Tensor,
        dtype: torch.dtype,
        counters: Tensor | None = None,
    ) -> "SplitK":
        """Let as many programs share a tile as the GPU has room for, each with two steps at least.

        Tensors are on the device of ``like``, sums of that dtype. Counters are zeros; without any, new ones, which
        whoever launches the product clears.
        """
        tiles = tile.count(rows, outputs)
        room = tile.programs_per_sm * gpu.processors(like.device)
        split = max(1, min(_MAX_SPLIT_K, room // tiles, columns // tile.numbers // 2))
        shape = (tiles, split, tile.rows * tile.outputs) if split > 1 else (1,)
        if counters is None:
            counters = like.new_empty(tiles if split > 1 else 1, dtype=torch.int32)
        assert split == 1 or tiles <= len(counters), f"{tiles} tiles are shared, and there are {len(counters)} counters"
        return SplitK(split, like.new_empty(shape, dtype=dtype), counters)


def zero_counters(x: Tensor) -> Tensor:
    """Return counters on the device of x that are zeros at a launch, and again after it."""
    return _counters_of(x.device, torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0)


@cache
def _counters_of(device: torch.device, stream: int) -> Tensor:
    """Zeros of a stream, whose launches come one after the other; each leaves zeros."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def _shared_memory(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor) - _KEPT


# In Triton kernels.


@jit
def clear(counters, count, MOST: tl.constexpr):
    """Write zeros to ``count`` counters; MOST is a power of two, no less."""
    offsets = tl.arange(0, MOST)
    tl.store(counters + offsets, tl.zeros((MOST,), tl.int32), mask=offsets < count)


@jit
def split_k_reduce(local, sums, counters, tile, part, SPLIT_K):
    """The sum of what all programs of a tile found, in order, for the last of them that comes; and whether this one is.

    Counters are zeros again afterwards, so that the next launch can have them.
    """
    last = part < SPLIT_K
    if SPLIT_K > 1:
        down: tl.constexpr = local.shape[0]
        across: tl.constexpr = local.shape[1]
        inside = tl.arange(0, down)[:, None] * across + tl.arange(0, across)[None, :]
        first = sums + tile.to(tl.int64) * SPLIT_K * down * across + inside
        tl.store(first + part * down * across, local)
        tl.debug_barrier()
        last = tl.atomic_add(counters + tile, 1) == SPLIT_K - 1
        if last:
            tl.store(counters + tile, 0)
            local = tl.zeros((down, across), local.dtype)
            for item in range(SPLIT_K):
                local += tl.load(first + item * down * across, cache_modifier=".cg")
    return local, last
