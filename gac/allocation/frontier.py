"""The frontier: for the whole range of budgets at once, the choice that loses least, each with its own proof."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum

import numpy as np

from gac.allocation.assemble import predicted_perplexity
from gac.allocation.candidates import CandidateSet, candidate_of, dense_candidate
from gac.allocation.frontier_record import (
    SCHEMA,
    Frontier,
    FrontierPoint,
    SiteOptions,
    summed_latency,
)
from gac.allocation.knapsack import Group, knapsack
from gac.allocation.latencies import UNKNOWN
from gac.allocation.limits import dense_total, floored, name_of
from gac.allocation.pareto import front
from gac.allocation.problem import Problem
from gac.arrays import Ints
from gac.costs import PARAMS, ns_of
from gac.errors import BudgetError, GacError
from gac.models.sites import Site
from gac.plan import Certificate, Measured
from gac.profiling.table import Profile
from gac.recipe import Recipe
from gac.version import __version__

__all__ = ["PARAMS", "Frontier", "FrontierPoint", "check_asked", "check_profiled", "frontier"]

_STEPS = 10**6


@dataclass(frozen=True, eq=False)
class _Range:
    """What is limited, ready to be solved for any limit.

    Attributes:
        groups: the candidates that matter under this one limit.
        rows: for each group, where its items stand in the site's candidate set.
        name: the limit in an error.
        dense: what the limits are fractions of.
    """

    groups: list[Group]
    rows: list[Ints]
    name: str
    dense: int


@dataclass(frozen=True)
class _Solved:
    asked: float
    limit: int
    chosen: tuple[int, ...]
    certificate: Certificate


def frontier(problem: Problem, *, points: int = 100, limit: str = PARAMS) -> Frontier:
    """The least loss within each of ``points`` limits, from the smallest that can be met up.

    The steps are even, and end at the smallest limit beyond which nothing is gained (normally everything dense). The
    candidates are made once, and reduced to those that matter under this one limit. A limit whose best choice loses no
    less than that of a smaller limit gets no point: the earlier choice is as good there. So there may be fewer points
    than asked for, and the loss falls strictly from point to point.

    Args:
        points: how many limits, at least 2; each is a whole number of millionths of the dense amount.
        limit: ``params``, or the workload whose latency is limited (parameters are then not).

    Raises:
        BudgetError: fewer than 2 points, or a limit on something that is none of the workloads.
        ProfileError: a latency is limited, and the profile lacks it.
    """
    check_asked(points, limit, problem.recipe)
    column = _column(limit)
    dense = dense_total(problem.dense, column)
    sets = problem.candidates([column])
    limited = _range(sets, column, dense)
    solved = _solve(limited, _fractions(limited, points))
    sites, choices = _options(problem, sets, [one.chosen for one in solved])
    return Frontier(
        schema_version=SCHEMA,
        gac_version=__version__,
        recipe=problem.recipe,
        measured=problem.measured,
        limit=limit,
        sites=sites,
        points=tuple(_point(one, sites, at, problem.measured) for one, at in zip(solved, choices, strict=True)),
    )


def check_asked(points: int, limit: str, recipe: Recipe) -> None:
    """Refuse what no frontier can be made for, before anything is measured.

    Raises:
        BudgetError: fewer than 2 points, a limit that is neither ``params`` nor one of the workloads, or a recipe that
            limits something else besides.
        GacError: a recipe whose rule is not ``loss``.
    """
    if isinstance(points, bool) or not isinstance(points, (int, np.integer)) or points < 2:
        raise BudgetError(f"{points!r} points", "a whole number, 2 or more", "Ask for 100 points.")
    workloads, limits = recipe.deployment.workloads, recipe.limits
    if limit != PARAMS and limit not in workloads:
        raise BudgetError(
            f"a frontier over {limit!r}",
            f"params or one of the workloads ({', '.join(workloads) or 'none'})",
            "Name one of these, or add it to the workloads.",
        )
    for name in ("memory", "kv_cache", "latency"):
        if getattr(limits, name):
            given = f"a frontier with limits.{name}={getattr(limits, name)!r}"
            raise BudgetError(given, "one limit, which is gone through", f"Leave {name} out, or use gac.allocate.")
    if recipe.rule != "loss":
        raise GacError(f"a frontier by rule {recipe.rule}", "rule loss", "Use gac.allocate for the other rules.")


def check_profiled(sites: Sequence[Site], profile: Profile, recipe: Recipe, limit: str) -> None:
    """Refuse a frontier over a latency that the profile does not know for the dense sites.

    Raises:
        ProfileError: names the first site that lacks it.
    """
    if limit != PARAMS:
        workloads = recipe.deployment.parsed
        dense = [dense_candidate(site, profile=profile, workloads=workloads) for site in sites]
        dense_total(dense, ns_of(limit))


def _column(limit: str) -> str:
    return PARAMS if limit == PARAMS else ns_of(limit)


def _range(sets: Sequence[CandidateSet], column: str, dense: int) -> _Range:
    """Of each site the candidates that no other one beats or equals in cost and loss; of equals the first."""
    groups, rows = [], []
    for candidates in sets:
        cost = candidates.cost(column)
        known = np.flatnonzero(cost != UNKNOWN)
        kept = known[front(np.column_stack([cost[known], candidates.loss[known]]))]
        groups.append(Group(candidates.site, candidates.loss[kept], cost[kept, None]))
        rows.append(kept)
    return _Range(groups, rows, name_of(column), dense)


def _fractions(limited: _Range, points: int) -> list[float]:
    """Even steps, in millionths, from the smallest sum of costs to that of every site at its smallest loss."""
    smallest = sum(int(group.costs.min()) for group in limited.groups)
    largest = sum(int(group.costs[group.values.argmin(), 0]) for group in limited.groups)
    first, last = (-(-cost * _STEPS // limited.dense) for cost in (smallest, largest))
    steps = dict.fromkeys(first + (last - first) * at // (points - 1) for at in range(points))
    return [step / _STEPS for step in steps]


def _solve(limited: _Range, fractions: Sequence[float]) -> list[_Solved]:
    """Exactly, one limit after the other; only choices that lose less than those before."""
    solved: list[_Solved] = []
    for asked in fractions:
        limit = floored(asked, limited.dense)
        solution = knapsack(limited.groups, [limit], names=[limited.name])
        if not solved or solution.certificate.value < solved[-1].certificate.value:
            chosen = tuple(int(rows[item]) for rows, item in zip(limited.rows, solution.choice, strict=True))
            solved.append(_Solved(asked, limit, chosen, solution.certificate))
    return solved


def _options(
    problem: Problem, sets: Sequence[CandidateSet], chosen: Sequence[tuple[int, ...]]
) -> tuple[tuple[SiteOptions, ...], list[tuple[int, ...]]]:
    """Each site's candidates that are chosen anywhere, written down once, and every point's choice among them."""
    sites, columns = [], []
    for site, dense, rows, picked in zip(problem.sites, problem.dense, sets, zip(*chosen, strict=True), strict=True):
        used = sorted(set(picked))
        place = {row: index for index, row in enumerate(used)}
        sites.append(SiteOptions(site, candidate_of(dense, 0), tuple(candidate_of(rows, row) for row in used)))
        columns.append([place[row] for row in picked])
    return tuple(sites), list(zip(*columns, strict=True))


def _point(one: _Solved, sites: Sequence[SiteOptions], choice: tuple[int, ...], measured: Measured) -> FrontierPoint:
    options = [site.options[at] for site, at in zip(sites, choice, strict=True)]
    loss = fsum(option.loss for option in options)
    return FrontierPoint(
        asked=one.asked,
        limit=one.limit,
        params=sum(option.params for option in options),
        loss=loss,
        perplexity=predicted_perplexity(measured, loss),
        latency_ns=summed_latency(options),
        choice=choice,
        certificate=one.certificate,
    )
