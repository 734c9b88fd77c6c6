"""Relaxations: Lagrange multipliers with a first choice in floats, and lower bounds that hold in exact integers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gac.allocation.knapsack.instance import Mask, Ragged
from gac.core.arrays import Floats, Ints

_ROUNDS = 100
_CLOSE = 1e-12
_FINEST = 1e-9
_PENALTY = 1e6
_DOWN = 1 - 2.0**-50
_UP = 1 + 2.0**-50
_LARGEST_TERM = 2.0**60
_LARGEST = 2.0**61
_CELL_BITS, _MEMORY_BITS, _WORK_BITS = 14, 22, 24


def relax(items: Ragged) -> tuple[Floats, Ints | None]:
    """Solve the linear relaxation in floats, which steers the search and proves nothing; costs start at 0.

    Returns:
        The multipliers (loss per unit of each limit), and a choice within the limits or None.
    """
    if len(items.costs) == 1:
        return _relax_single(items)
    # Column generation: a small linear program over the columns so far prices all items for the next ones. A column
    # that breaks a limit may do so at a penalty, so that the program always has a solution.
    scale = np.maximum(items.slack, 1).astype(np.float64)
    shares = (items.costs / scale[:, None]).sum(axis=0)
    columns = np.unique([items.first_minimum(row) for row in (items.values, shares, *items.costs)])
    unit = float(np.maximum.reduceat(items.values, items.starts).sum(dtype=np.float64)) or 1.0
    finest = _FINEST * unit
    multipliers, bound = np.zeros(len(items.costs)), -np.inf
    weights = np.ones(len(columns))
    for _ in range(_ROUNDS):
        program = _restricted_program(items, columns, scale, unit)
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
    return multipliers, _repaired(items, columns, weights)


def _relax_single(items: Ragged) -> tuple[Floats, Ints]:
    """Maximise the dual of one limit: the next multiplier is where the two tangents meet.

    The cost of the minimiser falls as the multiplier rises. So between two multipliers only items whose cost is
    between the two choices can be chosen: the arrays shrink as the bracket closes.
    """
    slack = int(items.slack[0])
    bracket = replace(items, origin=np.arange(len(items)))
    dear = _lexicographic_minimum(items, items.values, items.costs[0], np.iinfo(np.int64).max)
    cheap = _lexicographic_minimum(items, items.costs[0], items.values, np.inf)
    if items.used(dear)[0] <= slack:
        return np.zeros(1), dear
    multiplier = 0.0
    for _ in range(_ROUNDS):
        gain = float((items.values[cheap] - items.values[dear]).sum())
        spread = items.costs[0, dear].sum() - items.costs[0, cheap].sum()
        multiplier = gain / float(spread)
        low, high = items.costs[0, cheap], items.costs[0, dear]
        bracket = bracket.keep((bracket.costs[0] >= low[bracket.group]) & (bracket.costs[0] <= high[bracket.group]))
        pick = bracket.origin[bracket.first_minimum(bracket.values + multiplier * bracket.costs[0])]
        dual = float((items.values[pick] + multiplier * items.costs[0, pick]).sum())
        tangent = float((items.values[cheap] + multiplier * items.costs[0, cheap]).sum())
        used = items.costs[0, pick].sum()
        if dual >= tangent * (1 - _CLOSE) or not items.used(cheap)[0] < used < items.used(dear)[0]:
            break
        if used <= slack:
            cheap = pick
        else:
            dear = pick
    return np.array([multiplier]), cheap


def _lexicographic_minimum(items: Ragged, first: Floats | Ints, second: Floats | Ints, above: float) -> Ints:
    smallest = first == np.minimum.reduceat(first, items.starts)[items.group]
    return items.first_minimum(np.where(smallest, second, above))


def _restricted_program(
    items: Ragged, columns: Ints, scale: Floats, unit: float
) -> tuple[float, Floats, Floats] | None:
    from scipy.optimize import linprog
    from scipy.sparse import csr_array

    limits, groups, count = len(items.costs), len(items.starts), len(columns)
    exactly_one = csr_array((np.ones(count), (items.group[columns], np.arange(count))), shape=(groups, count + limits))
    within = np.hstack([items.costs[:, columns] / scale[:, None], -np.eye(limits)])
    losses = np.append(items.values[columns] * (groups / unit), np.full(limits, _PENALTY * groups))
    result = linprog(  # type: ignore[call-overload]  # its stubs know no sparse A_eq
        losses, A_ub=within, b_ub=items.slack / scale, A_eq=exactly_one, b_eq=np.ones(groups), method="highs-ds"
    )
    if result.status != 0 or not np.isfinite(result.ineqlin.marginals).all():
        return None
    prices = np.maximum(-result.ineqlin.marginals, 0.0) * (unit / groups) / scale
    return float(result.fun) * unit / groups, result.x[:count], prices


def _repaired(items: Ragged, columns: Ints, weights: Floats) -> Ints | None:
    """The heaviest column of each group, exchanged one by one until the limits hold; None if that gets stuck."""
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
        remaining = (np.maximum(after, 0) / scale).sum(axis=0)
        best = int(np.lexsort((items.values[columns] - items.values[now], remaining))[0])
        if remaining[best] >= excess:
            return None
        excess = float(remaining[best])
        choice = choice.copy()
        choice[items.group[columns[best]]] = columns[best]


@dataclass(frozen=True, eq=False)
class Bound:
    """A Lagrangian lower bound, and each item's reduced value.

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
    """Return the bound of multipliers >= 0 (Lagrangian relaxation of every limit); ``items`` has integer values.

    For a choice within the limits, sum(value) >= sum(value + penalty) - sum(allowance) as long as no penalty
    exceeds multiplier * cost and no allowance falls short of multiplier * slack. Penalties are rounded down and
    allowances up, each with a margin (2**-50) wider than three float64 roundings can err (3 * 2**-53), so that the
    inequality is one between exact integers. It costs a few units of 2**52. A multiplier below 0, or one at which the
    whole slack is worth less than 1, counts as 0.
    """
    slacks = np.maximum(items.slack, 1)
    largest = _LARGEST_TERM / len(multipliers) / slacks
    multipliers = np.minimum(np.where(multipliers * slacks < 1, 0.0, multipliers), largest)
    total = items.values.astype(np.int64)
    allowance = 0
    for multiplier, cost, slack in zip(multipliers, items.costs, items.slack, strict=True):
        total += np.floor(multiplier * cost * _DOWN).astype(np.int64)
        allowance += int(np.ceil(multiplier * float(slack) * _UP))
    lowest = np.minimum.reduceat(total, items.starts)
    return Bound(int(lowest.sum()) - allowance, total - lowest[items.group], multipliers)


# --- the group relaxation -------------------------------------------------------------------------------------------


class GroupRelaxation:
    """Lower bound on the value of the remaining groups, as a function of the remaining budget (Gomory 1965).

    The remaining budget is known only by its cell, modulo the number of cells. A choice has a value of at least the
    bound, plus its reduced values, plus for each limit its multiplier times what it leaves unused, which is at least
    the least of its cell. The least sum over the choices of some groups follows, for each cell, from that over all of
    them but the first. The costs of a model's weights have wide steps, or meet several limits at once: nearly all
    partial choices are bound to lose more than the room.

    An item whose cost is no multiple of the width leads from a cell to one of two, and the better one counts.

    Args:
        limits: rows of the limits; ``costs``, ``free``, ``multipliers`` and ``widths`` have an entry for each.
        costs: cost of each item minus that of its group's default choice.
        reduced: reduced value of each item; those of a choice sum to less than ``2**62``.
        groups: the items of each group, in the order in which they will be added.
        free: what the default choice leaves of each limit.
        widths: of a cell, multiples of the greatest common divisor of all costs.
    """

    def __init__(
        self,
        limits: Ints,
        costs: Ints,
        reduced: Ints,
        groups: Sequence[slice],
        free: Ints,
        multipliers: Floats,
        widths: Ints,
    ) -> None:
        self._limits, self._free, self._widths = limits, free, widths
        bits = max(0, min(_CELL_BITS, _MEMORY_BITS - len(groups).bit_length(), _WORK_BITS - len(reduced).bit_length()))
        across = int(2.0 ** (bits / len(free)))
        self._strides = across ** np.arange(len(free))
        rests = free % np.maximum(np.gcd.reduce(costs, axis=1), 1)
        self._least = [_least_unused(rests, widths, multipliers, across)]  # by the number of last groups, and by cell
        size = len(self._least[0])
        moves, between = _cell(costs // widths[:, None], self._strides, size).tolist(), costs % widths[:, None] != 0
        for group in reversed(groups):
            after, least = self._least[-1], self._least[-1].copy()
            for stride in self._strides[between[:, group].any(axis=1)].tolist():
                after = np.minimum(after, np.roll(after, stride))
            after = np.tile(after, 2)
            for move, more in zip(moves[group], reduced[group].tolist(), strict=True):
                np.minimum(least, after[size - move : 2 * size - move] + more, out=least)
            self._least.append(least)

    def lower_bound(self, costs: Ints, remaining: int) -> Ints:
        """Return the least that the last ``remaining`` groups add to partial choices of these costs."""
        least = self._least[remaining]
        rest = self._free[:, None] - costs[self._limits]
        return least[_cell(rest // self._widths[:, None], self._strides, len(least))]


def unused_value(unused: Floats | Ints, multiplier: float | Floats) -> Ints:
    return np.asarray(np.minimum(unused * multiplier * _DOWN, _LARGEST).astype(np.int64))


def _least_unused(rests: Ints, widths: Ints, multipliers: Floats, across: int) -> Ints:
    least = np.zeros(1, dtype=np.int64)
    most = int(min(unused_value(across * widths.astype(np.float64), multipliers)))
    for rest, width, multiplier in zip(rests.tolist(), widths.tolist(), multipliers.tolist(), strict=True):
        value = unused_value(np.arange(across) * float(width) + rest, multiplier)
        least = np.minimum(value[:, None] + least, most).ravel()
    return least


def _cell(cells: Ints, strides: Ints, size: int) -> Ints:
    positions: Ints = strides @ (cells % size) % size
    return positions
