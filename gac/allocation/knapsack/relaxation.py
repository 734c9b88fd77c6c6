"""Lagrange multipliers and a first choice, in floats: they steer the search and prove nothing.

And the bound of any multipliers, which holds in exact integers.
"""

from dataclasses import dataclass, replace

import numpy as np

from gac.allocation.knapsack.ragged import Mask, Ragged
from gac.core.arrays import Floats, Ints

_ROUNDS = 100
_CLOSE = 1e-12
_FINEST = 1e-9
_PENALTY = 1e6
_DOWN = 1 - 2.0**-50
_UP = 1 + 2.0**-50
_LARGEST = 2.0**60


def relax(items: Ragged) -> tuple[Floats, Ints | None]:
    """Solve the linear relaxation; ``items`` starts at cost 0, and sums of its values are far from a float's largest.

    Returns:
        Its multipliers (loss per unit of each limit), and a choice within the limits or None.
    """
    return _relax_one(items) if len(items.costs) == 1 else _relax_several(items)


def _relax_one(items: Ragged) -> tuple[Floats, Ints]:
    """Maximise the dual of one limit by cutting planes: the next multiplier is where the two tangents meet.

    The argmin's cost falls as the multiplier rises, so between two multipliers only the items whose cost
    lies between the two choices can be chosen: the arrays shrink as the bracket closes.
    """
    slack = int(items.slack[0])
    work = replace(items, origin=np.arange(len(items)))
    dear = _first(items, items.values, items.costs[0], np.iinfo(np.int64).max)
    cheap = _first(items, items.costs[0], items.values, np.inf)
    if items.used(dear)[0] <= slack:
        return np.zeros(1), dear
    multiplier = 0.0
    for _ in range(_ROUNDS):
        gain = float((items.values[cheap] - items.values[dear]).sum())
        spread = items.costs[0, dear].sum() - items.costs[0, cheap].sum()
        multiplier = gain / float(spread)
        low, high = items.costs[0, cheap], items.costs[0, dear]
        work = work.keep((work.costs[0] >= low[work.group]) & (work.costs[0] <= high[work.group]))
        total = work.values + multiplier * work.costs[0]
        pick = work.origin[work.first_minimum(total)]
        here = float((items.values[pick] + multiplier * items.costs[0, pick]).sum())
        tangent = float((items.values[cheap] + multiplier * items.costs[0, cheap]).sum())
        used = items.costs[0, pick].sum()
        if here >= tangent * (1 - _CLOSE) or not items.used(cheap)[0] < used < items.used(dear)[0]:
            break
        if used <= slack:
            cheap = pick
        else:
            dear = pick
    return np.array([multiplier]), cheap


def _first(items: Ragged, smallest: Floats | Ints, ties: Floats | Ints, above: float) -> Ints:
    """Each group's smallest entry of the one kind, the smallest of the other (all below ``above``) where they tie."""
    at = smallest == np.minimum.reduceat(smallest, items.starts)[items.group]
    return items.first_minimum(np.where(at, ties, above))


def _relax_several(items: Ragged) -> tuple[Floats, Ints | None]:
    """Column generation: a small linear program over the columns seen so far prices all items for the next ones.

    A column that breaks a limit may do so at a penalty, so that the program always has a solution.
    """
    columns = _first_columns(items)
    scale = np.maximum(items.slack, 1).astype(np.float64)
    unit = float(np.maximum.reduceat(items.values, items.starts).sum(dtype=np.float64)) or 1.0
    finest = _FINEST * unit
    multipliers, bound = np.zeros(len(items.costs)), -np.inf
    weights = np.ones(len(columns))
    for _ in range(_ROUNDS):
        program = _solve(items, columns, scale, unit)
        if program is None:
            break
        objective, weights, prices = program
        priced = items.values + prices @ items.costs
        picks = items.first_minimum(priced)
        dual = float(priced[picks].sum() - prices @ items.slack)
        if dual > bound:
            bound, multipliers = dual, prices
        unit = min(unit, max(abs(objective), finest))  # neither an objective of 0 nor penalties blow it up
        if objective - bound <= _CLOSE * unit or np.isin(picks, columns).all():
            break
        merged = np.union1d(columns, picks)
        weights, columns = np.zeros(len(merged)), merged
    return multipliers, _fitted(items, columns, weights)


def _first_columns(items: Ragged) -> Ints:
    """The smallest value, the lowest cost under each limit and the lowest sum of used shares in each group."""
    shares = (items.costs / np.maximum(items.slack, 1)[:, None]).sum(axis=0)
    picks = [items.first_minimum(row) for row in (items.values, shares, *items.costs)]
    return np.unique(np.concatenate(picks))


def _solve(items: Ragged, columns: Ints, scale: Floats, unit: float) -> tuple[float, Floats, Floats] | None:
    """The restricted program's objective, weight of each column, multiplier of each limit; None if HiGHS gives up."""
    from scipy.optimize import linprog
    from scipy.sparse import csr_array

    limits, groups, count = len(items.costs), len(items.starts), len(columns)
    one_each = csr_array((np.ones(count), (items.group[columns], np.arange(count))), shape=(groups, count + limits))
    within = np.hstack([items.costs[:, columns] / scale[:, None], -np.eye(limits)])
    losses = np.append(items.values[columns] * (groups / unit), np.full(limits, _PENALTY * groups))
    found = linprog(  # type: ignore[call-overload]  # its stubs know no sparse A_eq
        losses, A_ub=within, b_ub=items.slack / scale, A_eq=one_each, b_eq=np.ones(groups), method="highs-ds"
    )
    if found.status != 0 or not np.isfinite(found.ineqlin.marginals).all():
        return None
    prices = np.maximum(-found.ineqlin.marginals, 0.0) * (unit / groups) / scale
    return float(found.fun) * unit / groups, found.x[:count], prices


def _fitted(items: Ragged, columns: Ints, weights: Floats) -> Ints | None:
    """The heaviest column of each group, exchanged one at a time until the limits hold; None if that gets stuck."""
    heaviest = np.lexsort((columns, -weights, items.group[columns]))
    choice = columns[heaviest[np.flatnonzero(np.diff(items.group[columns[heaviest]], prepend=-1))]]
    scale = np.maximum(items.slack, 1)[:, None].astype(np.float64)
    excess = np.inf
    while True:
        over = items.used(choice) - items.slack
        if (over <= 0).all():
            return choice
        now = choice[items.group[columns]]
        after = over[:, None] + items.costs[:, columns] - items.costs[:, now]
        left = (np.maximum(after, 0) / scale).sum(axis=0)
        best = int(np.lexsort((items.values[columns] - items.values[now], left))[0])
        if left[best] >= excess:
            return None
        excess = float(left[best])
        choice = choice.copy()
        choice[items.group[columns[best]]] = columns[best]


@dataclass(frozen=True, eq=False)
class Bound:
    """A Lagrangian lower bound, and what each item adds to it.

    A choice within the limits has a value of at least ``lower`` plus the sum of its items' ``reduced``, and for any
    limit l of at least ``lower + multipliers[l] * (slack[l] - used[l])``.

    Attributes:
        lower: no choice within the limits has a smaller value.
        reduced: 0 or more, and 0 for one item in each group, shape ``(items,)``.
        multipliers: value per unit of each limit, shape ``(limits,)``.
    """

    lower: int
    reduced: Ints
    multipliers: Floats

    def keep(self, mask: Mask) -> "Bound":
        return Bound(self.lower, self.reduced[mask], self.multipliers)


def lagrangian(items: Ragged, multipliers: Floats) -> Bound:
    """The bound of multipliers >= 0 (Lagrangian relaxation of every limit); ``items`` has integer values.

    For a choice within the limits, sum(value) >= sum(value + penalty) - sum(allowance) as long as no penalty
    exceeds multiplier * cost and no allowance falls short of multiplier * slack. Penalties are rounded down and
    allowances up, each with a margin (2**-50) wider than three float64 roundings can err (3 * 2**-53), so that the
    inequality is one between exact integers. It costs a few units of 2**52. A multiplier below 0, or one that the
    whole slack is worth less than 1 at, counts as 0.
    """
    slacks = np.maximum(items.slack, 1)
    multipliers = np.minimum(np.where(multipliers * slacks < 1, 0.0, multipliers), _LARGEST / len(multipliers) / slacks)
    total = items.values.astype(np.int64)
    allowance = 0
    for multiplier, cost, slack in zip(multipliers, items.costs, items.slack, strict=True):
        total += np.floor(multiplier * cost * _DOWN).astype(np.int64)
        allowance += int(np.ceil(multiplier * float(slack) * _UP))
    lowest = np.minimum.reduceat(total, items.starts)
    return Bound(int(lowest.sum()) - allowance, total - lowest[items.group], multipliers)
