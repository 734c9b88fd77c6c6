"""Exact search among the few items near the bound: two lists of partial choices, grown and then joined."""

from dataclasses import dataclass

import numpy as np

from gac.allocation.knapsack.bounds import Bound
from gac.allocation.knapsack.deadline import Deadline
from gac.allocation.knapsack.growth import Core, GivenUpError, grown_lists
from gac.allocation.knapsack.join import Wanted, join
from gac.allocation.knapsack.lattice import Lattice
from gac.allocation.knapsack.ragged import Ragged
from gac.arrays import Ints


@dataclass(frozen=True, eq=False)
class Found:
    """What a search came to.

    Attributes:
        choice: the best choice found (one item position a group), or None.
        complete: no choice below the target was left out.
        work: how many states and pairs were looked at.
    """

    choice: Ints | None
    complete: bool
    work: int


def better(items: Ragged, bound: Bound, target: int, known: int, deadline: Deadline) -> Found:
    """The best choice within the limits whose value is below ``target``, or failing that, perhaps one below ``known``.

    Every choice below the target has reduced values that sum to less than ``target - bound.lower``; all of those are
    enumerated, but for the ones that another one beats or equals in every cost and in value, and those that are bound
    to leave so much of the limit unused that they cannot be below the target. So if a complete search finds nothing
    below the target, there is nothing. What it finds between target and known is a better incumbent, not an optimum.
    Where a list grows too long, or the deadline passes, the search gives up.
    """
    default = items.first_minimum(bound.reduced)
    core = _core(items, bound, default, target, known)
    try:
        left, right, tree = grown_lists(core, deadline)
    except GivenUpError as given_up:
        return Found(None, False, given_up.work)
    joined = join(left, right, core.wanted, deadline)
    work = len(left) + len(right) + joined.pairs
    if joined.best is None:
        return Found(None, joined.complete, work)
    choice = default.copy()
    for states, at in zip((left, right), joined.best, strict=True):
        picked = tree.items(int(states.node[at]))
        choice[items.group[picked]] = picked
    return Found(choice, joined.complete, work)


def _core(items: Ragged, bound: Bound, default: Ints, target: int, known: int) -> Core:
    room = target - bound.lower
    near = bound.reduced < room
    near[default] = False
    alternatives = np.flatnonzero(near)
    group = items.group[alternatives]
    instead, reduced = default[group], bound.reduced[alternatives]
    costs = items.costs[:, alternatives] - items.costs[:, instead]
    values = np.asarray(items.values[alternatives] - items.values[instead], dtype=np.int64)
    starts, free = np.flatnonzero(np.diff(group, prepend=-1)), items.slack - items.used(default)
    limits = _that_can_bind(costs, starts, free)
    free, multipliers = free[limits], bound.multipliers[limits]
    return Core(
        alternatives=alternatives,
        starts=np.append(starts, len(group)),
        steps=np.vstack([costs[limits], values, reduced, np.zeros_like(values)]),
        reduced=reduced,
        wanted=Wanted(
            free=free,
            below=known - int(items.values[default].sum()),
            room=room,
            reach=known - bound.lower,
            multipliers=multipliers,
        ),
        lattice=Lattice(int(free[0]), float(multipliers[0])) if len(free) == 1 else None,
    )


def _that_can_bind(costs: Ints, starts: Ints, free: Ints) -> Ints:
    """The limits that some choice of the alternatives breaks, which are dear to keep track of; one at least."""
    if len(starts) == 0:
        return np.arange(len(free))
    most = np.maximum(np.maximum.reduceat(costs, starts, axis=1), 0).sum(axis=1)
    binding = np.flatnonzero(most > free)
    return binding if len(binding) else np.zeros(1, dtype=np.int64)
