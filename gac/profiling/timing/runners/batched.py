"""Batched GEMMs through ``torch.bmm``, and heads of different dims."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gac.profiling.timing.runners.base import Result, Runner, corners, edges, joined


class HeadsRunner(Runner):
    """One ``torch.bmm`` a bucket of heads; heads of one dim are one bucket."""

    def run(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Result:
        for part, weight, result in _buckets(inputs, outputs):
            self.multiply(part, weight, result)
        return outputs

    def multiply(self, x: Tensor, weight: Tensor, result: Tensor) -> None:
        """``x[count, m, k] @ weight[count, dim, k].T`` into the result."""
        torch.bmm(x, weight.transpose(1, 2), out=result)

    def compare(self, inputs: Sequence[Tensor], result: Result) -> tuple[Tensor, Tensor]:
        return joined([_compared(*bucket) for bucket in _buckets(inputs, list(result))])


class SeparateHeadsRunner(HeadsRunner):
    """One ``torch.mm`` a head."""

    def multiply(self, x: Tensor, weight: Tensor, result: Tensor) -> None:
        torch.mm(x[0], weight[0].t(), out=result[0])


def _buckets(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The activations, the weight and the result of every bucket of heads."""
    x, *weights = inputs
    yield from zip(torch.split(x, [len(weight) for weight in weights]), weights, outputs, strict=True)


def _compared(x: Tensor, weight: Tensor, result: Tensor) -> tuple[Tensor, Tensor]:
    heads, rows, columns = (edges(size, x.device) for size in (len(x), x.shape[1], weight.shape[1]))
    return corners(result[heads]), x[heads][:, rows].float() @ weight[heads][:, columns].float().transpose(1, 2)
