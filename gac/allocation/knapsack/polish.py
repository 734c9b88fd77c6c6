"""A better choice from HiGHS, where the exact search grew too large: an incumbent, never a proof."""

import numpy as np

from gac.allocation.knapsack.bounds import Bound
from gac.allocation.knapsack.ragged import Ragged
from gac.sites import Ints


def polished(items: Ragged, bound: Bound, choice: Ints, seconds: float) -> Ints:
    """The better one of ``choice`` and what HiGHS finds within ``seconds`` among the items that could improve on it."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    value = int(items.values[choice].sum())
    near = bound.reduced < value - bound.lower
    part = items.keep(near)
    one_each = csr_array((np.ones(len(part)), (part.group, np.arange(len(part)))), shape=(len(part.starts), len(part)))
    scale = np.maximum(part.slack, 1)
    result = milp(
        part.values * (len(part.starts) / value),
        constraints=[
            LinearConstraint(one_each, 1, 1),
            LinearConstraint(part.costs / scale[:, None], -np.inf, part.slack / scale),
        ],
        integrality=np.ones(len(part), dtype=np.int64),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0.0, "time_limit": seconds},
    )
    if result.x is None:
        return choice
    found = np.flatnonzero(near)[part.first_minimum(-result.x)]
    fits = (items.used(found) <= items.slack).all()
    return found if fits and int(items.values[found].sum()) < value else choice
