"""Scales of groups of numbers in 4-bit floating point.

Numbers are about as dense near every power of two, so one octave of scales is tried, as for 8 bits; of powers of two
that is one scale, and the one below it, which cuts the largest numbers.
"""

from math import frexp, ldexp

import torch
from torch import Tensor

from gac.runtime.plain.modeling_gac import E2M1
from gac.schemes.eight_bits.float8 import FLOAT8, TINY, FloatLevels, octave
from gac.schemes.matrices import Grid

_OCTAVES = 10
"""Between the largest scale of a matrix and the smallest. e4m3 has 13 with all of its digits; three are left for groups
that grow, as they compensate for the errors of others."""
_LARGEST = 128.0
"""The largest power of two below which e4m3 has all of its digits; the next octave lacks its last number."""
_BIAS = 127
"""The exponent of a power of two is stored with so much more."""


class Float4Levels(FloatLevels):
    """Those of e2m1.

    Args:
        power: scales are powers of two.
        least: the smallest scale.
    """

    most = 6
    number = "e2m1"

    def __init__(self, power: bool, least: float = TINY) -> None:
        self._power, self._least = power, least

    def nearest_(self, units: Tensor) -> Tensor:
        size = units.abs().clamp_(max=self.most)
        step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
        return units.copy_(torch.copysign((size / step).round_().mul_(step), units))

    def scales(self, least: Tensor) -> list[Tensor]:
        power = torch.exp2(least.clamp_min(TINY).log2().ceil())
        return [scale.clamp_min(self._least) for scale in ((power, power / 2) if self._power else octave(least))]


def levels_for(matrix: Tensor, power: bool) -> Float4Levels:
    """Return the levels of a matrix, whose smallest scale can be stored beside its largest."""
    largest = float(matrix.detach().abs().max()) / Float4Levels.most if matrix.numel() else 0.0
    return Float4Levels(power, max(_power_below(largest) / 2**_OCTAVES, TINY))


def _power_below(number: float) -> float:
    return ldexp(1.0, frexp(max(number, TINY))[1] - 1)


def packed(grid: Grid, power: bool) -> dict[str, Tensor]:
    """Return the tensors of ``Floats4`` that hold a matrix."""
    rows, columns = grid.numbers.shape
    levels = torch.tensor(E2M1, device=grid.numbers.device)
    codes = torch.searchsorted(levels, grid.numbers.abs()) + 8 * (grid.numbers < 0)
    codes = torch.nn.functional.pad(codes.to(torch.uint8), (0, columns % 2))
    tensors = {"weight_packed": codes[:, ::2] | codes[:, 1::2] << 4}
    if power:
        return tensors | {"weight_scale": (grid.scale.log2().round() + _BIAS).to(torch.uint8)}
    unit = _power_below(float(grid.scale.max()) if grid.scale.numel() else 1.0) / _LARGEST
    by_row = torch.full((rows, min(columns, 1)), unit, device=grid.numbers.device)
    return tensors | {"weight_scale": (grid.scale / unit).to(FLOAT8), "weight_global_scale": by_row}
