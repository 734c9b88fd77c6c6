"""A reduced instance through OR-Tools CP-SAT, which proves its optimum in integers."""

from dataclasses import dataclass
from functools import partial

import numpy as np

from gac.allocation.interruptible import interruptible
from gac.allocation.knapsack.ragged import Mask, Ragged
from gac.allocation.knapsack.work import STEPS, Work
from gac.core.arrays import Ints


@dataclass(frozen=True, eq=False)
class Answer:
    """CP-SAT's status by name, its choice (one item position a group) or None, and its bound (a float, not a proof)."""

    status: str
    choice: Ints | None
    bound: float


def cp_sat(items: Ragged, work: Work, hint: Mask | None = None) -> Answer:
    """Minimise the sum of integer values within the slack, starting from the ``hint`` (which items it takes).

    Its presolve is off: with it, version 9.15 was seen to prove a wrong optimum on an instance with huge costs.

    The status is ``MODEL_INVALID`` where the sum of all values, or of all costs under a limit, does not fit int64.
    """
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    picks = [model.new_bool_var(f"x{item}") for item in range(len(items))]
    for start, size in zip(items.starts.tolist(), items.sizes.tolist(), strict=True):
        model.add_exactly_one(picks[start : start + size])
    for costs, slack in zip(items.costs.tolist(), items.slack.tolist(), strict=True):
        model.add(cp_model.LinearExpr.weighted_sum(picks, costs) <= slack)
    model.minimize(cp_model.LinearExpr.weighted_sum(picks, items.values.tolist()))
    for pick, taken in zip(picks, [] if hint is None else hint.tolist(), strict=hint is not None):
        model.add_hint(pick, taken)
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time = work.left
    solver.parameters.num_workers = 1
    solver.parameters.cp_model_presolve = False
    solver.parameters.catch_sigint_signal = False
    status = interruptible(partial(solver.solve, model), solver.stop_search)
    work.steps += int(solver.response_proto.deterministic_time * STEPS)
    choice = None
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        choice = np.flatnonzero([bool(solver.boolean_value(pick)) for pick in picks])
    return Answer(solver.status_name(status), choice, solver.best_objective_bound)
