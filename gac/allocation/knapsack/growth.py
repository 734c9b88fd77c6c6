"""Two lists of partial choices that hold all groups between them, each without what another one beats.

Under one limit, divisors of the costs tell how much of it a partial choice is bound to leave unused. Several limits
have a module of their own (``halves``).
"""

from dataclasses import dataclass
from math import gcd

import numpy as np

from gac.allocation.knapsack.core import Core
from gac.allocation.knapsack.extension import extended, short
from gac.allocation.knapsack.halves import grown_halves
from gac.allocation.knapsack.outlook import least_worth
from gac.allocation.knapsack.states import States, Tree
from gac.allocation.knapsack.work import Work
from gac.core.arrays import Ints

_APART = 1 << 12
_MOST_KINDS = 8


@dataclass(frozen=True, eq=False)
class Grown:
    """The lists, the tree that tells their choices, what is left of the room, and the length of the longest list."""

    left: States
    right: States
    tree: Tree
    room: int
    longest: int


def grown_lists(core: Core, work: Work) -> Grown:
    """Lists that hold between them every choice that there is room for, or a better one.

    Raises:
        GivenUpError: a list is too long, or the work is spent.
    """
    tree = Tree()
    if len(core.free) > 1:
        left, right, room, longest = grown_halves(core, tree, work)
        return Grown(left, right, tree, room, longest)
    left, right = _under_one_limit(core, tree, work)
    return Grown(left, right, tree, core.room, max(len(left), len(right)))


def _under_one_limit(core: Core, tree: Tree, work: Work) -> tuple[States, States]:
    """The shorter list takes the next group; but what stands in the way of a large common divisor goes to the left.

    From then on each state there tells how much of the limit a choice with it is bound to waste. That counts as part
    of its reduced value, and what the least of them comes to is room that the right list has not got either.
    """
    room = core.room
    order, coming = by_divisor(core.divisors, core.least)
    divisors, least = core.divisors.tolist(), core.least.tolist()
    # Most partial choices waste more than the room there is where the step is so wide.
    wide = (place for place, step in enumerate(coming[: len(coming) // 2]) if step * core.multipliers[0] >= 2 * room)
    apart = next(wide, 0)
    step, by_right = coming[0], 0
    left, right = _wasting(tree.root(1), core, 1, step), tree.root(1)
    spare = room - left.least_reduced(room)
    for place, group in enumerate(order):
        if least[group] >= spare:
            continue
        if len(left) <= len(right) or (place < apart and len(left) < _APART):
            left, before = _undominated(extended(left, core, group, tree, room, work)), step
            step = gcd(by_right, coming[place + 1])
            left = _wasting(left, core, before, step)
            spare = room - left.least_reduced(room)
        else:
            right = _undominated(extended(right, core, group, tree, spare, work))
            by_right = gcd(by_right, divisors[group])
    return left, right


def _wasting(states: States, core: Core, before: int, step: int) -> States:
    """The states with room left once their reduced values tell what ``step`` wastes, not what the one before did."""
    if step in (before, 0):
        return states
    unused, multiplier, table = core.free[0] - states.costs[0], float(core.multipliers[0]), states.table.copy()
    table[-2] += wasted(unused, step, multiplier) - wasted(unused, before, multiplier)
    return States(table[:, table[-2] < core.room])


def wasted(unused: Ints, step: int, multiplier: float) -> Ints:
    """What partial choices that leave so much ``unused`` lose at least if all costs to come are multiples of ``step``.

    In the end they leave what they leave now, modulo ``step``, or more; and a choice has a value of at least the bound,
    plus its reduced values, plus ``multiplier`` times what it leaves.
    """
    return least_worth(unused % step, multiplier)


def _undominated(states: States) -> States:
    """One limit: by rising cost, only states with a smaller value than all cheaper ones.

    Raises:
        GivenUpError: they are too many.
    """
    order = np.lexsort((states.values, states.costs[0]))
    values = states.values[order]
    fresh = np.ones(len(order), dtype=np.bool_)
    fresh[1:] = values[1:] < np.minimum.accumulate(values)[:-1]
    return short(states.at(order[fresh]))


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
