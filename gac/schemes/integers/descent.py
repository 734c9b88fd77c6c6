"""Scales and numbers of a rounded matrix improved in turn, each for the others as they are."""

import torch
from torch import Tensor

from gac.schemes.feedback.levels import Levels
from gac.schemes.feedback.order import Order
from gac.schemes.feedback.sweep import sweep
from gac.schemes.integers.grids import SMALLEST_SCALE, in_16_bits

AGAIN = 3
"""How often each."""
_TINY = torch.finfo(torch.float64).tiny


def improved(
    levels: Levels, order: Order, targets: Tensor, numbers: Tensor, scale: Tensor, zeros: Tensor
) -> tuple[Tensor, Tensor]:
    """See ``Levels.improved``."""
    wanted = _flat(targets) @ order.moment
    for _ in range(AGAIN):
        numbers = _numbers_again(levels, order, targets, numbers, scale, zeros)
        scale = _scales_again(order.moment, wanted, numbers, scale, zeros)
    return numbers, scale


def _numbers_again(
    levels: Levels, order: Order, targets: Tensor, numbers: Tensor, scale: Tensor, zeros: Tensor
) -> Tensor:
    """Coordinate descent: each number in turn to the best that there is for it, all others as they are."""
    moment, numbers = order.moment, numbers.clone()
    diagonal = moment.diagonal()
    felt = _flat((numbers - zeros) * scale - targets) @ moment  # E A, (rows, columns)
    for group, own_scale in enumerate(scale):
        for part, here in order.layout.parts(group):
            before = numbers[group][:, part]
            units = before - felt[:, here] / diagonal[here] / own_scale
            takes = -moment[here, here] / diagonal[here]
            found, errors = sweep(units[None], takes[None], levels, before[None])
            numbers[group][:, part] = found[0]
            felt -= (errors[0] * own_scale) @ moment[here]
    return numbers


def _scales_again(moment: Tensor, wanted: Tensor, numbers: Tensor, scale: Tensor, zeros: Tensor) -> Tensor:
    """Least squares of each row's scales, rounded to 16 bits; those that come out useless stay as they were.

    Args:
        wanted: W A, shape ``(rows, groups * size)``.
    """
    count, _, size = numbers.shape
    signed = numbers - zeros
    flat = _flat(signed)
    right = (wanted * flat).view(-1, count, size).sum(2)
    square = torch.stack(
        [
            ((own @ moment[at * size : (at + 1) * size]) * flat).view(-1, count, size).sum(2)
            for at, own in enumerate(signed)
        ],
        1,
    )
    level = square.diagonal(dim1=1, dim2=2)
    level += 1e-9 * level.mean(1, keepdim=True) + _TINY
    found = in_16_bits(torch.linalg.solve(square, right)).T[..., None]
    return torch.where(found > SMALLEST_SCALE, found, scale)


def _flat(values: Tensor) -> Tensor:
    """From ``(groups, rows, size)`` to ``(rows, groups * size)``."""
    return values.transpose(0, 1).flatten(1)
