"""What must hold of any plan's choice, whatever the curves: laws of budgets, of order and of units."""

from collections.abc import Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gac.allocation.decide import decide
from gac.core.errors import BudgetError
from gac.plan.plan import Plan
from tests.allocation.small_problems import DECODE, PREFILL, asking, problem

LATENCIES = [10, 20, 30, 40, 50, 60]
# Halves and whole numbers, so that sums of losses are exact in any order.
ROWS = st.lists(
    st.lists(st.integers(0, 200).map(lambda half: half / 2), min_size=5, max_size=5).map(
        lambda row: sorted(row, reverse=True)
    ),
    min_size=1,
    max_size=6,
)
BUDGETS = st.floats(0.2, 1.0)


def planned(losses: Sequence[Sequence[float]], budget: float, latency: dict[str, float] | None = None) -> Plan:
    return decide(asking(problem(losses, LATENCIES), budget, latency=latency or {})).plan


@given(ROWS, BUDGETS, BUDGETS)
def test_more_budget_never_predicts_more_loss(losses: list[list[float]], each: float, other: float) -> None:
    less, more = (planned(losses, budget) for budget in sorted((each, other)))
    assert more.prediction.loss <= less.prediction.loss
    assert less.budget.used <= less.budget.limit <= more.budget.limit


@given(ROWS, st.sampled_from([PREFILL, DECODE]), BUDGETS, BUDGETS)
def test_more_time_never_predicts_more_loss(
    losses: list[list[float]], workload: str, each: float, other: float
) -> None:
    less, more = sorted((each, other))
    try:
        tight = planned(losses, 1.0, {workload: less})
    except BudgetError:
        assume(False)
    assert planned(losses, 1.0, {workload: more}).prediction.loss <= tight.prediction.loss


@given(ROWS, BUDGETS, st.integers(-300, 300))
def test_a_unit_of_loss_that_is_a_power_of_two_changes_no_dim(
    losses: list[list[float]], budget: float, power: int
) -> None:
    scaled = planned([[loss * 2.0**power for loss in row] for row in losses], budget)
    plain = planned(losses, budget)
    assert [site.weights for site in scaled.sites] == [site.weights for site in plain.sites]
    assert scaled.prediction.loss == plain.prediction.loss * 2.0**power


# --- what a plan remembers of the candidates that were not chosen ---------------------------------------------------

TWO_SITES = [[8, 4, 2, 1, 0.5], [6, 3, 1.5, 0.75, 0.375]]


@pytest.fixture
def plan() -> Plan:
    """192 of 288 parameters: ranks of 24 parameters each."""
    return decide(asking(problem(TWO_SITES, LATENCIES), 0.667)).plan


def test_a_smaller_one_and_a_larger_one_than_dense_there_is_none(plan: Plan) -> None:
    assert [(site.weights[0].dim, site.params) for site in plan.sites] == [(4, 96), (4, 96)]
    for site in plan.sites:
        smaller, larger = site.alternatives
        assert smaller.params < site.params < larger.params
        assert smaller.loss > site.loss > larger.loss
    full = decide(asking(problem(TWO_SITES, LATENCIES), 1.0)).plan
    assert all(each.params < site.params for site in full.sites for (each,) in [site.alternatives])
