"""The linear relaxation: multipliers that are worth something, whatever the limits are measured in."""

import numpy as np
import pytest

from gac.allocation.knapsack import Group, knapsack
from gac.allocation.knapsack.instance import reduced_items, rows_of
from gac.allocation.knapsack.relaxation import relax


def _least_time(seed: int, groups: int = 30, items: int = 60) -> tuple[list[Group], list[int]]:
    """Time is minimised; parameters are limited, and loss, in fine units, to 1 % more than the least there is."""
    rng = np.random.default_rng(seed)
    made, least = [], []
    for at in range(groups):
        params = np.sort(rng.integers(1, 1000, items)) * 64
        loss = np.exp(-params / 64000 * rng.uniform(2, 6)) * rng.uniform(0.1, 3) * 1e11
        time = params / 64000 * rng.uniform(0.5, 1) + rng.uniform(0, 0.2, items)
        least.append(Group(str(at), loss.astype(np.int64), params[:, None]))
        made.append(Group(str(at), time, np.column_stack([params, loss.astype(np.int64)])))
    limit = sum(int(group.costs.max()) for group in least) // 2
    return made, [limit, int(knapsack(least, [limit]).certificate.value * 1.01)]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_limits_that_the_first_columns_break_by_far(seed: int) -> None:
    groups, limits = _least_time(seed)
    rows = rows_of(groups, limits)
    assert (relax(reduced_items(rows.items, rows.limits).items)[0] > 0).all()
