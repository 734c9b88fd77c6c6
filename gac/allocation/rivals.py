"""Candidates of a site that are there already, by which others are left out before they are made."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from math import prod

import numpy as np

from gac.allocation.beaten import Beaters
from gac.allocation.pareto import Mask, front
from gac.core.arrays import Floats, Ints

_FEW, _MANY = 1 << 12, 1 << 18
_BLOCK, _BLOCKS = 4, 1 << 11


@dataclass(frozen=True, eq=False)
class Rivals:
    """Whole candidates, in the criteria that are compared: loss, and what is limited.

    Attributes:
        parts: criteria of each set of candidates, shape ``(rows, criteria)``.
    """

    parts: tuple[Floats, ...] = ()

    def joined_by(self, *parts: Floats) -> "Rivals":
        """These and more."""
        return Rivals((*self.parts, *parts))

    @cached_property
    def _best(self) -> Beaters:
        rows = np.concatenate(self.parts)
        return Beaters(rows[front(rows)])

    def unbeaten(self, options: Sequence[Floats], besides: Floats) -> list[Ints] | None:
        """The combinations of options, one of each, that no rival beats; equals stay, to be told apart later.

        Branch and bound: the options of each weight stand in blocks of much the same loss. Where a rival beats the
        least that a block of each has in every criterion, it beats every combination of theirs. What is left goes on
        in smaller blocks. Sums are taken in the order in which those of candidates are, so that no bound is larger in
        floats either.

        Args:
            options: criteria of each weight's options.
            besides: what each combination has in addition.

        Returns:
            Positions in each of the options, in lexicographic order; or None where there are no rivals, or so few
            combinations, or so many that no rival beats, that this would take longer than to combine one by one.
        """
        if not self.parts or prod(map(len, options)) < _FEW:
            return None
        orders = [np.argsort(rows[:, _loss_at(rows)], kind="stable") for rows in options]
        ranged = [rows[order] for rows, order in zip(options, orders, strict=True)]
        sizes = [_first_size(ranged)] * len(options)
        found = list(np.indices([-(-len(rows) // sizes[0]) for rows in ranged]).reshape(len(ranged), -1))
        least = [_least(rows, sizes[0]) for rows in ranged]
        found = self._kept(found, least, besides)
        while max(sizes) > 1:
            for at, rows in enumerate(ranged):
                found = _split(found, at, -(-len(rows) // (sizes[at] // _BLOCK)))
                if len(found[at]) > _MANY:
                    return None
                sizes[at] //= _BLOCK
                least[at] = _least(rows, sizes[at])
                found = self._kept(found, least, besides)
        positions = [order[at] for order, at in zip(orders, found, strict=True)]
        ranks = np.lexsort(positions[::-1])
        return [at[ranks] for at in positions]

    def _kept(self, found: Sequence[Ints], least: Sequence[Floats], besides: Floats) -> list[Ints]:
        """The combinations of blocks that no rival beats."""
        bound: Floats = reduce(np.add, [rows[at] for rows, at in zip(least, found, strict=True)]) + besides
        kept: Mask = ~self._best.beat(bound)
        return [at[kept] for at in found]


def _loss_at(criteria: Floats) -> int:
    """The column of the loss: the first limit comes before it."""
    return min(1, int(criteria.shape[1]) - 1)


def _first_size(options: Sequence[Floats]) -> int:
    """How many options make a block at first, so that there are not too many combinations of blocks."""
    size = _BLOCK
    while prod(-(-len(rows) // size) for rows in options) > _BLOCKS:
        size *= _BLOCK
    return size


def _least(rows: Floats, size: int) -> Floats:
    """The least of each criterion in every block of so many rows."""
    found: Floats = np.minimum.reduceat(rows, np.arange(0, len(rows), size))
    return found


def _split(found: Sequence[Ints], at: int, count: int) -> list[Ints]:
    """The same combinations, with each block of one option in ``_BLOCK`` smaller ones, of which there are ``count``."""
    inside = (found[at][:, None] * _BLOCK + np.arange(_BLOCK)).ravel()
    exists = inside < count
    return [(inside if one == at else np.repeat(blocks, _BLOCK))[exists] for one, blocks in enumerate(found)]
