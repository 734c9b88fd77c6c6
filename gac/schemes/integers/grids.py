"""The values of a group: a scale and a zero point for each row, fitted to the weights."""

from functools import cache

import torch
from torch import Tensor

from gac.schemes.base import LARGEST_SCALE, SMALLEST_SCALE

NARROWED = torch.linspace(1, 0.5, 21, dtype=torch.float64).tolist()[1:]
"""Fractions of a group's range that are tried after all of it."""
BATCH_NUMBERS = 2**25
"""Numbers of a batch of ranges that are compared."""


def nearest_numbers(values: Tensor, scale: Tensor, zeros: Tensor, most: int) -> Tensor:
    """Numbers from 0 to ``most`` of the nearest grid values to ``(..., rows, columns)``, in their dtype."""
    return (values / scale).round_().add_(zeros).clamp_(0, most)


def fit_grid(values: Tensor, weights: Tensor, most: int, zero: bool) -> tuple[Tensor, Tensor]:
    """Scales and zero points of least error for values ``(..., rows, columns)``, float64, both ``(..., rows, 1)``.

    On a GPU one kernel does it (``gac.schemes.integers.grids_kernel``): here a range takes several passes over memory.
    Squared errors have ``weights`` by column, ``(..., columns)``. Numbers are from 0 to ``most``; without ``zero``
    (a zero point) the range is symmetric.
    """
    if values.is_cuda:
        from gac.schemes.integers.grids_kernel import launch

        return launch(values, weights, most, zero, range_fractions(most, zero))
    low, high = values.amin(-1, keepdim=True).clamp_max(0), values.amax(-1, keepdim=True).clamp_min(0)
    if not zero:
        high = torch.maximum(high, -low)
        low = -high
    scale, zeros = _grid(low, high, most, zero)
    least = _costs(scale, zeros, values, weights, most)
    batch = max(1, BATCH_NUMBERS // max(values.numel(), 1))
    for fractions in torch.split(_other_fractions(most, zero, values.dtype, values.device), batch):
        fractions = fractions.view(-1, *[1] * values.dim())
        scales, shifts = _grid(fractions * low, fractions * high, most, zero)
        costs, best = _costs(scales, shifts, values, weights, most).min(0, keepdim=True)
        better = costs[0] < least
        least = torch.where(better, costs[0], least)
        scale = torch.where(better, scales.gather(0, best)[0], scale)
        zeros = torch.where(better, shifts.gather(0, best)[0], zeros)
    return scale, zeros


def in_16_bits(scale: Tensor) -> Tensor:
    """The nearest scales that float16 and bfloat16 both hold, for models of either dtype."""
    return scale.bfloat16().half().to(scale.dtype).clamp_(SMALLEST_SCALE, LARGEST_SCALE)


def range_fractions(most: int, zero: bool) -> tuple[float, ...]:
    """Fractions of a group's range to try; the first wins where several are as good.

    With a zero point a range of one number more is tried too: a scale that was rounded up may leave one number without
    a value. So a quantised matrix is quantised to itself.
    """
    return (1.0, *([most / (most - 1)] if zero else []), *NARROWED)


@cache
def _other_fractions(most: int, zero: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(range_fractions(most, zero)[1:], dtype=dtype, device=device)


def _costs(scale: Tensor, zeros: Tensor, values: Tensor, weights: Tensor, most: int) -> Tensor:
    nearest = nearest_numbers(values, scale, zeros, most).sub_(zeros).mul_(scale)
    return (nearest - values).square_() @ weights[..., None]


def _grid(low: Tensor, high: Tensor, most: int, zero: bool) -> tuple[Tensor, Tensor]:
    if not zero:  # one number fewer, so that there are as many on both sides
        scale = in_16_bits(2 * high / (most - 1))
        return scale, torch.full_like(scale, (most + 1) // 2)
    scale = in_16_bits((high - low) / most)
    return scale, (-low / scale).round().clamp(0, most)
