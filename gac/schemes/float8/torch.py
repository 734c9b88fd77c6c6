"""Quantising a matrix to 8-bit floating point, with a scale for each row.

Numbers are as dense near every power of two as near any other, so a scale that is twice as large changes nothing but
the smallest ones. So one octave of scales is tried, from the smallest that reaches the row's largest number.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gac.schemes.feedback.levels import Levels
from gac.schemes.feedback.rounding import quantise
from gac.schemes.inputs import Inputs
from gac.schemes.matrices import Grid

FLOAT8 = torch.float8_e4m3fn
TINY = torch.finfo(torch.float32).tiny
PARTS = 8
"""Scales of an octave, 4 bits each with the leading one: times a number of 4 bits that is exact in bfloat16. So a
quantised matrix is quantised to itself, whatever its dtype."""


@dataclass(frozen=True, eq=False)
class Floats:
    """A matrix as 8-bit floating point: ``scale * number``.

    Attributes:
        numbers: float8_e4m3fn, shape ``(rows, columns)``.
        scale: bfloat16, shape ``(rows, 1)``.
    """

    numbers: Tensor
    scale: Tensor

    def values(self, dtype: torch.dtype) -> Tensor:
        """The matrix ``(rows, columns)``."""
        return (self.numbers.float() * self.scale.float()).to(dtype)


class Float8Levels(Levels):
    """Those of e4m3, on both sides of zero; there are no zero points."""

    most = int(torch.finfo(FLOAT8).max)
    floating = True

    def nearest_(self, units: Tensor) -> Tensor:
        return units.copy_(units.clamp_(-self.most, self.most).float().to(FLOAT8).float())

    def fitted(self, values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        scales = _octave(values.abs().amax(-1, keepdim=True) / self.most)
        costs = torch.stack([self._costs(scale, values, weights) for scale in scales])
        best = torch.stack(scales).gather(0, costs.argmin(0, keepdim=True))[0]
        return best, torch.zeros_like(best)

    def _costs(self, scale: Tensor, values: Tensor, weights: Tensor) -> Tensor:
        return (self.nearest_(values / scale).mul_(scale) - values).square_() @ weights[..., None]


def quantise_matrix(matrix: Tensor, inputs: Inputs | None, gradients: Tensor | None = None) -> Floats:
    """The quantised matrix ``(rows, columns)``.

    Args:
        inputs: None: every number by itself, in the scale of least error for its row.
        gradients: as for ``gac.schemes.integers.torch.quantise_matrix``.
    """
    work, levels = matrix.detach().double(), Float8Levels()
    if not matrix.numel():
        return Floats(work.float().to(FLOAT8), torch.ones(len(work), 1, dtype=torch.bfloat16, device=work.device))
    if inputs is not None:
        numbers, scale, _ = quantise(work, inputs, levels, matrix.shape[1], gradients)
    else:
        scale, _ = levels.fitted(work, work.new_ones(matrix.shape[1]))
        numbers = levels.nearest_(work / scale)
    return Floats(numbers.float().to(FLOAT8), scale.bfloat16())


def grid_of(numbers: Tensor, scale: Tensor) -> Grid:
    """From stored numbers ``(rows, columns)`` and scales ``(rows, 1)``."""
    wide = scale.float()
    return Grid(numbers.float(), wide, torch.zeros_like(wide), max(numbers.shape[1], 1), Float8Levels())


def _octave(least: Tensor) -> list[Tensor]:
    mantissa, exponent = torch.frexp(least.clamp_min(TINY))
    first = (mantissa * 2 * PARTS).ceil_() - PARTS  # 0 to PARTS, counted from the power of two below
    scales = []
    for part in range(PARTS):
        octaves, within = (first + part).div(PARTS, rounding_mode="floor"), (first + part) % PARTS
        scales.append(torch.ldexp((PARTS + within) / (2 * PARTS), exponent + octaves.int()))
    return scales
