"""The fastest choice within limits of parameters and loss: the knapsack with latency as what is minimised."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import fsum

import numpy as np

from gac.allocation.candidates import CandidateSet
from gac.allocation.knapsack import Group, knapsack
from gac.allocation.latencies import UNKNOWN
from gac.allocation.limits import dense_total, floored
from gac.allocation.problem import Problem
from gac.costs import PARAMS, ns_of
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
    """

    choices: tuple[WeightChoice, ...]
    ns: int
    params: int
    loss: float


def fastest(problem: Problem, workload: str, most_loss: float) -> Fastest:
    """The choice of least latency within the recipe's budget that loses at most ``most_loss``.

    First without the limit on parameters, exactly: where that choice keeps the budget, none is faster. Otherwise
    parameters are charged for, at a price per parameter in ns that is bisected until the budget is kept, among dims
    that are multiples of 64; that is not proved.

    Args:
        workload: whose latency, one of the problem's.
        most_loss: nats a token; compared in whole nano-nats, each candidate's rounded up.

    Raises:
        BudgetError: no choice within the budget loses as little.
        ProfileError: the profile lacks the latency of a dense site.
    """
    budget, column = problem.recipe.limits.budget, ns_of(workload)
    limit, most = floored(budget, problem.params), int(most_loss * _LOSS_UNITS)
    dense_total(problem.dense, column)
    found = _cheapest(problem, _sets(problem, [column]), column, most, 0.0)
    if found.params <= limit:
        return found
    coarse = replace(problem, recipe=replace(problem.recipe, space=replace(problem.recipe.space, align=_COARSE)))
    sets = _sets(coarse, [PARAMS, column])
    low, best = 0.0, None
    high = float(max(rows.cost(column).max() for rows in sets))  # ns a parameter at which parameters alone count
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


def _sets(problem: Problem, columns: Sequence[str]) -> list[CandidateSet]:
    """The candidates that matter in these columns, all of them known."""
    sets = problem.candidates(columns)
    return [rows.at(rows.cost(columns[-1]) != UNKNOWN) for rows in sets]


def _cheapest(problem: Problem, sets: Sequence[CandidateSet], column: str, most: int, price: float) -> Fastest:
    """The least latency and price of parameters within the loss."""
    groups = [
        Group(
            rows.site,
            rows.cost(column) + price * rows.params,
            np.ceil(rows.loss * _LOSS_UNITS).astype(np.int64)[:, None],
        )
        for rows in sets
    ]
    solution = knapsack(groups, [most], names=["the loss limit in nano-nats"])
    chosen = [rows.candidate(item) for rows, item in zip(sets, solution.choice, strict=True)]
    return Fastest(
        tuple(choice for site, one in zip(problem.sites, chosen, strict=True) for choice in one.choices(site.weights)),
        sum(int(rows.cost(column)[item]) for rows, item in zip(sets, solution.choice, strict=True)),
        sum(one.params for one in chosen),
        fsum(one.loss for one in chosen),
    )
