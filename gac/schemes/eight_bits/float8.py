"""Scales of rows in 8-bit floating point.

Numbers are as dense near every power of two as near any other, so a scale that is twice as large changes nothing but
the smallest ones. So one octave of scales is tried, from the smallest that reaches the row's largest number.
"""

from abc import abstractmethod

import torch
from torch import Tensor

from gac.schemes.feedback.levels import Levels

FLOAT8 = torch.float8_e4m3fn
TINY = torch.finfo(torch.float32).tiny
PARTS = 8
"""Scales of an octave, 4 bits each with the leading one: times a number of 4 bits that is exact in bfloat16. So a
quantised matrix is quantised to itself, whatever its dtype."""


class FloatLevels(Levels):
    """Those of floating point, on both sides of zero; there are no zero points."""

    @abstractmethod
    def scales(self, least: Tensor) -> list[Tensor]:
        """Scales to try, of which ``least`` just reaches the largest number of a row or group."""

    def rounded(self, values: Tensor, scale: Tensor, zeros: Tensor) -> Tensor:
        return self.nearest_(values / scale)

    def fitted(self, values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        scales = self.scales(values.abs().amax(-1, keepdim=True) / self.most)
        costs = torch.stack([self._costs(scale, values, weights) for scale in scales])
        best = torch.stack(scales).gather(0, costs.argmin(0, keepdim=True))[0]
        return best, torch.zeros_like(best)

    def _costs(self, scale: Tensor, values: Tensor, weights: Tensor) -> Tensor:
        return (self.nearest_(values / scale).mul_(scale) - values).square_() @ weights[..., None]


class Float8Levels(FloatLevels):
    """Those of e4m3."""

    most = int(torch.finfo(FLOAT8).max)
    number = "e4m3"

    def nearest_(self, units: Tensor) -> Tensor:
        return units.copy_(units.clamp_(-self.most, self.most).float().to(FLOAT8).float())

    def scales(self, least: Tensor) -> list[Tensor]:
        return octave(least)


def octave(least: Tensor) -> list[Tensor]:
    """Return the scales of 4 bits from the least one that is no smaller to twice that."""
    mantissa, exponent = torch.frexp(least.clamp_min(TINY))
    first = (mantissa * 2 * PARTS).ceil_() - PARTS  # 0 to PARTS, counted from the power of two below
    scales = []
    for part in range(PARTS):
        octaves, within = (first + part).div(PARTS, rounding_mode="floor"), (first + part) % PARTS
        scales.append(torch.ldexp((PARTS + within) / (2 * PARTS), exponent + octaves.int()))
    return scales
