from fractions import Fraction

import numpy as np
import pytest

from gac.allocation.candidates import CandidateSet
from gac.allocation.limits import allowed, floored
from gac.allocation.problem import as_knapsack
from gac.costs import PARAMS, columns_of
from gac.errors import BudgetError, ProfileError
from gac.recipe import Recipe
from gac.workloads import Workload

PREFILL, DECODE = Workload.parse("prefill:1x1024"), Workload.parse("decode:1@1024")


def rows(name: str, params: list[int], loss: list[float], latency: list[list[int]]) -> CandidateSet:
    count, columns = len(params), np.array(latency, dtype=np.int64)
    counted = np.stack([np.array(params), 2 * np.array(params), np.zeros(count, dtype=np.int64)], axis=1)
    return CandidateSet(
        name,
        columns_of([PREFILL, DECODE]),
        forms=np.full((count, 1), "low_rank"),
        schemes=np.full((count, 1), "bf16"),
        dims=np.arange(1, count + 1)[:, None],
        loss=np.array(loss),
        costs=np.concatenate([counted, columns], axis=1),
        interpolated=np.zeros_like(columns),
        width=np.zeros_like(columns),
        shared=np.zeros(count, dtype=np.bool_),
    )


SETS = [
    rows("a", [1, 5, 9], [2.0, 0.5, 0.0], [[10, -1], [12, -1], [30, -1]]),
    rows("b", [1, 5, 9], [3.0, 1.0, 0.0], [[10, -1], [40, -1], [30, -1]]),
]


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


def test_a_budget_counts_as_the_decimal_it_prints_as() -> None:
    for percent in range(1, 101):
        assert floored(percent / 100, 6979321856) == Fraction(percent, 100) * 6979321856 // 1


def test_parameters_and_latency() -> None:
    assert as_knapsack(SETS, {PARAMS: 10}).solve().choice == (1, 1)
    assert as_knapsack(SETS, {PARAMS: 18, "ns:prefill:1x1024": 45}).solve().choice == (1, 2)


@pytest.mark.parametrize(
    ("limits", "given"),
    [
        ({PARAMS: 1}, "the parameter limit of 1 cannot be met: it falls short by 1"),
        (
            {PARAMS: 10, "ns:prefill:1x1024": 19},
            "the latency limit in ns for prefill:1x1024 of 19 cannot be met: it falls short by 1",
        ),
    ],
)
def test_a_limit_that_cannot_be_met_is_named(limits: dict[str, int], given: str) -> None:
    with pytest.raises(BudgetError) as caught:
        as_knapsack(SETS, limits).solve()
    assert caught.value.given == given


def test_a_candidate_of_unknown_latency_is_left_out() -> None:
    sets = [rows("a", [1, 5], [2.0, 0.0], [[10], [-1]]), rows("b", [1, 5], [3.0, 0.0], [[10], [20]])]
    instance = as_knapsack(sets, {PARAMS: 10, "ns:prefill:1x1024": 100})
    chosen = instance.chosen(instance.solve())
    assert [one.params for one in chosen] == [1, 5]


DENSE = [rows("a", [9], [0.0], [[30, 7]]), rows("b", [9], [0.0], [[31, -1]])]


def test_limits_are_fractions_of_what_the_dense_model_takes() -> None:
    recipe = Recipe.of(0.5, memory=0.7, latency={"prefill:1x1024": 0.9})
    assert allowed(recipe, DENSE) == {"params": 9, "bytes": 25, "ns:prefill:1x1024": 54}


def test_no_fraction_of_an_unknown_latency() -> None:
    with pytest.raises(ProfileError, match="the profile lacks the latency of b for decode:1@1024"):
        allowed(Recipe.of(latency={"decode:1@1024": 0.9}), DENSE)
