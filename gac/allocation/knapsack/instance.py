"""From groups to a reduced instance: flat arrays, costs from 0, common divisors out, values in integers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gac.allocation.knapsack.groups import Group
from gac.allocation.knapsack.ragged import Ragged
from gac.arrays import Floats, Ints
from gac.errors import GacError

VALUE_BITS = 52
COST_BITS = 62
_SMALLEST_EXPONENT = -1074


class OutOfReachError(Exception):
    """Some group has no item, or all groups together no choice, within a limit taken alone."""


@dataclass(frozen=True, eq=False)
class Reduced:
    """The instance that is solved: ``items`` with costs from 0 divided by ``divisors``, values from 0 in each group."""

    items: Ragged
    divisors: Ints

    def positions(self, choice: Sequence[int]) -> Ints:
        """Where the items of a choice within the limits stand in the instance."""
        found = np.flatnonzero(np.asarray(choice)[self.items.group] == self.items.origin)
        assert len(found) == len(choice), "a choice within the limits was left out"
        return found


def reduced(groups: Sequence[Group], limits: Sequence[int]) -> Reduced:
    """The groups flattened and reduced."""
    return reduced_items(flatten(groups), limits)


def reduced_items(items: Ragged, limits: Sequence[int]) -> Reduced:
    """Subtract each group's cheapest cost and smallest value, and divide out each limit's gcd.

    Items that break a limit even beside the cheapest of every other group are left out.

    Raises:
        OutOfReachError: a limit cannot be met, even taken alone.
        GacError: the costs are so large that their sums would overflow.
    """
    room = [limit - sum(row) for limit, row in zip(limits, items.cheapest.tolist(), strict=True)]
    if min(room) < 0:
        raise OutOfReachError
    slack = np.minimum(np.array(room, dtype=object), np.iinfo(np.int64).max).astype(np.int64)
    items = replace(items, costs=items.costs - items.cheapest[:, items.group], slack=slack)
    fits = (items.costs <= slack[:, None]).all(axis=0)
    if not np.logical_or.reduceat(fits, items.starts).all():
        raise OutOfReachError
    items = items.keep(fits)
    divisors = np.maximum(np.gcd.reduce(items.costs, axis=1), 1)
    costs = items.costs // divisors[:, None]
    spread = [spread_of(row, items) for row in costs]
    lowest = np.minimum.reduceat(items.values, items.starts)
    return Reduced(
        replace(
            items,
            values=items.values - lowest[items.group],
            costs=costs,
            slack=np.array([min(r // d, most) for r, d, most in zip(room, divisors.tolist(), spread, strict=True)]),
        ),
        divisors,
    )


def flatten(groups: Sequence[Group]) -> Ragged:
    """The groups' items end to end, with a slack of 0 under every limit."""
    sizes = np.array([len(group.values) for group in groups])
    starts = np.cumsum(sizes) - sizes
    values = np.concatenate([group.values for group in groups])
    costs = np.ascontiguousarray(np.concatenate([group.costs for group in groups]).T)
    origin = np.arange(len(values)) - np.repeat(starts, sizes)
    return Ragged(values, costs, starts, origin, np.zeros(len(costs), dtype=np.int64))


def spread_of(costs: Floats | Ints, items: Ragged) -> int:
    """The largest sum that integer costs (from 0) can come to with one item a group.

    Raises:
        GacError: it does not fit int64.
    """
    spread: int = sum(np.maximum.reduceat(costs, items.starts).tolist())
    if spread >= 1 << COST_BITS:
        raise GacError(
            f"the groups' costs spread over {spread} units in all",
            f"less than 2**{COST_BITS}, so that sums fit int64",
            "Give the costs in a larger unit.",
        )
    return spread


def unit_of(total: float, groups: int) -> float:
    """The power of two that makes ``total`` just less than ``2**52`` units; coarser for more than 1,024 groups.

    So a sum of as many entries as there are groups stays below ``2**63``, and no loss is rounded by more than
    ``2**-53`` of the total (``2**-52`` for up to 2,048 groups, and so on).
    """
    bits = min(VALUE_BITS, COST_BITS - groups.bit_length())
    return float(np.ldexp(1.0, max(int(np.frexp(total)[1]) - bits, _SMALLEST_EXPONENT)))


def to_units(values: Floats | Ints, unit: float) -> Ints:
    """Each value as the nearest whole number of units (a power of two, so that only the rounding itself can err)."""
    exponent = int(np.frexp(unit)[1]) - 1
    fit = np.minimum(values, np.ldexp(1.0, COST_BITS + exponent))
    return np.rint(np.ldexp(fit, -exponent)).astype(np.int64)


def scaled(items: Ragged, choice: Ints) -> tuple[Ragged, Ints, float]:
    """Values as integers: multiples of the unit of the choice's total.

    Items that alone lose more than the whole choice are left out.

    Returns:
        The items, the positions of the choice among them, and the unit.
    """
    total = float(items.values[choice].sum())
    unit = unit_of(total, len(items.starts))
    within = items.values <= total * (1 + 2.0**-40)
    position = np.cumsum(within) - 1
    items = items.keep(within)
    return replace(items, values=to_units(items.values, unit)), position[choice], unit
