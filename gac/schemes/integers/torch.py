"""A matrix as integers, packed into words of 32 bits as ``gac.runtime.storage.packed`` reads them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from gac.runtime.plain.modeling_gac import in_parts, unpack
from gac.runtime.storage.packed import WORD, period, words_of
from gac.schemes.integers.levels import IntegerLevels
from gac.schemes.matrices import Grid


def packed(grid: Grid, bits: int, zero: bool) -> dict[str, Tensor]:
    """The tensors that hold a matrix, as ``gac.runtime.storage.packed.PackedIntegers`` has them.

    Args:
        bits: of a number and of a zero point.
        zero: store zero points; without, all of them are ``2 ** (bits - 1)``.
    """
    tensors = {"weight_packed": pack(grid.numbers, bits), "weight_scale": grid.scale.half().contiguous()}
    tensors["weight_shape"] = torch.tensor(grid.numbers.shape, device=grid.scale.device)
    return tensors | ({"weight_zero_point": pack(grid.zero.T, bits).T.contiguous()} if zero else {})


def unpacked(tensors: Mapping[str, Tensor], bits: int, size: int, shape: tuple[int, int]) -> Grid:
    """The matrix in tensors from ``packed``.

    Args:
        size: columns with one scale.
        shape: rows and columns of the matrix.
    """
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
