"""Scales of groups of numbers in 4-bit floating point.

Numbers are about as dense near every power of two, so one octave of scales is tried, as for 8 bits; of powers of two
that is one scale, and the one below it, which cuts the largest numbers.
"""

import torch
from torch import Tensor

from gac.runtime.plain.modeling_gac import E2M1
from gac.schemes.eight_bits.float8 import FLOAT8, TINY, octave
from gac.schemes.feedback.levels import Levels
from gac.schemes.matrices import Grid

_OCTAVES = 13
"""Between the largest scale of a matrix and the smallest: e4m3 has so many with all of its digits."""
_LARGEST = 128.0
"""The largest power of two below which e4m3 has all of its digits; the next octave lacks its last number."""
_BIAS = 127
"""The exponent of a power of two is stored with so much more."""


class Float4Levels(Levels):
    """Those of e2m1, on both sides of zero; there are no zero points.

    Args:
        power: scales are powers of two.
        least: the smallest scale.
    """

    most = 6
    number = "e2m1"

    def __init__(self, power: bool, least: float) -> None:
        self._power, self._least = power, least

    def nearest_(self, units: Tensor) -> Tensor:
        size = units.abs().clamp_(max=self.most)
        step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
        return units.copy_(torch.copysign((size / step).round_().mul_(step), units))

    def rounded(self, values: Tensor, scale: Tensor, zeros: Tensor) -> Tensor:
        return self.nearest_(values / scale)

    def fitted(self, values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        least = values.abs().amax(-1, keepdim=True) / self.most
        if self._power:
            power = torch.exp2(least.clamp_min(TINY).log2().ceil())
            scales = [power, power / 2]
        else:
            scales = octave(least)
        scales = [scale.clamp_min(self._least) for scale in scales]
        costs = torch.stack([self._costs(scale, values, weights) for scale in scales])
        best = torch.stack(scales).gather(0, costs.argmin(0, keepdim=True))[0]
        return best, torch.zeros_like(best)

    def _costs(self, scale: Tensor, values: Tensor, weights: Tensor) -> Tensor:
        return (self.nearest_(values / scale).mul_(scale) - values).square_() @ weights[..., None]


def levels_for(matrix: Tensor, power: bool) -> Float4Levels:
    """Return the levels of a matrix, whose smallest scale can be stored beside its largest."""
    largest = float(matrix.detach().abs().max()) / Float4Levels.most if matrix.numel() else 0.0
    exponent = torch.tensor(max(largest, TINY)).log2().floor().item()
    return Float4Levels(power, 2.0 ** max(exponent - _OCTAVES, -126))


def packed(grid: Grid, power: bool) -> dict[str, Tensor]:
    """Return the tensors of ``Floats4`` that hold a matrix."""
    rows, columns = grid.numbers.shape
    levels = torch.tensor(E2M1, device=grid.numbers.device)
    codes = torch.searchsorted(levels, grid.numbers.abs()) + 8 * (grid.numbers < 0)
    codes = torch.nn.functional.pad(codes.to(torch.uint8), (0, columns % 2))
    tensors = {"weight_packed": codes[:, ::2] | codes[:, 1::2] << 4}
    if power:
        return tensors | {"weight_scale": (grid.scale.log2().round() + _BIAS).to(torch.uint8)}
    largest = float(grid.scale.max()) if grid.scale.numel() else 1.0
    unit = 2.0 ** torch.tensor(largest).log2().floor().item() / _LARGEST
    by_row = torch.full((rows, min(columns, 1)), unit, device=grid.numbers.device)
    return tensors | {"weight_scale": (grid.scale / unit).to(FLOAT8), "weight_global_scale": by_row}
