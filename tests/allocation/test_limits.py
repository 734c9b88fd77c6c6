from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from small_problems import PREFILL, problem, profile, rows

from gac.allocation.knapsack import Solution, knapsack
from gac.allocation.problem import as_knapsack
from gac.core.errors import BudgetError
from gac.plan.costs import PARAMS, floored, ns_of
from gac.plan.recipe import Recipe

UNKNOWN = "decode:4@8"
TWO = problem([[8, 4, 2, 1, 0.5], [6, 3, 1.5, 0.75, 0.375]], [10, 20, 30, 40, 50, 60], [PREFILL, UNKNOWN])


@pytest.mark.parametrize(
    ("budget", "total", "limit"),
    [
        (0.8, 106168320, 84934656),
        (0.29, 100, 29),
        (0.57, 100, 57),
        (0.1 + 0.2, 10, 3),
        (0.7, 10, 7),
        (1, 7, 7),
        (1.0, 10**18 + 1, 10**18 + 1),
        (np.float32(0.5), 9, 4),
        (1e-9, 10**9, 1),
    ],
)
def test_a_budget_is_floored_exactly(budget: float, total: int, limit: int) -> None:
    assert floored(budget, total) == limit


@pytest.mark.parametrize(
    ("limits", "stated"),
    [
        ({PARAMS: 47}, "the limit of parameters of 47 cannot be met: it falls short by 1"),
        (
            {PARAMS: 288, ns_of(PREFILL): 19},
            "the latency limit in ns for prefill:1x8 of 19 cannot be met: it falls short by 1",
        ),
    ],
)
def test_a_limit_that_cannot_be_met_is_named(limits: dict[str, int], stated: str) -> None:
    with pytest.raises(BudgetError) as caught:
        as_knapsack(TWO.candidates(limits), limits).solve()
    assert caught.value.given == stated


def test_a_candidate_of_unknown_latency_is_left_out() -> None:
    lacking = [row for row in rows(8, [10, 20, 30, 40, 50, 60]) if row.shape.get("r", 0) < 4]
    of, limits = replace(TWO, profile=profile(lacking)), {PARAMS: 144, ns_of(PREFILL): 120}
    instance = as_knapsack(of.candidates(limits), limits)
    assert [group.costs[:, 0].tolist() for group in instance.groups] == [[24, 48, 72, 144]] * 2
    assert [each.dims for each in instance.chosen(instance.solve())] == [(3,), (3,)]


@pytest.mark.parametrize(("close", "proofs"), [(1.0, ["feasible"]), (0.0, ["feasible", "optimal"])])
def test_a_choice_that_is_close_will_do_where_a_proof_takes_long(
    close: float, proofs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gac.allocation.problem.PATIENCE", 0.0)
    monkeypatch.setattr("gac.allocation.problem.CLOSE", close)
    result: list[Solution] = []
    limits = {PARAMS: 150}

    def listened(*stated: Any, **options: Any) -> Solution:
        result.append(knapsack(*stated, **options))
        return result[-1]

    monkeypatch.setattr("gac.allocation.problem.knapsack", listened)
    solution = as_knapsack(TWO.candidates(limits), limits).solve()
    assert [each.certificate.status for each in result] == proofs
    assert solution is result[-1]


def test_limits_are_fractions_of_what_the_dense_model_takes() -> None:
    recipe = Recipe.of(0.5, memory=0.7, workloads=[PREFILL, UNKNOWN], latency={PREFILL: 0.9})
    assert TWO.dense.allowed(recipe) == {"params": 144, "bytes": 403, ns_of(PREFILL): 108}
