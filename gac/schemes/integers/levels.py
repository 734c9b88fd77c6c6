"""Integers from 0 on: quantised with feedback, then scales and numbers improved in turn; packed into words."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gac.runtime.plain.modeling_gac import in_parts, unpack
from gac.runtime.storage.packed import WORD, period, words_of
from gac.schemes.base import SMALLEST_SCALE
from gac.schemes.feedback.levels import Levels, sweep
from gac.schemes.feedback.order import Order
from gac.schemes.integers.grids import fit_grid, in_16_bits, nearest_numbers
from gac.schemes.matrices import Grid

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

    ``products`` are W A, shape ``(rows, groups * size)``.
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
    return values.transpose(0, 1).flatten(1)


def packed(grid: Grid, bits: int, zero: bool) -> dict[str, Tensor]:
    """The tensors that hold a matrix, as ``gac.runtime.storage.packed.PackedIntegers`` has them.

    Without ``zero`` all zero points are ``2 ** (bits - 1)``, and none are stored.
    """
    tensors = {"weight_packed": pack(grid.numbers, bits), "weight_scale": grid.scale.half().contiguous()}
    tensors["weight_shape"] = torch.tensor(grid.numbers.shape, device=grid.scale.device)
    return tensors | ({"weight_zero_point": pack(grid.zero.T, bits).T.contiguous()} if zero else {})


def unpacked(tensors: Mapping[str, Tensor], bits: int, size: int, shape: tuple[int, int]) -> Grid:
    """The matrix ``(rows, columns)`` in tensors from ``packed``; ``size`` columns have one scale."""
    scale, packed_zeros = tensors["weight_scale"].float(), tensors.get("weight_zero_point")
    zero = torch.full_like(scale, 1 << bits - 1)
    if packed_zeros is not None:
        zero = unpack(packed_zeros.T, bits, shape[0]).T.float()
    numbers = unpack(tensors["weight_packed"], bits, shape[1]).float()
    return Grid(numbers, scale, zero, size, IntegerLevels((1 << bits) - 1, packed_zeros is not None))


def pack(numbers: Tensor, bits: int) -> Tensor:
    """The words, int32 ``(rows, words)``, of numbers ``(rows, columns)`` from 0 to ``2 ** bits - 1``."""
    columns = numbers.shape[1]
    count, period_words = period(bits)
    parts = in_parts(numbers.long(), count)
    words: Tensor = parts.new_zeros(*parts.shape[:2], period_words + 1)
    for index in range(count):
        word, shift = divmod(index * bits, WORD)
        words[..., word] |= parts[..., index] << shift & 0xFFFFFFFF
        words[..., word + 1] |= parts[..., index] << shift >> WORD
    unsigned = words[..., :period_words].flatten(1)[:, : words_of(columns, bits)]
    return ((unsigned ^ 1 << WORD - 1) - (1 << WORD - 1)).to(torch.int32).contiguous()
