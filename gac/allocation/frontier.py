"""The frontier: for the whole range of budgets at once, the choice that loses least, each with its own proof.

What is least is the sum of the losses, as in a plan. What choices lose together is in the prediction of each.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from gac.allocation.candidate_set import CandidateSet
from gac.allocation.candidates import dense_candidate
from gac.allocation.feasibility import check_shrinks_cache
from gac.allocation.frontier_record import SCHEMA, Frontier, FrontierPoint, SiteOptions, sums
from gac.allocation.knapsack import Group, Solution
from gac.allocation.pareto import front
from gac.allocation.problem import Problem, as_knapsack, dense_total
from gac.allocation.split_latencies import check_collectives, timing_of
from gac.core.errors import BudgetError, GacError
from gac.core.version import __version__
from gac.models.sites import Site
from gac.plan.costs import COSTS, KV_NUMBERS, PARAMS, column_of, floored, ns_of
from gac.plan.recipe import Recipe
from gac.profiling.table import Profile

__all__ = ["PARAMS", "Frontier", "FrontierPoint", "check_asked", "check_limited", "frontier"]

_STEPS = 10**6
_COLUMNS = {"budget": PARAMS, **{cost.limit: cost.name for cost in COSTS.values()}}
"""Cost columns by the names of their limits in recipes."""


def frontier(problem: Problem, *, points: int = 100, limit: str = PARAMS) -> Frontier:
    """The least loss within each of ``points`` limits, from the smallest that can be met up.

    The steps are even, and end at the smallest limit beyond which nothing is gained (normally everything dense). The
    candidates are made once, and reduced to those that matter under this one limit. A limit whose best choice loses no
    less than that of a smaller limit gets no point: the earlier choice is as good there. So there may be fewer points
    than asked for, and the sum of losses falls strictly from point to point.

    Args:
        points: how many limits, at least 2; each is a whole number of millionths of the dense amount.
        limit: ``params``, ``bytes``, ``kv_numbers`` (some form has to make it smaller, see ``check_limited``), or
            the workload whose latency is limited. A choice never has more parameters than the dense model.

    Raises:
        BudgetError: fewer than 2 points, or a limit on something that is none of the workloads.
        ProfileError: a latency is limited, and the profile lacks it.
    """
    check_asked(points, limit, problem.recipe)
    column = column_of(limit)
    dense = dense_total(problem.dense, column)
    besides = {PARAMS: problem.params} if column != PARAMS and problem.may_outgrow else {}
    columns = [*besides, column]
    sets = [_that_matter(rows, columns) for rows in problem.candidates(columns)]
    solved = list(_solve(sets, besides, column, dense, points))
    sites, options = [], []
    for at, (site, whole, rows) in enumerate(zip(problem.sites, problem.dense, sets, strict=True)):
        picked = [solution.choice[at] for _, _, solution in solved]
        used = sorted(set(picked))
        sites.append(SiteOptions(site, whole.candidate(0), tuple(map(rows.candidate, used))))
        options.append([used.index(row) for row in picked])
    made = []
    for (asked, most, solution), choice in zip(solved, zip(*options, strict=True), strict=True):
        taken = [site.options[at] for site, at in zip(sites, choice, strict=True)]
        together = problem.together(taken)
        params, loss, latency = sums(taken, problem.measured, together)
        perplexity = problem.measured.perplexity(loss)
        proof = solution.certificate
        made.append(FrontierPoint(asked, most, params, loss, perplexity, latency, choice, proof, together))
    measured = problem.evidence([option for site in sites for option in site.options])
    fused = tuple(problem.fused_ns)
    return Frontier(SCHEMA, __version__, problem.recipe, measured, limit, tuple(sites), tuple(made), fused)


def check_asked(points: int, limit: str, recipe: Recipe) -> None:
    """Refuse what no frontier can be made for, before anything is measured.

    Raises:
        BudgetError: fewer than 2 points, a limit that is none of ``params``, ``bytes``, ``kv_numbers`` and the
            workloads, or a recipe that limits something else besides.
        GacError: a recipe whose rule is not ``loss``.
    """
    if isinstance(points, bool) or not isinstance(points, (int, np.integer)) or points < 2:
        raise BudgetError(f"{points!r} points", "a whole number, 2 or more", "Ask for 100 points.")
    workloads, limits = recipe.deployment.workloads, recipe.limits
    if limit not in (*COSTS, *workloads):
        raise BudgetError(
            f"a frontier over {limit!r}",
            f"{', '.join(COSTS)} or one of the workloads ({', '.join(workloads) or 'none'})",
            f"Did you mean {_COLUMNS[limit]!r}?"
            if limit in _COLUMNS
            else "Name one of these, or add it to the workloads.",
        )
    for name in (*(cost.limit for cost in COSTS.values() if cost.name != PARAMS), "latency"):
        if getattr(limits, name):
            given = f"a frontier with limits.{name}={getattr(limits, name)!r}"
            raise BudgetError(given, "one limit, which is gone through", f"Leave {name} out, or use gac.allocate.")
    if recipe.rule != "loss":
        raise GacError(f"a frontier by rule {recipe.rule}", "rule loss", "Use gac.allocate for the other rules.")


def check_limited(sites: Sequence[Site], profile: Profile, recipe: Recipe, limit: str) -> None:
    """Refuse a frontier over a latency that the profile does not know, or over a cache that no form makes smaller.

    Raises:
        BudgetError: no form makes the KV cache smaller.
        ProfileError: names the first site that lacks it, or the collectives of a split model.
    """
    if limit == KV_NUMBERS:
        check_shrinks_cache(sites, recipe)
    if limit not in COSTS:
        check_collectives(profile, recipe.deployment, sites)
        timing = timing_of(profile, recipe.deployment)
        dense_total([dense_candidate(site, timing) for site in sites], ns_of(limit))


def _that_matter(rows: CandidateSet, columns: Sequence[str]) -> CandidateSet:
    """The candidates that no other one beats or equals in costs and loss; of equals the first."""
    known = rows.at(rows.known(columns))
    return known.at(front(np.column_stack([*map(known.cost, columns), known.loss])))


def _solve(
    sets: Sequence[CandidateSet], besides: Mapping[str, int], column: str, dense: int, points: int
) -> Iterator[tuple[float, int, Solution]]:
    """Each limit, as a fraction and as it is, with its exact choice, where that loses less than those before.

    Limits rise by even steps, in millionths, from the smallest sum of costs to that of the choice of least loss.

    Args:
        besides: limits that are always there, by cost column; they come before the one that rises.
        dense: what the rising limit is a fraction of.
    """
    instance, start = as_knapsack(sets, {**besides, column: dense}), None
    smallest, largest = _ends(sets, besides, column)
    first, last = (-(-cost * _STEPS // dense) for cost in (smallest, largest))
    before = np.inf
    for step in dict.fromkeys(first + (last - first) * at // (points - 1) for at in range(points)):
        limit = floored(step / _STEPS, dense)
        solution = replace(instance, limits={**besides, column: limit}).solve(start)
        start = solution.choice
        if solution.certificate.value < before:
            before = solution.certificate.value
            yield step / _STEPS, limit, solution


def _ends(sets: Sequence[CandidateSet], besides: Mapping[str, int], column: str) -> tuple[int, int]:
    """What the cheapest choice takes of a cost column, and the one of least loss; both keep the limits besides."""
    costs = [rows.cost(column) for rows in sets]
    choices: Sequence[Sequence[int]]
    if besides:
        instance = as_knapsack(sets, besides)
        cheap = [
            Group(one.name, cost.astype(np.float64), one.costs)
            for cost, one in zip(costs, instance.groups, strict=True)
        ]
        choices = [replace(instance, groups=tuple(groups)).solve().choice for groups in (cheap, instance.groups)]
    else:
        choices = [[int(cost.argmin()) for cost in costs], [int(rows.loss.argmin()) for rows in sets]]
    smallest, largest = (sum(int(cost[at]) for cost, at in zip(costs, one, strict=True)) for one in choices)
    return smallest, largest
