"""Rounding a matrix to 8-bit floating point, with a scale for each row.

Numbers are as dense near every power of two as near any other, so a scale that is twice as large changes nothing but
the smallest ones. What a scale decides is where between two powers the row's numbers lie: so one octave of scales is
tried, from the smallest at which the row's largest number is one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gac.schemes.inputs import Inputs

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max
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


def round_matrix(matrix: Tensor, inputs: Inputs | None) -> Floats:
    """The matrix ``(rows, columns)`` as it is stored: every number the nearest, in the scale of least error.

    Args:
        inputs: the diagonal of their moment says how much the error of a column counts; None: all count alike.
    """
    work = matrix.detach().float()
    weighs = work.new_ones(work.shape[1]) if inputs is None else inputs.moment.diagonal().to(work)
    scales = _octave(work.abs().amax(1, keepdim=True)) if work.shape[1] else [work.new_ones(len(work), 1)]
    best = _nearest(work, scales[0])
    least = _costs(best, work, weighs)
    for scale in scales[1:]:
        found = _nearest(work, scale)
        costs = _costs(found, work, weighs)
        better = costs < least
        least = torch.where(better, costs, least)
        numbers = torch.where(better, found.numbers.view(torch.uint8), best.numbers.view(torch.uint8)).view(FLOAT8)
        best = Floats(numbers, torch.where(better, found.scale, best.scale))
    return best


def _octave(largest: Tensor) -> list[Tensor]:
    """Scales for rows whose largest numbers these are, float32 ``(rows, 1)``, the smallest first."""
    mantissa, exponent = torch.frexp((largest / LARGEST).clamp_min(TINY))
    first = (mantissa * 2 * PARTS).ceil_() - PARTS  # from 0 to PARTS, above the power of two below
    found = []
    for part in range(PARTS):
        octaves, within = (first + part).div(PARTS, rounding_mode="floor"), (first + part) % PARTS
        found.append(torch.ldexp((PARTS + within) / (2 * PARTS), exponent + octaves.int()))
    return found


def _nearest(work: Tensor, scale: Tensor) -> Floats:
    return Floats((work / scale).to(FLOAT8), scale.bfloat16())


def _costs(found: Floats, work: Tensor, weighs: Tensor) -> Tensor:
    """What rounding costs each row, shape ``(rows, 1)``."""
    return ((found.values(work.dtype) - work).square_() @ weighs)[:, None]
