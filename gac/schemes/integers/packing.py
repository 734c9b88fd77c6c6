"""Numbers and zero points packed into words of 32 bits, as ``gac.runtime.storage.packed`` reads them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from gac.runtime.plain.modeling_gac import in_parts, unpack
from gac.runtime.storage.packed import WORD, period, words_of
from gac.schemes.grid import Grid
from gac.schemes.integers.torch import Numbers
from gac.schemes.integers.whole import Whole


def packed(found: Numbers, bits: int, zero: bool) -> dict[str, Tensor]:
    """The tensors that hold a matrix, as ``gac.runtime.storage.packed.PackedIntegers`` has them.

    Args:
        bits: of a number and of a zero point.
        zero: whether zero points are stored; without, all of them are ``2 ** (bits - 1)``.
    """
    tensors = {"weight_packed": pack(found.numbers, bits), "weight_scale": found.scale.contiguous()}
    tensors["weight_shape"] = torch.tensor(found.numbers.shape, device=found.scale.device)
    return tensors | ({"weight_zero_point": pack(found.zero.T, bits).T.contiguous()} if zero else {})


def unpacked(held: Mapping[str, Tensor], bits: int, size: int, shape: tuple[int, int]) -> Grid:
    """What ``packed`` has made such tensors of.

    Args:
        size: columns that have one scale.
        shape: rows and columns of the matrix.
    """
    scale, packed_zeros = held["weight_scale"].float(), held.get("weight_zero_point")
    zero = torch.full_like(scale, 1 << bits - 1)
    if packed_zeros is not None:
        zero = unpack(packed_zeros.T, bits, shape[0]).T.float()
    numbers = unpack(held["weight_packed"], bits, shape[1]).float()
    return Grid(numbers, scale, zero, size, Whole((1 << bits) - 1, packed_zeros is not None))


def pack(numbers: Tensor, bits: int) -> Tensor:
    """The words, int32 ``(rows, words)``, of numbers ``(rows, columns)`` from 0 to ``2 ** bits - 1``."""
    columns = numbers.shape[1]
    count, whole = period(bits)
    parts = in_parts(numbers.long(), count)
    words: Tensor = parts.new_zeros(*parts.shape[:2], whole + 1)
    for at in range(count):
        word, shift = divmod(at * bits, WORD)
        words[..., word] |= parts[..., at] << shift & 0xFFFFFFFF
        words[..., word + 1] |= parts[..., at] << shift >> WORD
    found = words[..., :whole].flatten(1)[:, : words_of(columns, bits)]
    return ((found ^ 1 << WORD - 1) - (1 << WORD - 1)).to(torch.int32).contiguous()
