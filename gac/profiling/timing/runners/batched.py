"""Batched GEMMs through ``torch.bmm``, and heads of different dims."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gac.profiling.timing.runners.base import Result, Runner, corners, edges, joined, single


class BatchedRunner(Runner):
    """One ``torch.bmm``."""

    def run(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Result:
        x, weight = inputs
        return torch.bmm(x, weight.transpose(1, 2), out=outputs[0])

    def compare(self, inputs: Sequence[Tensor], result: Result) -> tuple[Tensor, Tensor]:
        x, weight = inputs
        batches = edges(len(x), x.device)
        return corners(single(result)[batches]), _reference(x[batches], weight[batches])


class HeadsRunner(Runner):
    """One ``torch.bmm`` a bucket of heads."""

    def run(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Result:
        for part, weight, result in _buckets(inputs, outputs):
            self.multiply(part, weight, result)
        return outputs

    def multiply(self, x: Tensor, weight: Tensor, result: Tensor) -> None:
        """``x[count, m, k] @ weight[count, dim, k].T`` into the result."""
        torch.bmm(x, weight.transpose(1, 2), out=result)

    def compare(self, inputs: Sequence[Tensor], result: Result) -> tuple[Tensor, Tensor]:
        return joined([(corners(given), _reference(x, weight)) for x, weight, given in _buckets(inputs, list(result))])


class SeparateHeadsRunner(HeadsRunner):
    """One ``torch.mm`` a head."""

    def multiply(self, x: Tensor, weight: Tensor, result: Tensor) -> None:
        torch.mm(x[0], weight[0].t(), out=result[0])


def _buckets(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The activations, the weight and the result of every bucket of heads."""
    x, *weights = inputs
    yield from zip(torch.split(x, [len(weight) for weight in weights]), weights, outputs, strict=True)


def _reference(x: Tensor, weight: Tensor) -> Tensor:
    rows, columns = edges(x.shape[1], x.device), edges(weight.shape[1], x.device)
    return x[:, rows].float() @ weight[:, columns].float().transpose(1, 2)
