"""The values of a group: a scale and a zero point for each row, fitted to the weights."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from gac.schemes.base import LARGEST_SCALE

NARROWED = torch.linspace(1, 0.5, 21, dtype=torch.float64).tolist()[1:]
"""Fractions of a group's range that are tried after all of it."""
SMALLEST_SCALE = 2.0**-24
"""The smallest number above 0 in float16."""
BATCH_NUMBERS = 2**25
"""Numbers of a batch of ranges that are compared."""


@dataclass(frozen=True, eq=False)
class IntegerGrid:
    """Values ``scale * (number - zero)`` of some columns; scale and zero have shape ``(..., rows, 1)``.

    Attributes:
        most: the largest number; the least is 0.
    """

    scale: Tensor
    zero: Tensor
    most: int

    def numbers(self, values: Tensor) -> Tensor:
        """Numbers of the nearest grid values to ``(..., rows, columns)``, in their dtype."""
        return (values / self.scale).round_().add_(self.zero).clamp_(0, self.most)

    def nearest(self, values: Tensor) -> Tensor:
        """The nearest grid values to ``(..., rows, columns)``."""
        return self.numbers(values).sub_(self.zero).mul_(self.scale)


def fit_grid(values: Tensor, weights: Tensor, most: int, zero: bool) -> IntegerGrid:
    """The grid of least error for values ``(..., rows, columns)``, float64.

    On a GPU one kernel does it (``gac.schemes.integers.grids_kernel``): here a range takes several passes over memory.

    Args:
        weights: of squared errors, by column, shape ``(..., columns)``.
        most: the largest number.
        zero: with a zero point; without one the range is symmetric.
    """
    if values.is_cuda:
        from gac.schemes.integers.grids_kernel import launch

        return IntegerGrid(*launch(values, weights, most, zero), most)
    low, high = values.amin(-1, keepdim=True).clamp_max(0), values.amax(-1, keepdim=True).clamp_min(0)
    if not zero:
        high = torch.maximum(high, -low)
        low = -high
    best = _grid(low, high, most, zero)
    least = _costs(best, values, weights)
    batch = max(1, BATCH_NUMBERS // max(values.numel(), 1))
    for fractions in torch.split(_other_fractions(most, zero, values.dtype, values.device), batch):
        fractions = fractions.view(-1, *[1] * values.dim())
        grid = _grid(fractions * low, fractions * high, most, zero)
        costs, where = _costs(grid, values, weights).min(0, keepdim=True)
        scale, zeros = (choices.gather(0, where)[0] for choices in (grid.scale, grid.zero))
        better = costs[0] < least
        least = torch.where(better, costs[0], least)
        best = IntegerGrid(torch.where(better, scale, best.scale), torch.where(better, zeros, best.zero), most)
    return best


def in_16_bits(scale: Tensor) -> Tensor:
    """The nearest scales that float16 and bfloat16 both hold, for models of either dtype."""
    return scale.bfloat16().half().to(scale.dtype).clamp_(SMALLEST_SCALE, LARGEST_SCALE)


def range_fractions(most: int, zero: bool) -> list[float]:
    """Fractions of a group's range to try; the first wins where several are as good.

    With a zero point a range of one number more is tried too: a scale that was rounded up may leave one number without
    a value. So a quantised matrix is quantised to itself.
    """
    return [1.0, *([most / (most - 1)] if zero else []), *NARROWED]


@cache
def _other_fractions(most: int, zero: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(range_fractions(most, zero)[1:], dtype=dtype, device=device)


def _costs(grid: IntegerGrid, values: Tensor, weights: Tensor) -> Tensor:
    return (grid.nearest(values) - values).square_() @ weights[..., None]


def _grid(low: Tensor, high: Tensor, most: int, zero: bool) -> IntegerGrid:
    if not zero:  # one number fewer, so that there are as many on both sides
        scale = in_16_bits(2 * high / (most - 1))
        return IntegerGrid(scale, torch.full_like(scale, (most + 1) // 2), most)
    scale = in_16_bits((high - low) / most)
    return IntegerGrid(scale, (-low / scale).round().clamp(0, most), most)
