"""Losses as integers, and finer ones as long as the optimum turns out to be far smaller than they can tell."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from gac.allocation.knapsack.instance import FINEST, bits_of, to_grains
from gac.allocation.knapsack.ragged import Ragged
from gac.allocation.knapsack.relaxation import lagrangian, relax
from gac.allocation.knapsack.search import Outcome, settle
from gac.allocation.knapsack.work import Work
from gac.core.arrays import Floats, Ints

_FAR = 2.0**-20
_FINE = 8
_TAME, _UNSEEN = 400, 2.0**-1000
_UP = 1 + 2.0**-40


@dataclass(frozen=True, eq=False)
class Refined:
    """What was settled last.

    Attributes:
        choice: index of the item in its group as given, of each group.
        outcome: its value and bound, in grains.
        grain: the power of two that losses were whole numbers of.
        multipliers: behind the bound, in grains per unit of each limit.
    """

    choice: Ints
    outcome: Outcome
    grain: float
    multipliers: Floats


def refined(items: Ragged, first: Callable[[], Ints], work: Work) -> Refined:
    """The best choice within the limits; ``items`` has costs from 0 and float values from 0.

    Each round knows a better choice than the one before. It leaves out the items that alone lose more than that whole
    choice, and makes the grain so small that the choice has 52 bits. Where the relaxation cannot tell the choice from 0
    among items so large, or the optimum has 8 bits less than the choice had, another round follows.

    Args:
        first: finds a choice within the limits (one item position a group), where the relaxation finds none.
    """
    start: Ints | None = None
    bits = bits_of(len(items.starts))
    while True:
        largest = items.values.max()
        top = int(np.frexp(largest)[1])
        top = top if abs(top) > _TAME else 0
        normal = replace(items, values=np.ldexp(items.values, -top)) if top else items
        multipliers, found = relax(normal)
        start = _better(normal.values, start, found)
        if start is None:
            start = first()
        if not items.values[start].any():
            return Refined(items.origin[start], Outcome(start, 0, 0, 0, ""), 2.0**FINEST, np.zeros(len(items.costs)))
        total = float(normal.values[start].sum())
        near = normal.values <= max(total * _UP, _UNSEEN)
        items, start = items.keep(near), (np.cumsum(near) - 1)[start]
        if total < _FAR * np.ldexp(largest, -top):
            continue
        exponent = max(top + int(np.frexp(total)[1]) - bits, FINEST)
        whole = replace(items, values=to_grains(items.values, 2.0**exponent))
        bound = lagrangian(whole, np.ldexp(multipliers, top - exponent))
        outcome = settle(whole, bound, start, work)
        start = outcome.choice
        if exponent == FINEST or outcome.value >> bits - _FINE or work.spent:
            return Refined(items.origin[start], outcome, 2.0**exponent, bound.multipliers)


def _better(values: Floats | Ints, *choices: Ints | None) -> Ints | None:
    """The choice of the smaller sum of values; the first one where they tie."""
    return min((one for one in choices if one is not None), key=lambda one: float(values[one].sum()), default=None)
