"""4-bit linear layers: PyTorch's fused kernel, and dequantise-then-multiply.

The layout of nibbles, scales and zeros is that of PyTorch's aten/src/ATen/native/cuda/int4mm.cu (2.6 to 2.13).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gac.profiling.operators import Axes, Operand
from gac.profiling.operators.int4 import uncut
from gac.profiling.timing.runners import Runner, corners, edges

_INNER_TILES = (8, 4, 2)
_TILE = 16
_OFFSET = 8


class Int4Runner(Runner):
    """What both have in common: raw nibbles, scales and zeros, and the check.

    A weight whose k is not whole groups does not exist, so its operands are refused as PyTorch refuses a shape.
    """

    def operands(self, axes: Axes, dtype: str, cut: Callable[[Operand], Tensor]) -> Sequence[Tensor]:
        reason = uncut(axes)
        if reason is not None:
            raise RuntimeError(reason)
        return super().operands(axes, dtype, cut)

    def compare(self, inputs: Sequence[Tensor], result: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        x, nibbles, scales, *_ = inputs
        rows, columns = (edges(len(operand), x.device) for operand in (x, nibbles))
        some = nibbles[columns]
        levels = torch.stack([some >> 4, some & 15], dim=-1).flatten(1).float()
        by_row = scales[:, columns].float().transpose(0, 1)
        weight = (levels.view(len(columns), len(scales), -1) - _OFFSET) * by_row[..., :1] + by_row[..., 1:]
        return corners(result[0]), x[rows].float() @ weight.flatten(1).t()


class FusedInt4Runner(Int4Runner):
    """``torch._weight_int4pack_mm`` on weights packed ahead of the launch.

    The raw nibbles stay among the operands for the check; the kernel reads the packed copy of them.
    """

    devices = ("cuda",)

    def operands(self, axes: Axes, dtype: str, cut: Callable[[Operand], Tensor]) -> Sequence[Tensor]:
        x, nibbles, scales = super().operands(axes, dtype, cut)
        packed = torch._convert_weight_to_int4pack(nibbles, inner_tiles(axes["k"]))
        return [x, nibbles, scales, packed]

    def run(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        x, _, scales, packed = inputs
        return [torch._weight_int4pack_mm(x, packed, x.shape[1] // len(scales), scales)]


class DequantisedInt4Runner(Int4Runner):
    """The weight is unpacked, scaled and written out, all with PyTorch's elementwise operators; then ``torch.mm``."""

    def run(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        x, nibbles, scales = inputs
        weight, result = outputs
        pairs = weight.view(*nibbles.shape, 2)
        pairs[..., 0].copy_(nibbles >> 4)
        pairs[..., 1].copy_(nibbles & 15)
        groups = weight.view(len(weight), len(scales), -1).sub_(_OFFSET)
        by_row = scales.transpose(0, 1)
        torch.addcmul(by_row[..., 1:], groups, by_row[..., :1], out=groups)
        return [torch.mm(x, weight.t(), out=result)]


def inner_tiles(k: int) -> int:
    """The most 16-wide tiles of k that the fused kernel can load at once: 8 (16 bytes a lane) where they divide k."""
    return next((tiles for tiles in _INNER_TILES if k % (tiles * _TILE) == 0), _INNER_TILES[-1])
