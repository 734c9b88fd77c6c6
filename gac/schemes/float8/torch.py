"""Rounding a matrix to 8-bit floating point, with a scale for each row.

Numbers are as dense near every power of two as near any other, so a scale that is twice as large changes nothing but
the smallest ones. What a scale decides is where between two powers the row's numbers lie: so one octave of scales is
tried, from the smallest at which the row's largest number is one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gac.schemes.feedback.levels import Levels
from gac.schemes.feedback.rounding import rounded
from gac.schemes.grid import Grid
from gac.schemes.inputs import Inputs

FLOAT8 = torch.float8_e4m3fn
TINY = torch.finfo(torch.float32).tiny
PARTS = 8
"""Scales of an octave, 4 bits each with the leading one: times a number of 4 bits that is exact in bfloat16. So what is
rounded once is found again as it is, whatever the dtype it is kept in."""


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
        """The matrix ``(rows, columns)`` that they stand for."""
        return (self.numbers.float() * self.scale.float()).to(dtype)


class Floating(Levels):
    """Those of e4m3, on both sides of zero; there are no zero points."""

    most = int(torch.finfo(FLOAT8).max)
    floating = True

    def nearest_(self, units: Tensor) -> Tensor:
        return units.copy_(units.clamp_(-self.most, self.most).float().to(FLOAT8).float())

    def fitted(self, values: Tensor, weighs: Tensor) -> tuple[Tensor, Tensor]:
        scales = _octave(values.abs().amax(-1, keepdim=True) / self.most)
        costs = torch.stack([self._costs(scale, values, weighs) for scale in scales])
        found = torch.stack(scales).gather(0, costs.argmin(0, keepdim=True))[0]
        return found, torch.zeros_like(found)

    def _costs(self, scale: Tensor, values: Tensor, weighs: Tensor) -> Tensor:
        """What rounding costs each row, shape ``(..., rows, 1)``."""
        return (self.nearest_(values / scale).mul_(scale) - values).square_() @ weighs[..., None]


def round_matrix(matrix: Tensor, inputs: Inputs | None, gradients: Tensor | None = None) -> Floats:
    """The matrix ``(rows, columns)`` as it is stored.

    Args:
        inputs: None: every number by itself, in the scale of least error for its row.
        gradients: as for ``gac.schemes.integers.torch.round_matrix``.
    """
    work, levels = matrix.detach().double(), Floating()
    if not matrix.numel():
        return Floats(work.float().to(FLOAT8), torch.ones(len(work), 1, dtype=torch.bfloat16, device=work.device))
    if inputs is not None:
        numbers, scale, _ = rounded(work, inputs, levels, matrix.shape[1], gradients)
    else:
        scale, _ = levels.fitted(work, work.new_ones(matrix.shape[1]))
        numbers = levels.nearest_(work / scale)
    return Floats(numbers.float().to(FLOAT8), scale.bfloat16())


def grid_of(numbers: Tensor, scale: Tensor) -> Grid:
    """Of the numbers ``(rows, columns)`` and scales ``(rows, 1)`` that are stored."""
    wide = scale.float()
    return Grid(numbers.float(), wide, torch.zeros_like(wide), max(numbers.shape[1], 1), Floating())


def _octave(least: Tensor) -> list[Tensor]:
    """Scales of rows of which these are the least that reach the largest numbers, float64, the smallest first."""
    mantissa, exponent = torch.frexp(least.clamp_min(TINY))
    first = (mantissa * 2 * PARTS).ceil_() - PARTS  # from 0 to PARTS, above the power of two below
    found = []
    for part in range(PARTS):
        octaves, within = (first + part).div(PARTS, rounding_mode="floor"), (first + part) % PARTS
        found.append(torch.ldexp((PARTS + within) / (2 * PARTS), exponent + octaves.int()))
    return found
