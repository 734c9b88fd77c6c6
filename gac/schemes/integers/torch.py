"""A matrix as integers, packed into words of 32 bits as ``gac.runtime.storage.packed`` reads them."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gac.runtime.plain.modeling_gac import dequantise, in_parts, unpack
from gac.runtime.storage.packed import WORD, period, words_of
from gac.schemes.feedback.rounding import quantise
from gac.schemes.inputs import Inputs
from gac.schemes.integers.grids import fit_grid
from gac.schemes.integers.levels import IntegerLevels
from gac.schemes.matrices import Grid


@dataclass(frozen=True, eq=False)
class Integers:
    """A matrix as integers: ``scale * (number - zero)``.

    Attributes:
        numbers: uint8, shape ``(rows, columns)``.
        scale: float16, of 8 significant bits, shape ``(rows, groups)``.
        zero: uint8, shape ``(rows, groups)``.
        size: neighbouring columns with one scale; the last group may have fewer.
    """

    numbers: Tensor
    scale: Tensor
    zero: Tensor
    size: int

    @property
    def signed(self) -> Tensor:
        """Numbers of 8 bits less the zero in their middle, int8 ``(rows, columns)``."""
        return (self.numbers.short() - 128).to(torch.int8)

    def values(self, dtype: torch.dtype) -> Tensor:
        """The matrix ``(rows, columns)``, exact in float32, then rounded to the dtype."""
        return dequantise(self.numbers, self.scale, self.zero, self.size, dtype)


def of_grid(grid: Grid) -> Integers:
    """The numbers of a grid in the dtypes of storage."""
    return Integers(grid.numbers.to(torch.uint8), grid.scale.half(), grid.zero.to(torch.uint8), grid.size)


def grid_of_signed(signed: Tensor, scale: Tensor) -> Grid:
    """From ``Integers.signed`` and the scale of each row."""
    zero = torch.full_like(scale, 128, dtype=torch.float32)
    return Grid(signed.float() + 128, scale.float(), zero, max(signed.shape[1], 1), IntegerLevels(255, zero=False))


def quantise_matrix(
    matrix: Tensor, inputs: Inputs | None, bits: int, group: int | None, zero: bool, gradients: Tensor | None = None
) -> Integers:
    """The quantised matrix ``(rows, columns)``.

    Args:
        inputs: None: every number by itself.
        group: columns with one scale; None: all.
        gradients: E[g g^T] of the gradients of its output, shape ``(rows, rows)``; None: errors of all outputs count
            alike, and add up.
    """
    rows, columns = matrix.shape
    size, work = group or max(columns, 1), matrix.detach().double()
    if inputs is not None and matrix.numel():
        numbers, scale, zeros = quantise(work, inputs, IntegerLevels(2**bits - 1, zero), size, gradients)
    else:
        groups = torch.nn.functional.pad(work, (0, -columns % size)).view(rows, -1, size)
        grid = fit_grid(groups, groups.new_ones(size), 2**bits - 1, zero)
        numbers, scale, zeros = grid.numbers(groups), grid.scale[..., 0], grid.zero[..., 0]
        numbers = numbers.reshape(rows, -1)[:, :columns]
    return Integers(numbers.to(torch.uint8), scale.half(), zeros.to(torch.uint8), size)


def packed(integers: Integers, bits: int, zero: bool) -> dict[str, Tensor]:
    """The tensors that hold a matrix, as ``gac.runtime.storage.packed.PackedIntegers`` has them.

    Args:
        bits: of a number and of a zero point.
        zero: store zero points; without, all of them are ``2 ** (bits - 1)``.
    """
    tensors = {"weight_packed": pack(integers.numbers, bits), "weight_scale": integers.scale.contiguous()}
    tensors["weight_shape"] = torch.tensor(integers.numbers.shape, device=integers.scale.device)
    return tensors | ({"weight_zero_point": pack(integers.zero.T, bits).T.contiguous()} if zero else {})


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
