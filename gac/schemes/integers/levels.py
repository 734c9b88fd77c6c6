"""Integers from 0 on, quantised with feedback; then scales and numbers are improved in turn."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gac.schemes.base import SMALLEST_SCALE
from gac.schemes.feedback.levels import Levels, sweep
from gac.schemes.feedback.order import Order
from gac.schemes.integers.grids import fit_grid, in_16_bits, nearest_numbers

ROUNDS = 3
"""Rounds of numbers and scales."""
_TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class IntegerLevels(Levels):
    """From 0 to ``most``.

    Attributes:
        zero: with zero points; without, the zero is in the middle.
    """

    most: int
    zero: bool
    floating: ClassVar[bool] = False

    def nearest_(self, units: Tensor) -> Tensor:
        return units.round_().clamp_(0, self.most)

    def rounded(self, values: Tensor, scale: Tensor, zeros: Tensor) -> Tensor:
        return nearest_numbers(values, scale, zeros, self.most)

    def fitted(self, values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        return fit_grid(values, weights, self.most, self.zero)

    def improved(
        self, order: Order, targets: Tensor, numbers: Tensor, scale: Tensor, zeros: Tensor
    ) -> tuple[Tensor, Tensor]:
        products = _flat(targets) @ order.moment
        for _ in range(ROUNDS):
            numbers = _descend(self, order, targets, numbers, scale, zeros)
            scale = _fit_scales(order.moment, products, numbers, scale, zeros)
        return numbers, scale


def _descend(levels: Levels, order: Order, targets: Tensor, numbers: Tensor, scale: Tensor, zeros: Tensor) -> Tensor:
    moment, numbers = order.moment, numbers.clone()
    diagonal = moment.diagonal()
    slopes = _flat((numbers - zeros) * scale - targets) @ moment  # E A, (rows, columns)
    for group, group_scale in enumerate(scale):
        for part, here in order.layout.parts(group):
            before = numbers[group][:, part]
            units = before - slopes[:, here] / diagonal[here] / group_scale
            factors = -moment[here, here] / diagonal[here]
            swept, errors = sweep(units[None], factors[None], levels, before[None])
            numbers[group][:, part] = swept[0]
            slopes -= (errors[0] * group_scale) @ moment[here]
    return numbers


def _fit_scales(moment: Tensor, products: Tensor, numbers: Tensor, scale: Tensor, zeros: Tensor) -> Tensor:
    """Least squares of each row's scales, rounded to 16 bits; useless ones stay as they were.

    Args:
        products: W A, shape ``(rows, groups * size)``.
    """
    count, _, size = numbers.shape
    signed = numbers - zeros
    flat = _flat(signed)
    right = (products * flat).view(-1, count, size).sum(2)
    square = torch.stack(
        [
            ((part @ moment[group * size : (group + 1) * size]) * flat).view(-1, count, size).sum(2)
            for group, part in enumerate(signed)
        ],
        1,
    )
    level = square.diagonal(dim1=1, dim2=2)
    level += 1e-9 * level.mean(1, keepdim=True) + _TINY
    solved = in_16_bits(torch.linalg.solve(square, right)).T[..., None]
    return torch.where(solved > SMALLEST_SCALE, solved, scale)


def _flat(values: Tensor) -> Tensor:
    """From ``(groups, rows, size)`` to ``(rows, groups * size)``."""
    return values.transpose(0, 1).flatten(1)
