"""Collectives that the GPUs of a split model run, each on rows and columns of activations.

The processes that torchrun has started run them through what a split model calls. Each process contributes other
numbers, ``x + rank``, made before a launch. An all-reduce sums in place, so that values grow from launch to launch:
its time does not depend on them.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from gac.profiling.operators.base import Axes, Operand, Operator, corners

if TYPE_CHECKING:
    from torch import Tensor

    from gac.runtime.parallel.ranks import Ranks


class Collective(Operator):
    """One GPU's part in a collective over ``m`` rows of ``n`` columns; latency follows their bytes.

    - ``all_reduce``: ``x[m, n]`` of every GPU becomes their sum, in its place, on each of them: a rowwise split GEMM's
      outputs.
    - ``all_gather``: ``x[m, n / gpus]`` of every GPU becomes ``x[m, n]`` on each: all columns of a colwise split GEMM.
      The blocks ``[gpus, m, n / gpus]`` are copied into rows where there are several.
    - ``reduce_scatter``: ``x[m, n]`` of every GPU becomes ``[m, n / gpus]`` on each: its own columns of their sum.
      Columns are copied into such blocks first, where there are several rows.

    Operands are those of each GPU. FLOPs are none: sums are counted as bytes. Results are new tensors.
    """

    axes = ("gpus", "m", "n")
    smooth = True
    compressed_axis = "n"
    cublas = False

    def __init__(self, name: str) -> None:
        self.name = name

    @cached_property
    def ranks(self) -> "Ranks":
        from gac.runtime.parallel.ranks import started

        return started()

    def unmet(self, axes: Axes) -> str | None:
        divides = self.name != "all_reduce"
        return "n that is a multiple of gpus" if divides and axes["n"] % axes["gpus"] else None

    def inputs(self, axes: Axes, dtype: str) -> tuple[Operand, ...]:
        gpus, m, n = (axes[name] for name in self.axes)
        return (Operand((m, n // gpus if self.name == "all_gather" else n), dtype),)

    def outputs(self, axes: Axes, dtype: str) -> tuple[Operand, ...]:
        gpus, m, n = (axes[name] for name in self.axes)
        if self.name == "all_reduce":
            return (Operand((m, n), dtype),)
        blocks, columns = Operand((gpus, m, n // gpus), dtype), n if self.name == "all_gather" else n // gpus
        return blocks, Operand((m, columns), dtype)

    def operands(self, axes: Axes, dtype: str, cut: Callable[[Operand], "Tensor"]) -> Sequence["Tensor"]:
        (x,) = super().operands(axes, dtype, cut)
        return [x, x + self.ranks.rank]

    def run(self, inputs: Sequence["Tensor"], outputs: Sequence["Tensor"]) -> Sequence["Tensor"]:
        from torch import distributed

        if self.name == "all_reduce":
            return [self.ranks.summed(inputs[1])]
        if self.name == "all_gather":
            return [self.ranks.gathered(inputs[1])]
        # Newer versions of PyTorch have it under another name.
        scatter: Any = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
        rows, columns = inputs[1].shape
        part = inputs[1].new_empty(rows, columns // self.ranks.size)
        scatter(part, inputs[1].view(rows, self.ranks.size, -1).movedim(1, 0).flatten(0, 1), group=self.ranks.group)
        return [part]

    def compare(self, inputs: Sequence["Tensor"], result: Sequence["Tensor"]) -> tuple["Tensor", "Tensor"]:
        import torch

        contributions = torch.stack([(inputs[0] + rank).float() for rank in range(self.ranks.size)])
        if self.name == "all_gather":
            return corners(result[0]), corners(contributions.transpose(0, 1).flatten(1))
        summed = contributions.sum(0)
        expected = summed if self.name == "all_reduce" else summed.chunk(self.ranks.size, -1)[self.ranks.rank]
        return corners(result[0]), corners(expected)


OPERATORS = tuple(map(Collective, ("all_reduce", "all_gather", "reduce_scatter")))
