from fractions import Fraction

import numpy as np
import pytest

from gac.allocation.candidates import CandidateSet
from gac.allocation.costs import columns_of
from gac.allocation.limits import budget_limit, latency_limits
from gac.allocation.problem import pose
from gac.errors import BudgetError, ProfileError
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
    assert budget_limit(budget, total) == limit


def test_a_budget_counts_as_the_decimal_it_prints_as() -> None:
    for percent in range(1, 101):
        assert budget_limit(percent / 100, 6979321856) == Fraction(percent, 100) * 6979321856 // 1


@pytest.mark.parametrize("budget", [0, 0.0, -0.5, 1.0000001, float("nan"), float("inf"), True, "0.8", None])
def test_a_budget_outside_0_to_1_is_refused(budget: float) -> None:
    with pytest.raises(BudgetError) as caught:
        budget_limit(budget, 100)
    assert str(caught.value) == (
        f"budget {budget!r}; expected a number above 0 and at most 1, the kept fraction of the targeted parameters. "
        "Give a budget such as 0.8."
    )


def test_parameters_alone() -> None:
    solution = pose(SETS, 10, {}).solve()
    assert solution.choice == (1, 1)
    assert (solution.certificate.status, solution.certificate.value) == ("optimal", 1.5)


def test_parameters_and_latency() -> None:
    assert pose(SETS, 18, {PREFILL: 45, DECODE: None}).solve().choice == (1, 2)


def test_a_budget_that_cannot_be_met_says_what_can() -> None:
    with pytest.raises(BudgetError, match="the parameter limit of 1 cannot be met: it falls short by 1; expected 2 or"):
        pose(SETS, 1, {}).solve()


def test_a_latency_that_cannot_be_met_says_what_can() -> None:
    with pytest.raises(BudgetError) as caught:
        pose(SETS, 10, {PREFILL: 19, DECODE: None}).solve()
    assert caught.value.given == ("the latency limit in ns for prefill:1x1024 of 19 cannot be met: it falls short by 1")


def test_a_candidate_of_unknown_latency_is_left_out() -> None:
    sets = [rows("a", [1, 5], [2.0, 0.0], [[10], [-1]]), rows("b", [1, 5], [3.0, 0.0], [[10], [20]])]
    instance = pose(sets, 10, {PREFILL: 100})
    chosen = instance.chosen(instance.solve())
    assert [int(row.params[0]) for row in chosen] == [1, 5]


DENSE = [rows("a", [9], [0.0], [[30, 7]]), rows("b", [9], [0.0], [[31, -1]])]


def test_latency_limits_are_fractions_of_the_dense_latency() -> None:
    assert latency_limits(DENSE, [PREFILL, DECODE], {"prefill:1x1024": 0.9}) == {PREFILL: 54, DECODE: None}


def test_no_fraction_of_an_unknown_latency() -> None:
    with pytest.raises(ProfileError, match="the profile lacks the latency of b for decode:1@1024"):
        latency_limits(DENSE, [PREFILL, DECODE], {"decode:1@1024": 0.9})


@pytest.mark.parametrize("fraction", [0, -1.0, float("nan"), float("inf"), "0.9", True])
def test_a_latency_limit_is_a_positive_number(fraction: float) -> None:
    with pytest.raises(BudgetError, match="expected a number above 0, the allowed fraction of the dense latency"):
        latency_limits(DENSE, [PREFILL, DECODE], {"prefill:1x1024": fraction})


def test_a_limit_for_another_workload() -> None:
    with pytest.raises(BudgetError) as caught:
        latency_limits(DENSE, [PREFILL], {"decode:8@64": 0.9})
    assert str(caught.value) == (
        "latency limit for workload 'decode:8@64'; expected one of the plan's workloads (prefill:1x1024). "
        "Add it to the workloads, or drop the limit."
    )
