"""Numbers and zero points packed into words of 32 bits, as ``gac.runtime.packed`` reads them."""

import torch
from torch import Tensor

from gac.runtime.packed import WORD, in_parts, period, words_of
from gac.schemes.integers.torch import Numbers


def packed(found: Numbers, bits: int, zero: bool) -> dict[str, Tensor]:
    """The tensors that hold a matrix, as ``gac.runtime.packed.PackedIntegers`` has them.

    Args:
        bits: of a number and of a zero point.
        zero: whether zero points are stored; without, all of them are ``2 ** (bits - 1)``.
    """
    tensors = {"weight_packed": pack(found.numbers, bits), "weight_scale": found.scale.contiguous()}
    tensors["weight_shape"] = torch.tensor(found.numbers.shape, device=found.scale.device)
    return tensors | ({"weight_zero_point": pack(found.zero.T, bits).T.contiguous()} if zero else {})


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
