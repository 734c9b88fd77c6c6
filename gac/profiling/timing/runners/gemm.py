"""Linear layers: cuBLAS through ``torch.mm`` and ``torch.bmm``, fp8 through ``torch._scaled_mm``; and a copy."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gac.profiling.timing.runners import Runner, corners, edges, joined


class LinearRunner(Runner):
    """Both fp8 operands are contiguous along k, as ``_scaled_mm`` asks on Hopper: row-major x, column-major W.T.

    fp8 accumulates as ``_scaled_mm`` does by default, without ``use_fast_accum``.
    """

    def run(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        (x, weight, *scales), (result,) = inputs, outputs
        if scales:
            torch._scaled_mm(x, weight.t(), scales[0], scales[1], out_dtype=result.dtype, out=result)
        else:
            self.multiply(x, weight, result)
        return outputs

    def multiply(self, x: Tensor, weight: Tensor, result: Tensor) -> None:
        """``x @ weight.T`` into the result."""
        torch.mm(x, weight.t(), out=result)

    def compare(self, inputs: Sequence[Tensor], result: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        x, weight, *scales = inputs
        rows, columns = (edges(len(operand), x.device) for operand in (x, weight))
        expected = _at(x, rows) @ _at(weight, columns).t()
        if scales:
            expected *= scales[0].expand(len(x), 1)[rows] * scales[1].expand(1, len(weight))[:, columns]
        return corners(result[0]), expected


class LowRankRunner(LinearRunner):
    """One GEMM for the hidden activations of all pairs of one input, then one a pair on its slice of them."""

    def run(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        x, first, *seconds = inputs
        hidden, *results = outputs
        self.multiply(x, first, hidden)
        for part, second, result in zip(hidden.chunk(len(seconds), dim=1), seconds, results, strict=True):
            self.multiply(part, second, result)
        return results

    def compare(self, inputs: Sequence[Tensor], result: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        x, first, *seconds = inputs
        hidden = x[edges(len(x), x.device)].float() @ first.float().t()
        columns = edges(len(seconds[0]), x.device)
        parts = zip(hidden.chunk(len(seconds), dim=1), seconds, result, strict=True)
        return joined([(corners(given), part @ second[columns].float().t()) for part, second, given in parts])


class HeadsRunner(Runner):
    """One ``torch.bmm`` a bucket of heads; heads of one dim are one bucket."""

    def run(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        for part, weight, result in _buckets(inputs, outputs):
            self.multiply(part, weight, result)
        return outputs

    def multiply(self, x: Tensor, weight: Tensor, result: Tensor) -> None:
        """``x[count, m, k] @ weight[count, dim, k].T`` into the result."""
        torch.bmm(x, weight.transpose(1, 2), out=result)

    def compare(self, inputs: Sequence[Tensor], result: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return joined([_compared(*bucket) for bucket in _buckets(inputs, result)])


class SeparateHeadsRunner(HeadsRunner):
    """One ``torch.mm`` a head."""

    def multiply(self, x: Tensor, weight: Tensor, result: Tensor) -> None:
        torch.mm(x[0], weight[0].t(), out=result[0])


class CopyRunner(Runner):
    """Multiplies by 1 into another tensor: an elementwise kernel (``Tensor.copy_`` would call the driver's memcpy)."""

    def run(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        torch.mul(inputs[0], 1.0, out=outputs[0])
        return outputs

    def compare(self, inputs: Sequence[Tensor], result: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        places = edges(len(inputs[0]), inputs[0].device)
        return result[0][places], inputs[0][places].float()


def _at(operand: Tensor, rows: Tensor) -> Tensor:
    """These rows in float32; as bytes where they are fp8, for indexing has no fp8 kernel on every device."""
    if operand.element_size() == 1:
        return operand.view(torch.uint8)[rows].view(operand.dtype).float()
    return operand[rows].float()


def _buckets(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The activations, the weight and the result of every bucket of heads."""
    x, *weights = inputs
    yield from zip(torch.split(x, [len(weight) for weight in weights]), weights, outputs, strict=True)


def _compared(x: Tensor, weight: Tensor, result: Tensor) -> tuple[Tensor, Tensor]:
    heads, rows, columns = (edges(size, x.device) for size in (len(x), x.shape[1], weight.shape[1]))
    return corners(result[heads]), x[heads][:, rows].float() @ weight[heads][:, columns].float().transpose(1, 2)
