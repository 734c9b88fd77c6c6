"""Tensors with zeros put in: shapes first, then the numbers."""

from collections.abc import Iterable, Mapping
from math import prod

from gac.forms.zeros import Insertion
from gac.repairs.seams import Block, Dims
from gac.repairs.stored import Stored

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
