"""What a knapsack is given and what it returns."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gac.core.arrays import Floats, Ints
from gac.core.errors import GacError
from gac.plan.plan import Certificate


@dataclass(frozen=True, eq=False, init=False)
class Group:
    """Items of which exactly one is chosen.

    Attributes:
        name: how an error names the group.
        values: what each item loses (minimised), float64, shape ``(items,)``; anything NumPy can convert is taken.
        costs: what each item costs under each limit, int64, shape ``(items, limits)``.

    Raises:
        GacError: a name that is no string; no item; a value that is negative, NaN or infinite; a cost that is negative
            or no integer; shapes that do not fit. The group's name is in the message.
    """

    name: str
    values: Floats
    costs: Ints

    def __init__(
        self, name: str, values: Floats | Sequence[float], costs: Ints | Sequence[Sequence[int]] | Sequence[Ints]
    ) -> None:
        if not isinstance(name, str):
            raise GacError(f"a group that is called {name!r}", "a string", "Call every group by a name.")
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "values", _values(name, values))
        object.__setattr__(self, "costs", _costs(name, costs, len(self.values)))


@dataclass(frozen=True)
class Solution:
    """A choice and its proof.

    Attributes:
        choice: the item chosen in each group.
        used: what the choice costs under each limit.
        certificate: value, bound and gap.
        unit: the power of two that the certificate holds within half of, see ``knapsack``.
        grain: the smaller power of two that losses were compared in whole numbers of.
    """

    choice: tuple[int, ...]
    used: tuple[int, ...]
    certificate: Certificate
    unit: float
    grain: float


def _array(name: str, what: str, given: Any) -> NDArray[Any]:
    try:
        return np.asarray(given)
    except ValueError:
        raise GacError(
            f"group {name!r} has {what} that make no array: their lengths differ",
            "one entry an item, all of one length",
            "Give every item one value and one cost under each limit.",
        ) from None


def _values(name: str, given: Any) -> Floats:
    values = _array(name, "values", given)
    if values.size == 0 or values.ndim != 1 or values.dtype.kind not in "iuf":
        raise GacError(
            f"group {name!r} has values of shape {values.shape} and type {values.dtype}",
            "one number an item, and one item at least",
            "Give every group a one-dimensional array of losses.",
        )
    values = np.ascontiguousarray(values, dtype=np.float64)
    wrong = np.flatnonzero(~((values >= 0) & np.isfinite(values)))
    if len(wrong):
        raise GacError(
            f"group {name!r} has value {values[wrong[0]]} at item {wrong[0]}",
            "finite losses, 0 or more",
            "Remove the item, or shift the group's losses so that the smallest is 0.",
        )
    return values


def _costs(name: str, given: Any, items: int) -> Ints:
    costs = _array(name, "costs", given)
    if costs.ndim != 2 or len(costs) != items:
        raise GacError(
            f"group {name!r} has costs of shape {costs.shape} for {items} items",
            f"shape ({items}, limits)",
            "Give one row an item and one column a limit.",
        )
    if costs.dtype.kind not in "iu" or (costs.dtype.kind == "u" and (costs > np.iinfo(np.int64).max).any()):
        raise GacError(
            f"group {name!r} has costs of type {costs.dtype}",
            "integers that fit int64",
            "Round the costs up to whole units (parameters, ns, bytes) first.",
        )
    costs = np.ascontiguousarray(costs, dtype=np.int64)
    wrong = np.argwhere(costs < 0)
    if len(wrong):
        item, limit = wrong[0].tolist()
        raise GacError(
            f"group {name!r} has cost {costs[item, limit]} at item {item}, limit {limit}",
            "costs of 0 or more",
            "Correct the cost; an unknown cost cannot be limited.",
        )
    return costs
