"""The knapsack's answer to an instance beside those of CP-SAT and of HiGHS at gap 0."""

from dataclasses import replace

import numpy as np

from gac.allocation.knapsack import Solution
from gac.allocation.knapsack.instance import flatten, reduced_items, to_grains
from gac.allocation.knapsack.lists import Work
from gac.allocation.knapsack.search import cp_sat
from tests.allocation.knapsack_instances import in_grains, within

TOLERANCE = 1e-6  # HiGHS's own, for feasibility and integrality
_SECONDS = 20.0


def cp_sat_finds(groups, limits, answer):
    """CP-SAT, in the integers that the knapsack compares."""
    if not isinstance(answer, Solution):
        items = flatten(groups)
        status = cp_sat(replace(items, values=items.starts[items.group] * 0, slack=np.array(limits)), Work(20))[0]
        return {"INFEASIBLE": "", "UNKNOWN": "peer not proved"}.get(status, "feasibility")
    items = reduced_items(flatten(groups), limits)[0]
    values = to_grains(items.values, answer.grain)
    chosen = np.flatnonzero(np.asarray(answer.choice)[items.group] == items.origin)
    worth = values <= values[chosen].sum()
    dropped = max(0, int(values[worth].sum(dtype=object)).bit_length() - 60)  # CP-SAT's sums have to fit int64
    status, choice = cp_sat(replace(items, values=values >> dropped).keep(worth), Work(20))
    if status == "INFEASIBLE":
        return "feasibility"
    if choice is not None and values[worth][choice].sum() < values[chosen].sum():
        return "value"
    return "" if status == "OPTIMAL" else "peer not proved"


def highs_finds(groups, limits, answer):
    """HiGHS at gap 0: its choice, where it holds in integers, may not be better; its value may be so by TOLERANCE."""
    if not isinstance(answer, Solution):
        return cp_sat_finds(groups, limits, answer)
    result = highs(groups, limits)
    if result.x is None:
        return "feasibility" if result.status == 2 else "peer not proved"
    ends = np.cumsum([len(group.values) for group in groups])[:-1]
    choice = [int(part.argmax()) for part in np.split(result.x, ends)]
    units = in_grains(groups, limits, answer.grain)
    ours, theirs = (sum(int(u[item]) for u, item in zip(units, c, strict=True)) for c in (answer.choice, choice))
    if within(choice, groups, limits) and theirs < ours:
        return "value"
    if result.status != 0:
        return "peer not proved"
    return "" if abs(result.fun - answer.certificate.value) <= TOLERANCE * max(1.0, abs(result.fun)) else "value"


def highs(groups, limits, seconds=_SECONDS):
    """The instance through HiGHS at gap 0."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    values = np.concatenate([group.values for group in groups])
    costs = np.concatenate([group.costs for group in groups]).astype(float)
    rows = np.repeat(np.arange(len(groups)), [len(group.values) for group in groups])
    one_each = csr_array((np.ones(len(rows)), (rows, np.arange(len(rows)))))
    return milp(
        values,
        constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(costs.T, -np.inf, limits)],
        integrality=np.ones(len(rows), dtype=np.int64),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0.0, "time_limit": seconds},
    )
