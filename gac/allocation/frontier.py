"""The frontier: the choice of least loss for the whole range of limits, each with its proof.

The sum of the losses is minimised, as in a plan; the loss beyond the sum is in the prediction of each point.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from gac.allocation.candidate_set import CandidateSet, pareto_optimal
from gac.allocation.candidates import dense_candidate
from gac.allocation.dense import DenseModel
from gac.allocation.feasibility import check_shrinks_cache
from gac.allocation.frontier_record import SCHEMA, Frontier, FrontierPoint, SiteOptions, point_of
from gac.allocation.knapsack import Group, Solution
from gac.allocation.problem import Problem, as_knapsack
from gac.allocation.same_sizes import in_model_order
from gac.allocation.split_latencies import check_collectives
from gac.core.errors import BudgetError, GacError
from gac.core.version import __version__
from gac.models.sites import Site
from gac.plan.costs import COSTS, KV_NUMBERS, PARAMS, floored, ns_of
from gac.plan.recipe import Recipe
from gac.profiling.table import Profile

__all__ = ["PARAMS", "Frontier", "FrontierPoint", "check_frontier_recipe", "check_limited", "frontier"]

_STEPS = 10**6
_COLUMNS = {"budget": PARAMS, **{cost.limit: cost.name for cost in COSTS.values()}}
"""Cost columns by the names of their limits in recipes."""


def frontier(problem: Problem, *, points: int = 100, limit: str = PARAMS) -> Frontier:
    """Find the least loss within each of ``points`` limits, from the smallest that can be met up.

    The steps are even, and end at the smallest limit beyond which nothing is gained (normally everything dense). A
    limit whose best choice loses no less than that of a smaller limit gets no point, so there may be fewer points than
    asked for, and the sum of losses falls strictly from point to point.

    Args:
        points: number of limits, at least 2; each is a whole number of millionths of the dense amount.
        limit: ``params``, ``bytes``, ``kv_numbers`` (some form has to make it smaller, see ``check_limited``), or
            the workload whose latency is limited. A choice never has more parameters than the dense model.

    Raises:
        BudgetError: fewer than 2 points, or a limit on something that is none of the workloads.
        ProfileError: a latency is limited, and the profile lacks it.
    """
    check_frontier_recipe(points, limit, problem.recipe)
    column = limit if limit in COSTS else ns_of(limit)
    dense, rest_ns = problem.dense.amount(column, problem.recipe), problem.dense.rest_ns
    fixed = {PARAMS: problem.params} if column != PARAMS and problem.may_outgrow else {}
    columns = [*fixed, column]
    sets = [pareto_optimal(rows.pick(rows.known(columns)), columns) for rows in problem.candidates(columns)]
    solved = list(_solve(sets, fixed, column, dense, problem.dense.rest_of(column), points))
    sites, options, by_set = [], [], []
    picked_rows = zip(*(solution.choice for _, _, solution in solved), strict=True)
    for rows, picked in zip(sets, picked_rows, strict=True):
        used = sorted(set(picked))
        chosen = [used.index(row) for row in picked]
        by_set.append([(candidates, chosen) for candidates in zip(*map(rows.of_sites, used), strict=True)])
    for site, (candidates, choice) in zip(problem.sites, in_model_order(sets, by_set), strict=True):
        sites.append(SiteOptions(site, dense_candidate(site, problem.timing).candidate(0), candidates))
        options.append(choice)
    frontier_points = []
    for (asked, most, solution), at in zip(solved, zip(*options, strict=True), strict=True):
        beyond = problem.loss_beyond_sum([site.options[option] for site, option in zip(sites, at, strict=True)])
        point = point_of(asked, most, at, sites, problem.measured, solution.certificate, beyond, rest_ns)
        frontier_points.append(point)
    measured = problem.evidence([option for site in sites for option in site.options])
    return Frontier(
        SCHEMA,
        __version__,
        problem.recipe,
        measured,
        limit,
        tuple(sites),
        tuple(frontier_points),
        problem.dense.latency_ns,
        rest_ns,
    )


def check_frontier_recipe(points: int, limit: str, recipe: Recipe) -> None:
    """Refuse a recipe that no frontier can be computed for, before anything is measured.

    Raises:
        BudgetError: fewer than 2 points, an unknown limit, or a recipe with a further limit.
        GacError: a recipe whose rule is not ``loss``.
    """
    if isinstance(points, bool) or not isinstance(points, (int, np.integer)) or points < 2:
        raise BudgetError(f"{points!r} points", "a whole number, 2 or more", "Ask for 100 points.")
    workloads, limits, known = recipe.deployment.workloads, recipe.limits, _COLUMNS.get(limit)
    if limit not in (*COSTS, *workloads):
        raise BudgetError(
            f"a frontier over {limit!r}",
            f"{', '.join(COSTS)} or one of the workloads ({', '.join(workloads) or 'none'})",
            f"Did you mean {known!r}?" if known else "Name one of these, or add it to the workloads.",
        )
    for name in (*(cost.limit for cost in COSTS.values() if cost.name != PARAMS), "latency"):
        if getattr(limits, name):
            stated = f"a frontier with limits.{name}={getattr(limits, name)!r}"
            raise BudgetError(stated, "no limit but the one that rises", f"Leave {name} out, or use gac.allocate.")
    if recipe.rule != "loss":
        raise GacError(f"a frontier by rule {recipe.rule}", "rule loss", "Use gac.allocate for the other rules.")
    if recipe.measure.balance == "worst":
        problem = "a frontier whose worst text loses least: every point has other weights of the texts"
        raise GacError(problem, "balance='mean' or None", "Use gac.allocate for balance='worst'.")


def check_limited(sites: Sequence[Site], profile: Profile, recipe: Recipe, limit: str) -> None:
    """Refuse a frontier over a latency that the profile lacks, or over a cache that no form makes smaller."""
    if limit == KV_NUMBERS:
        check_shrinks_cache(sites, recipe)
    if limit not in COSTS:
        if recipe.deployment.tensor_parallel > 1:
            check_collectives(profile, recipe.deployment, sites)
        DenseModel.of(sites, profile, recipe.deployment).amount(ns_of(limit), recipe)


def _solve(
    sets: Sequence[CandidateSet], fixed: Mapping[str, int], column: str, dense: int, rest: int, points: int
) -> Iterator[tuple[float, int, Solution]]:
    """Each limit, as a fraction and in its integers, with its exact choice, where that loses less than those before.

    Limits rise by even steps, in millionths, from the smallest sum of costs to that of the choice of least loss. All
    choices share the rest, which limits count too.
    """
    instance, start = as_knapsack(sets, {**fixed, column: dense - rest}), None
    smallest, largest = _ends(sets, fixed, column)
    first, last = (-(-(cost + rest) * _STEPS // dense) for cost in (smallest, largest))
    before = np.inf
    for step in dict.fromkeys(first + (last - first) * number // (points - 1) for number in range(points)):
        limit = floored(step / _STEPS, dense)
        solution = replace(instance, limits={**fixed, column: limit - rest}).solve(start)
        start = solution.choice
        if solution.certificate.value < before:
            before = solution.certificate.value
            yield step / _STEPS, limit, solution


def _ends(sets: Sequence[CandidateSet], fixed: Mapping[str, int], column: str) -> tuple[int, int]:
    costs = [rows.cost(column) for rows in sets]
    cheapest: Sequence[int] = [int(cost.argmin()) for cost in costs]
    best: Sequence[int] = [int(rows.loss.argmin()) for rows in sets]
    if fixed:
        instance = as_knapsack(sets, fixed)
        groups = zip(instance.groups, costs, strict=True)
        cheap = tuple(Group(group.name, cost.astype(np.float64), group.costs) for group, cost in groups)
        cheapest, best = replace(instance, groups=cheap).solve().choice, instance.solve().choice
    smallest, largest = (
        sum(int(cost[row]) for cost, row in zip(costs, choice, strict=True)) for choice in (cheapest, best)
    )
    return smallest, largest
