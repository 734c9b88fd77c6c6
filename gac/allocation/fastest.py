"""The fastest choice that loses little: latency is what is minimised, and loss is one more limit."""

from collections.abc import Mapping, Sequence
from math import floor, frexp, ldexp

import numpy as np

from gac.allocation.candidates import CandidateSet
from gac.allocation.knapsack import Group
from gac.allocation.latencies import UNKNOWN
from gac.allocation.limits import LOSS
from gac.allocation.problem import Instance, as_knapsack

_SLACK_BITS, _LOSS_BITS = 44, 60


def fastest(
    sets: Sequence[CandidateSet], limits: Mapping[str, int], weights: Mapping[str, float], most: float, slack: float
) -> tuple[Instance, float]:
    """The knapsack of least latency among the choices that lose at most ``most``.

    Its limits are those given, and last ``LOSS`` in whole units. Every candidate's loss is rounded up to them, so that
    no choice within the limits loses more.

    Args:
        limits: by cost column.
        weights: how much a ns counts, by latency column; candidates of which one is unknown are left out.
        most: nats a token.
        slack: the part of ``most`` that is given for speed; the unit is a ``2**44``th of it.

    Returns:
        The instance, and the unit of loss in nats, a power of two.
    """
    exponent = max(frexp(slack)[1] - _SLACK_BITS, frexp(most)[1] - _LOSS_BITS)
    limit = floor(ldexp(most, -exponent))
    known = [rows.at(np.all([rows.cost(column) != UNKNOWN for column in weights], axis=0)) for rows in sets]
    within = as_knapsack(known, limits)
    groups = []
    for rows, group in zip(within.sets, within.groups, strict=True):
        ns = np.sum([weight * rows.cost(column) for column, weight in weights.items()], axis=0)
        loss = np.ceil(np.ldexp(np.minimum(rows.loss, most), -exponent)).astype(np.int64)
        loss[rows.loss > most] = limit + 1
        groups.append(Group(group.name, ns, np.column_stack([group.costs, loss])))
    return Instance(within.sets, tuple(groups), {**limits, LOSS: limit}), ldexp(1.0, exponent)
