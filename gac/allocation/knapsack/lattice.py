"""What divisors of the costs tell under one limit: how much of it a partial choice is bound to leave unused."""

from dataclasses import dataclass
from math import gcd

import numpy as np

from gac.arrays import Ints

_DOWN = 1 - 2.0**-50
_LARGEST = 2.0**61
_MOST_KINDS = 8


@dataclass(frozen=True, eq=False)
class Lattice:
    """One limit, and what leaving a unit of it unused costs.

    If every cost that can still be added is a multiple of ``step``, what a partial choice leaves unused in the end
    is what it leaves now, modulo ``step``, or more; and a choice that leaves ``unused`` has a value of at least the
    bound, plus its reduced values, plus ``multiplier * unused``.

    Attributes:
        free: what the default choice leaves of the limit; negative where it breaks it.
        multiplier: the bound's.
    """

    free: int
    multiplier: float

    def wasted(self, costs: Ints, step: int) -> Ints:
        """Value that partial choices with these costs are bound to lose, for it is so much above the bound at least."""
        unused = (self.free - costs) % step
        wasted: Ints = np.minimum(unused * self.multiplier * _DOWN, _LARGEST).astype(np.int64)
        return wasted

    def wide(self, step: int, room: int) -> bool:
        """Whether the step is so long that most partial choices would waste more than the room there is."""
        return step * self.multiplier >= 2 * room


def by_divisor(divisors: Ints, hardness: Ints) -> tuple[list[int], list[int]]:
    """An order of the groups in which the greatest common divisor of those still to come is soon a large one.

    From the end: the commonest divisor, before it the one that has most in common with it, and so on through the few
    commonest, then the others; among equals those with the largest ``hardness`` first.

    Returns:
        The order, and the greatest common divisor of the groups from each place on (0 past the end).
    """
    kinds, counts = np.unique(divisors, return_counts=True)
    common = np.argsort(-counts, kind="stable")[:_MOST_KINDS]
    left = dict(zip(kinds[common].tolist(), counts[common].tolist(), strict=True))
    place, shared = np.zeros(len(divisors), dtype=np.int64), 0
    while left:
        kind = max(left, key=lambda one: (gcd(shared, one) if shared else 0, left[one]))
        shared = gcd(shared, kind)
        place[divisors == kind] = len(left)
        del left[kind]
    order = np.lexsort((-hardness, place))
    coming = np.gcd.accumulate(divisors[order][::-1])[::-1]
    return order.tolist(), [*coming.tolist(), 0]
