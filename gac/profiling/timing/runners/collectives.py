"""Collectives of the processes that torchrun has started, through what a split model calls.

Each process gives other numbers than the others, ``x + rank``, made ahead of a launch. An all-reduce sums them up in
place, so that they grow from launch to launch: its time does not depend on them.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, distributed

from gac.profiling.operators import Axes, Operand
from gac.profiling.timing.runners import Runner, corners
from gac.runtime.parallel.ranks import Ranks, started

# Newer versions of PyTorch know it by another name.
_reduce_scatter: Any = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor


class CollectiveRunner(Runner):
    """Runs in all processes at once; results are tensors of its own."""

    @cached_property
    def ranks(self) -> Ranks:
        """The processes."""
        return started()

    def operands(self, axes: Axes, dtype: str, cut: Callable[[Operand], Tensor]) -> Sequence[Tensor]:
        (x,) = super().operands(axes, dtype, cut)
        return [x, x + self.ranks.rank]

    def given(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """What every process gives, by rank, in float32."""
        return [(inputs[0] + rank).float() for rank in range(self.ranks.size)]


class AllReduceRunner(CollectiveRunner):
    """``torch.distributed.all_reduce``."""

    def run(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        return [self.ranks.summed(inputs[1])]

    def compare(self, inputs: Sequence[Tensor], result: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return corners(result[0]), corners(torch.stack(self.given(inputs)).sum(0))


class AllGatherRunner(CollectiveRunner):
    """``torch.distributed.all_gather_into_tensor``, and a copy into rows."""

    def run(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        return [self.ranks.gathered(inputs[1])]

    def compare(self, inputs: Sequence[Tensor], result: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return corners(result[0]), corners(torch.cat(self.given(inputs), -1))


class ReduceScatterRunner(CollectiveRunner):
    """A copy into blocks of columns, and ``torch.distributed.reduce_scatter_tensor``."""

    def run(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        rows, columns = inputs[1].shape
        own = inputs[1].new_empty(rows, columns // self.ranks.size)
        blocks = inputs[1].view(rows, self.ranks.size, -1).movedim(1, 0).flatten(0, 1)
        _reduce_scatter(own, blocks, group=self.ranks.group)
        return [own]

    def compare(self, inputs: Sequence[Tensor], result: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        summed = torch.stack(self.given(inputs)).sum(0)
        return corners(result[0]), corners(summed.chunk(self.ranks.size, -1)[self.ranks.rank])
