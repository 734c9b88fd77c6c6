"""Of the choices that lose hardly more than the least, the fastest: beside every choice there is."""

from dataclasses import replace
from itertools import product
from math import fsum

import numpy as np
import pytest

from gac.allocation.crosscheck import verified
from gac.allocation.decide import Decision, decide, speed_defaults
from gac.allocation.feasibility import check_reachable
from gac.allocation.problem import Problem
from gac.core.errors import BudgetError
from gac.plan.plan import Plan
from tests.allocation.small_problems import DECODE, PREFILL, asking, problem

SITES, RANKS = 3, 5


def _random(seed: int) -> Problem:
    rng = np.random.default_rng(seed)
    losses = -np.sort(-rng.integers(0, 30, (SITES, RANKS)) * 0.01, axis=1)
    return problem(losses.tolist(), rng.integers(1, 40, RANKS + 1).tolist())


def _open(of: Problem, budget: float, **options: object) -> Problem:
    asked = asking(of, budget, **options)
    return replace(asked, recipe=speed_defaults(asked.recipe, asked.sites, asked.profile))


def _every_choice(of: Problem) -> list[tuple[int, float, tuple[int, ...]]]:
    """Parameters, loss and ns of each."""
    everything = replace(of, recipe=replace(of.recipe, space=replace(of.recipe.space, align=False)))
    sets = everything.candidates(["params", f"ns:{PREFILL}", f"ns:{DECODE}", "kv_numbers"])
    result = []
    for items in product(*(range(len(rows)) for rows in sets)):
        taken = [rows.candidate(item) for rows, item in zip(sets, items, strict=True)]
        ns = tuple(map(sum, zip(*(each.latency_ns for each in taken), strict=True)))
        result.append((sum(each.params for each in taken), fsum(each.loss for each in taken), ns))
    return result


def test_nothing_within_the_limits_and_the_slack_is_faster() -> None:
    for seed in range(24):
        of = _random(seed)
        budget, slack = [0.4, 0.6, 0.8][seed % 3], [0.01, 0.1, 0.5, 1.0][seed % 4]
        asked = _open(of, budget, slack=slack, latency="any" if seed % 2 else None)
        dense = [ns for ns in asked.dense.latency_ns if ns]
        most = dense if seed % 2 == 0 else [10**9] * 2
        limit = int(budget * asked.params + 1e-9)
        allowed = [each for each in _every_choice(of) if each[0] <= limit and all(map(int.__le__, each[2], most))]
        if not allowed:
            with pytest.raises(BudgetError):
                decide(asked)
            continue
        plan = decide(asked).plan
        least = min(loss for _, loss, _ in allowed)
        assert plan.speed is not None
        assert plan.speed.loss == plan.certificate.value == pytest.approx(least, abs=1e-12)
        assert plan.prediction.loss <= least * (1 + slack) + 1e-12
        fastest = min(
            sum(ns / full for ns, full in zip(taken, dense, strict=True))
            for _, loss, taken in allowed
            if loss <= least * (1 + slack) - 1e-12 or loss <= least
        )
        proof = plan.speed.certificate
        assert proof.status == "optimal"
        assert proof.value <= fastest + 1e-12
        assert proof.value == pytest.approx(sum(each.plan_ns / each.dense_ns for each in plan.workloads))


def _losing() -> Problem:
    """The least loss at 0.8 takes slow ranks; hardly more loss takes fast ones."""
    return problem([[0.5, 0.4, 0.3, 0.2, 0.01]] * SITES, [1, 2, 3, 4, 9, 6], workloads=[PREFILL])


def test_no_workload_is_slower_than_dense_unless_asked() -> None:
    free = decide(_open(_losing(), 0.8, latency="any", slack=0)).plan
    kept = decide(_open(_losing(), 0.8, slack=0)).plan
    assert free.recipe.limits.latency == {}
    assert kept.recipe.limits.latency == {PREFILL: 1.0}
    slower = [[each.plan_ns > each.dense_ns for each in plan.workloads] for plan in (free, kept)]
    assert any(slower[0])
    assert not any(slower[1])


def test_both_proofs_are_checked() -> None:
    decision: Decision = decide(_open(_losing(), 0.8, slack=0.5))
    plan: Plan = verified(decision)
    assert plan.speed is not None
    assert all("HiGHS agrees" in proof.method for proof in (plan.certificate, plan.speed.certificate))


def test_a_budget_that_is_only_kept_slower_names_the_smallest_that_is_not() -> None:
    asked = _open(problem([[0.5, 0.3, 0.2, 0.1, 0.0]] * SITES, [20, 20, 20, 20, 9, 10], workloads=[PREFILL]), 0.7)
    with pytest.raises(BudgetError, match=r"no workload slower than the dense model; expected at least \d+") as raised:
        check_reachable(asked.sites, asked.recipe, asked.profile)
    least = float(str(raised.value).partition("Ask for a budget of ")[2].split()[0])
    fitting = _open(asked, least)
    check_reachable(fitting.sites, fitting.recipe, fitting.profile)
    assert decide(fitting).plan.budget.kept == pytest.approx(least, abs=1e-6)
