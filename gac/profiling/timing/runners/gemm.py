"""Linear layers: cuBLAS through ``torch.mm``, fp8 through ``torch._scaled_mm``; and a copy."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gac.profiling.timing.runners.base import Result, Runner, corners, edges, joined, single
from gac.runtime.decode_kernel import launch


class LinearRunner(Runner):
    """Both fp8 operands are contiguous along k, as ``_scaled_mm`` asks on Hopper: row-major x, column-major W.T.

    fp8 accumulates as ``_scaled_mm`` does by default, without ``use_fast_accum``.
    """

    def run(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Result:
        x, weight, *scales = inputs
        if not scales:
            return torch.mm(x, weight.t(), out=outputs[0])
        scale_x, scale_weight = scales
        result = outputs[0]
        return torch._scaled_mm(x, weight.t(), scale_x, scale_weight, out_dtype=result.dtype, out=result)

    def compare(self, inputs: Sequence[Tensor], result: Result) -> tuple[Tensor, Tensor]:
        x, weight, *scales = inputs
        rows, columns = (edges(len(operand), x.device) for operand in (x, weight))
        expected = _at(x, rows) @ _at(weight, columns).t()
        if scales:
            expected *= scales[0].expand(len(x), 1)[rows] * scales[1].expand(1, len(weight))[:, columns]
        return corners(single(result)), expected


class LowRankRunner(Runner):
    """Two ``torch.mm`` in a row."""

    def run(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Result:
        x, first, second = inputs
        hidden, result = outputs
        torch.mm(x, first.t(), out=hidden)
        return torch.mm(hidden, second.t(), out=result)

    def compare(self, inputs: Sequence[Tensor], result: Result) -> tuple[Tensor, Tensor]:
        x, first, second = inputs
        rows, columns = (edges(len(operand), x.device) for operand in (x, second))
        hidden = x[rows].float() @ first.float().t()
        return corners(single(result)), hidden @ second[columns].float().t()


class TritonLinearRunner(LinearRunner):
    """One Triton kernel; it needs a GPU."""

    devices = ("cuda",)

    def run(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Result:
        x, weight = inputs
        launch(x, weight, None, outputs[0])
        return outputs[0]


class TritonLowRankRunner(LowRankRunner):
    """Two of them in a row."""

    devices = ("cuda",)

    def run(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Result:
        x, first, second = inputs
        hidden, result = outputs
        launch(x, first, None, hidden)
        launch(hidden, second, None, result)
        return result


class SharedLowRankRunner(Runner):
    """One ``torch.mm`` for the hidden activations of all pairs, then one a pair on its slice of them."""

    def run(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Result:
        x, first, *seconds = inputs
        hidden, *results = outputs
        torch.mm(x, first.t(), out=hidden)
        for part, second, result in zip(hidden.chunk(len(seconds), dim=1), seconds, results, strict=True):
            torch.mm(part, second.t(), out=result)
        return results

    def compare(self, inputs: Sequence[Tensor], result: Result) -> tuple[Tensor, Tensor]:
        x, first, *seconds = inputs
        hidden = x[edges(len(x), x.device)].float() @ first.float().t()
        columns = edges(len(seconds[0]), x.device)
        parts = zip(hidden.chunk(len(seconds), dim=1), seconds, result, strict=True)
        return joined([(corners(given), part @ second[columns].float().t()) for part, second, given in parts])


class CopyRunner(Runner):
    """Multiplies by 1 into another tensor: an elementwise kernel (``Tensor.copy_`` would call the driver's memcpy)."""

    def run(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Result:
        return torch.mul(inputs[0], 1.0, out=outputs[0])

    def compare(self, inputs: Sequence[Tensor], result: Result) -> tuple[Tensor, Tensor]:
        places = edges(len(inputs[0]), inputs[0].device)
        return single(result)[places], inputs[0][places].float()


def _at(operand: Tensor, rows: Tensor) -> Tensor:
    """These rows in float32; as bytes where they are fp8, for indexing has no fp8 kernel on every device."""
    if operand.element_size() == 1:
        return operand.view(torch.uint8)[rows].view(operand.dtype).float()
    return operand[rows].float()
