"""A list of partial choices with one more group, and how long a list may get."""

import numpy as np

from gac.allocation.knapsack.core import Core
from gac.allocation.knapsack.states import States, Tree
from gac.allocation.knapsack.work import Work
from gac.core.arrays import Ints

MOST_STATES = 1 << 18
MOST_CHILDREN = 1 << 20
_BATCH = 1 << 21


class GivenUpError(Exception):
    """A list grew beyond ``MOST_STATES``, or the work is spent."""


def extended(states: States, core: Core, group: int, tree: Tree, room: int, work: Work) -> States:
    """The states themselves (the group keeps its default), and each of them with each alternative that leaves room."""
    first, end = core.starts[group : group + 2].tolist()
    if work.spent or _children(states, core.reduced[first:end], room) > MOST_CHILDREN:
        raise GivenUpError
    parts = [states.table]
    width = max(1, _BATCH // max(1, len(states)))
    for start in range(first, end, width):
        batch = slice(start, min(end, start + width))
        which, parent = np.nonzero(states.reduced < room - core.reduced[batch, None])
        if len(which) == 0:
            continue
        item = batch.start + which
        added = states.table[:, parent] + core.steps[:, item]
        added[-1] = tree.add(states.node[parent], core.alternatives[item])
        parts.append(added)
    grown = States(np.concatenate(parts, axis=1)) if len(parts) > 1 else states
    work.steps += grown.costs.size
    return grown


def _children(states: States, reduced: Ints, room: int) -> int:
    """How many states a group adds at most; counted only where that could be too many."""
    if len(reduced) * len(states) <= MOST_CHILDREN:
        return len(reduced) * len(states)
    return int(np.searchsorted(np.sort(states.reduced), room - reduced).sum())


def short(states: States) -> States:
    """The states themselves.

    Raises:
        GivenUpError: they are too many.
    """
    if len(states) > MOST_STATES:
        raise GivenUpError
    return states
