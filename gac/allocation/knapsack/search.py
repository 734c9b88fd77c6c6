"""The proof: widen the search round the bound until what it finds, or fails to find, settles the optimum."""

from dataclasses import dataclass

import numpy as np

from gac.allocation.knapsack.bounds import Bound
from gac.allocation.knapsack.core import better
from gac.allocation.knapsack.ragged import Ragged
from gac.sites import Ints

_FIRST, _FINEST = 24, 16
_BEAMS = 4
_GROWTH, _SLOW_GROWTH, _DEAR = 1.3, 1.1, 1 << 16


@dataclass(frozen=True, eq=False)
class Outcome:
    """The best choice found, its value, a proved lower bound, and how many items the last search was left with."""

    choice: Ints
    value: int
    lower: int
    core: int


def settle(items: Ragged, bound: Bound, choice: Ints, seconds: float) -> Outcome:
    """Search ever wider margins above the bound; where ``value`` and ``lower`` come out equal, the choice is optimal.

    A choice with a value below ``bound.lower + margin`` consists of items whose reduced values are below the margin
    (reduced-cost fixing), so searching those alone decides whether there is one. Margins grow until one
    holds the optimum or reaches the best known value. A search that had to leave something out proves nothing; then a
    beam search below the best known value may still find a better choice, which can bring the margin back within reach.
    """
    value, lower = _value(items, choice), bound.lower
    margin, core, beams = _first_margin(items, bound, value), 0, _BEAMS
    while lower < value and beams:
        target = min(value, bound.lower + margin)
        near = bound.reduced < target - bound.lower
        part, core = items.keep(near), int(near.sum())
        found = better(part, bound.keep(near), target)
        if found.choice is not None:
            choice = np.flatnonzero(near)[found.choice]
            value = _value(items, choice)
        if found.complete:
            lower = target if found.choice is None else value
            margin = int(margin * (_GROWTH if found.work < _DEAR else _SLOW_GROWTH)) + 1
        else:
            beams -= 1
            margin = value - bound.lower
    return Outcome(choice, value, max(lower, 0), core)


def _value(items: Ragged, choice: Ints) -> int:
    return int(items.values[choice].sum())


def _first_margin(items: Ragged, bound: Bound, value: int) -> int:
    """A margin within which a few dozen items at most are no default."""
    alternatives = bound.reduced[bound.reduced > 0]
    if len(alternatives) == 0:
        return 1
    rank = min(_FIRST, len(items.starts) // 8, len(alternatives) - 1)
    return max(int(np.partition(alternatives, rank)[rank]), value - bound.lower >> _FINEST) + 1
