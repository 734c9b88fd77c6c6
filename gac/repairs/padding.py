"""Tensors with zeros put in: shapes first, then the numbers."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from gac.repairs.seams import Block, Dims
from gac.repairs.stored import Stored


@dataclass(frozen=True)
class Insertion:
    """``count`` zeros along ``axis`` at ``position``."""

    axis: int
    position: int
    count: int


Insertions = Mapping[str, tuple[Insertion, ...]]
"""What goes into each tensor, by name; the axes of one tensor do not depend on each other."""


def insertions(blocks: Iterable[Block], dims: Dims) -> Insertions:
    """What the new dims put in; tensors that stay as they are have no entry."""
    found: dict[str, tuple[Insertion, ...]] = {}
    for seam in (seam for block in blocks for seam in block.seams):
        count = dims[seam.name] - seam.dim
        for place in seam.places if count else ():
            more = tuple(Insertion(place.axis, position, count) for position in place.ends)
            found[place.tensor] = found.get(place.tensor, ()) + more
    return found


def added_bytes(stored: Stored, put_in: Iterable[Insertion]) -> int:
    """By how many bytes a tensor grows."""
    shape = list(stored.shape)
    for one in put_in:
        shape[one.axis] += one.count
    return (prod(shape) - prod(stored.shape)) * stored.dtype.itemsize


def padded(tensor: Tensor, put_in: Iterable[Insertion]) -> Tensor:
    """The tensor with zeros put in; every number of it is kept, bit for bit."""
    for axis in sorted({one.axis for one in put_in}):
        pieces, start = [], 0
        for one in sorted((one for one in put_in if one.axis == axis), key=lambda one: one.position):
            zeros = tensor.new_zeros(*tensor.shape[:axis], one.count, *tensor.shape[axis + 1 :])
            pieces += [tensor.narrow(axis, start, one.position - start), zeros]
            start = one.position
        pieces.append(tensor.narrow(axis, start, tensor.shape[axis] - start))
        tensor = torch.cat(pieces, dim=axis)
    return tensor
