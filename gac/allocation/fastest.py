"""The fastest choice within limits of parameters and loss: the knapsack with latency as what is minimised."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import fsum

import numpy as np

from gac.allocation.assemble import weight_choices
from gac.allocation.candidates import CandidateSet
from gac.allocation.costs import PARAMS, ns_of
from gac.allocation.knapsack import Group, knapsack
from gac.allocation.latencies import UNKNOWN
from gac.allocation.limits import budget_limit, latency_limits
from gac.allocation.problem import Problem
from gac.errors import BudgetError
from gac.plan import WeightChoice

_LOSS_UNITS = 10**9
_HALVINGS = 12
_COARSE = 64


@dataclass(frozen=True, eq=False)
class Fastest:
    """A choice, and what it takes.

    Attributes:
        choices: form and dim of every weight, in model order.
        ns: latency of the one workload.
        loss: nats a token.
        proved: whether no choice within the limits is faster.
    """

    choices: tuple[WeightChoice, ...]
    ns: int
    params: int
    loss: float
    proved: bool


def fastest(problem: Problem, budget: float, workload: str, most_loss: float) -> Fastest:
    """The choice of least latency within the budget that loses at most ``most_loss``.

    First without the limit on parameters, exactly: where that choice keeps the budget, none is faster. Otherwise
    parameters are charged for, at a price per parameter in ns that is bisected until the budget is kept, among dims
    that are multiples of 64; that is not proved.

    Args:
        workload: whose latency.
        most_loss: nats a token; compared in whole nano-nats, each candidate's rounded up.

    Raises:
        BudgetError: no choice within the budget loses as little, or the workload is none of the problem's.
        ProfileError: the profile lacks the latency of a dense site.
    """
    limit, most = budget_limit(budget, problem.params), int(most_loss * _LOSS_UNITS)
    latency_limits(problem.dense, problem.workloads, {workload: 1.0})
    column = problem.column(workload)
    found = _cheapest(problem, _sets(problem, column, params=False), column, most, 0.0)
    if found.params <= limit:
        return replace(found, proved=True)
    coarse = replace(problem, align=_COARSE)
    sets = _sets(coarse, column, params=True)
    low, high, best = 0.0, _highest_price(sets, column), None
    for _ in range(_HALVINGS):
        price = high if best is None else (low + high) / 2
        found = _cheapest(coarse, sets, column, most, price)
        if found.params <= limit:
            best, high = found, price
        elif best is None:
            raise BudgetError(
                f"budget {budget:g} with a loss of at most {most_loss:.6g}",
                f"{found.params} parameters or more for that loss, {limit} are allowed",
                "Allow more loss, or more parameters.",
            )
        else:
            low = price
    assert best is not None
    return best


def _sets(problem: Problem, column: int, params: bool) -> list[CandidateSet]:
    sets = problem.candidates((*([PARAMS] if params else []), ns_of(problem.workloads[column])))
    return [rows.at(rows.latency[:, column] != UNKNOWN) for rows in sets]


def _highest_price(sets: Sequence[CandidateSet], column: int) -> float:
    """ns a parameter at which parameters alone count."""
    return float(max(rows.latency[:, column].max() for rows in sets))


def _cheapest(problem: Problem, sets: Sequence[CandidateSet], column: int, most: int, price: float) -> Fastest:
    """The least latency and price of parameters within the loss."""
    groups = [
        Group(
            rows.site,
            rows.latency[:, column] + price * rows.params,
            np.ceil(rows.loss * _LOSS_UNITS).astype(np.int64)[:, None],
        )
        for rows in sets
    ]
    solution = knapsack(groups, [most], names=["the loss limit in nano-nats"])
    chosen = [rows.row(item) for rows, item in zip(sets, solution.choice, strict=True)]
    choices = tuple(choice for pair in zip(problem.sites, chosen, strict=True) for choice in weight_choices(*pair))
    ns = sum(int(row.latency[0, column]) for row in chosen)
    return Fastest(choices, ns, sum(int(row.params[0]) for row in chosen), fsum(row.loss[0] for row in chosen), False)
