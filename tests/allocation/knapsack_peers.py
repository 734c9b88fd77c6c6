"""What is wrong with the knapsack's answer to an instance, by brute force, CP-SAT or HiGHS."""

import math
import re
from dataclasses import replace

import numpy as np

from gac.allocation.knapsack import Solution, knapsack
from gac.allocation.knapsack.instance import flatten, reduced_items, to_grains
from gac.allocation.knapsack.search import cp_sat
from gac.allocation.knapsack.states import Work
from gac.core.errors import BudgetError
from tests.allocation.knapsack_instances import every_sum, fitting, within

FAULTS = ("value", "limit broken", "feasibility", "not proved", "peer not proved")
TOLERANCE = 1e-6  # HiGHS's own, for feasibility and integrality
_SECONDS = 20.0


def fault(groups, limits, peer):
    """'' or one of ``FAULTS``; the peer is ``brute_force_finds``, ``cp_sat_finds`` or ``highs_finds``."""
    try:
        solution = knapsack(groups, limits)
    except BudgetError as error:
        return peer(groups, limits, error)
    if not within(solution.choice, groups, limits):
        return "limit broken"
    if (solution.certificate.status, solution.certificate.gap) != ("optimal", 0.0):
        return "not proved"
    value = math.fsum(group.values[item] for group, item in zip(groups, solution.choice, strict=True))
    return "value" if value != solution.certificate.value else peer(groups, limits, solution)


def brute_force_finds(groups, limits, answer):
    """Every choice, in the integers that the knapsack compares; of an infeasible instance also the shortfall."""
    fits = fitting(groups, limits)
    if not isinstance(answer, Solution):
        return "feasibility" if fits.any() or _shortfall(groups, limits) != _said(answer) else ""
    columns = _in_grains(groups, limits, answer.grain)
    value = sum(int(column[item]) for column, item in zip(columns, answer.choice, strict=True))
    return "" if value == every_sum(columns)[fits].min() else "value"


def _in_grains(groups, limits, grain):
    """Losses above the smallest in the group that fits beside the cheapest of every other group."""
    cheapest = np.array([group.costs.min(axis=0) for group in groups])
    room = [limit - sum(row) for limit, row in zip(limits, cheapest.T.tolist(), strict=True)]
    columns = []
    for group, low in zip(groups, cheapest, strict=True):
        above = np.maximum(group.values - group.values[(group.costs - low <= room).all(axis=1)].min(), 0)
        columns.append(np.minimum(to_grains(above, grain), 2**56))
    return columns


def _shortfall(groups, limits):
    """By how much the first limit that cannot be met alone, or failing that beside the earlier ones, falls short."""
    sums = [every_sum([group.costs[:, index] for group in groups]) for index in range(len(limits))]
    for used, limit in zip(sums, limits, strict=True):
        if used.min() > limit:
            return int(used.min()) - limit
    for index in range(1, len(limits)):
        least = int(sums[index][fitting([replace(g, costs=g.costs[:, :index]) for g in groups], limits[:index])].min())
        if least > limits[index]:
            return least - limits[index]
    return 0


def _said(error):
    result = re.search(r"it falls short by (\d+)$", error.given)
    return int(result[1]) if result else None


def cp_sat_finds(groups, limits, answer):
    """CP-SAT, in the integers that the knapsack compares."""
    if not isinstance(answer, Solution):
        items = flatten(groups)
        status = cp_sat(replace(items, values=items.starts[items.group] * 0, slack=np.array(limits)), Work(20))[0]
        return {"INFEASIBLE": "", "UNKNOWN": "peer not proved"}.get(status, "feasibility")
    items = reduced_items(flatten(groups), limits).items
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
    units = _in_grains(groups, limits, answer.grain)
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
