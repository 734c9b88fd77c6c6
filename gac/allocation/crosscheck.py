"""The same instance through OR-Tools CP-SAT: a second opinion on an exact answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gac.allocation.knapsack import Group, Solution
from gac.allocation.knapsack.instance import reduced, to_units
from gac.allocation.knapsack.ragged import Ragged
from gac.errors import GacError
from gac.sites import Ints


@dataclass(frozen=True)
class CrossCheck:
    """What CP-SAT says: its status, its objective (None without a choice) and its bound.

    All in units of ``Solution.unit``, with each group's smallest loss counted as 0; ``value`` is the solution's own.
    """

    status: str
    objective: int | None
    bound: float
    value: int


def crosscheck(groups: Sequence[Group], limits: Sequence[int], solution: Solution, seconds: float = 60.0) -> CrossCheck:
    """Solve the instance with CP-SAT, in the integers that ``knapsack`` compared, and compare.

    Args:
        seconds: what CP-SAT may take; out of time, its best choice and its bound must still not contradict.

    Raises:
        GacError: the two disagree (both values are named), or the solution breaks a limit.
    """
    instance = reduced(groups, [int(limit) for limit in limits])
    items = instance.items
    chosen = np.flatnonzero(np.asarray(solution.choice)[items.group] == items.origin)
    if len(chosen) != len(groups) or (items.used(chosen) > items.slack).any():
        raise GacError(
            f"the checked choice uses {solution.used}", f"at most {tuple(limits)}", "Report this as a defect of GAC."
        )
    values = to_units(items.values, solution.unit)
    value = int(values[chosen].sum())
    found = _cp_sat(items, values, value, seconds)
    objective, proved = found.objective, solution.certificate.status == "optimal"
    lowest = value if proved else value - solution.certificate.gap / solution.unit
    contradicts = (
        found.status == "INFEASIBLE"
        or (objective is not None and objective < lowest)
        or found.bound > value
        or (found.status == "OPTIMAL" and proved and objective != value)
    )
    if contradicts:
        raise GacError(
            f"CP-SAT ends {found.status} with {objective} (bound {found.bound}) where the knapsack has {value}, "
            f"in units of {solution.unit:g}",
            "the same optimum",
            "Report this as a defect of GAC, with the instance.",
        )
    return found


def _cp_sat(items: Ragged, values: Ints, value: int, seconds: float) -> CrossCheck:
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    able = values <= value
    picks: list[Any] = [model.new_bool_var(f"x{item}") if able[item] else None for item in range(len(items))]
    for start, size in zip(items.starts.tolist(), items.sizes.tolist(), strict=True):
        model.add_exactly_one(pick for pick in picks[start : start + size] if pick is not None)
    kept = [pick for pick in picks if pick is not None]
    for costs, slack in zip(items.costs, items.slack.tolist(), strict=True):
        model.add(cp_model.LinearExpr.weighted_sum(kept, costs[able].tolist()) <= slack)
    model.minimize(cp_model.LinearExpr.weighted_sum(kept, values[able].tolist()))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    status = solver.solve(model)
    has_choice = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    picked = np.array([pick is not None and has_choice and solver.boolean_value(pick) for pick in picks])
    objective = int(values[picked].sum()) if has_choice else None
    return CrossCheck(solver.status_name(status), objective, solver.best_objective_bound, value)
