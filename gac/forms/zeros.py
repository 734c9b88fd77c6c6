"""Tensors with zeros put in."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Insertion:
    """``count`` zeros along ``axis`` at ``position``."""

    axis: int
    position: int
    count: int


def with_zeros(tensor: Tensor, put_in: Iterable[Insertion]) -> Tensor:
    """The tensor with zeros put in; every number of it is kept, bit for bit."""
    put_in = list(put_in)
    for axis in sorted({one.axis for one in put_in}):
        pieces, start = [], 0
        for one in sorted((one for one in put_in if one.axis == axis), key=lambda one: one.position):
            zeros = tensor.new_zeros(*tensor.shape[:axis], one.count, *tensor.shape[axis + 1 :])
            pieces += [tensor.narrow(axis, start, one.position - start), zeros]
            start = one.position
        pieces.append(tensor.narrow(axis, start, tensor.shape[axis] - start))
        tensor = torch.cat(pieces, dim=axis)
    return tensor
