"""The numbers that a group can be: a scale and a zero point for each row, fitted to the values."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from gac.schemes.integers.spec import LARGEST_SCALE

NARROWED = torch.linspace(1, 0.5, 21, dtype=torch.float64).tolist()[1:]
"""Parts of a group's range that are tried after all of it."""
AT_ONCE = 2**25
"""Numbers that are rounded at once to see which range is best."""
SMALLEST_SCALE = 2.0**-24
"""float16 holds no smaller number above 0."""


@dataclass(frozen=True, eq=False)
class Grid:
    """What some columns can be: ``scale * (number - zero)``, each a number a row, shape ``(..., rows, 1)``.

    Attributes:
        most: the largest number; the least is 0.
    """

    scale: Tensor
    zero: Tensor
    most: int

    def numbers(self, values: Tensor) -> Tensor:
        """Of the nearest that there are, of values ``(..., rows, columns)``, in their dtype."""
        return (values / self.scale).round_().add_(self.zero).clamp_(0, self.most)

    def nearest(self, values: Tensor) -> Tensor:
        """The nearest that there is, of values ``(..., rows, columns)``."""
        return self.numbers(values).sub_(self.zero).mul_(self.scale)


def fitted(values: Tensor, weighs: Tensor, most: int, zero: bool) -> Grid:
    """The grid of least error for values ``(..., rows, columns)``, float64.

    On a GPU one kernel does it (``gac.schemes.integers.grids_kernel``): here every range is several passes over memory.

    Args:
        weighs: how much a squared error counts, by column, shape ``(..., columns)``.
        most: the largest number.
        zero: whether there is a zero point; without one the range is as long on both sides of zero.
    """
    if values.is_cuda:
        from gac.schemes.integers.grids_kernel import launch

        return Grid(*launch(values, weighs, most, zero), most)
    low, high = values.amin(-1, keepdim=True).clamp_max(0), values.amax(-1, keepdim=True).clamp_min(0)
    if not zero:
        high = torch.maximum(high, -low)
        low = -high
    best = _grid(low, high, most, zero)
    least = _costs(best, values, weighs)
    at_once = max(1, AT_ONCE // max(values.numel(), 1))
    for parts in torch.split(_others(most, zero, values.dtype, values.device), at_once):
        several = parts.view(-1, *[1] * values.dim())
        grid = _grid(several * low, several * high, most, zero)
        costs, where = _costs(grid, values, weighs).min(0, keepdim=True)
        scale, zeros = (one.gather(0, where)[0] for one in (grid.scale, grid.zero))
        better = costs[0] < least
        least = torch.where(better, costs[0], least)
        best = Grid(torch.where(better, scale, best.scale), torch.where(better, zeros, best.zero), most)
    return best


def in_16_bits(scale: Tensor) -> Tensor:
    """Scales to the nearest that float16 and bfloat16 both hold, so that a model of either dtype takes them."""
    return scale.bfloat16().half().to(scale.dtype).clamp_(SMALLEST_SCALE, LARGEST_SCALE)


def parts_of(most: int, zero: bool) -> list[float]:
    """Parts of a group's range to try; the first wins where several are as good.

    With a zero point a range of one number more is tried too: a scale that was rounded up may leave one number without
    a value. So what is rounded once is found again as it is.
    """
    return [1.0, *([most / (most - 1)] if zero else []), *NARROWED]


@cache
def _others(most: int, zero: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(parts_of(most, zero)[1:], dtype=dtype, device=device)


def _costs(grid: Grid, values: Tensor, weighs: Tensor) -> Tensor:
    """What rounding to the grid costs each row, shape ``(..., rows, 1)``."""
    return (grid.nearest(values) - values).square_() @ weighs[..., None]


def _grid(low: Tensor, high: Tensor, most: int, zero: bool) -> Grid:
    """With a scale that 16 bits hold."""
    if not zero:  # one number fewer, so that there are as many on both sides
        scale = in_16_bits(2 * high / (most - 1))
        return Grid(scale, torch.full_like(scale, (most + 1) // 2), most)
    scale = in_16_bits((high - low) / most)
    return Grid(scale, (-low / scale).round().clamp(0, most), most)
