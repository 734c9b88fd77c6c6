"""The fastest choice within a budget and a loss."""

from dataclasses import replace

import pytest

from gac.allocation.fastest import fastest
from gac.allocation.problem import Problem
from gac.costs import ns_of
from gac.errors import BudgetError
from gac.evaluation.shapes import planner_of_shapes
from gac.workloads import Workload
from tests.allocation.small_problems import asking

WORKLOAD = "decode:1@1024"


@pytest.fixture(scope="module")
def problem() -> Problem:
    workloads = [Workload.parse(WORKLOAD)]
    planner = planner_of_shapes("smollm2", workloads, "nvidia-h100-80gb-hbm3", layers=2)
    return planner.problem_of(1.0, align=64)


def test_without_loss_the_dense_model_is_the_fastest(problem: Problem) -> None:
    found = fastest(problem, WORKLOAD, 0.0)
    assert {choice.form for choice in found.choices} == {"dense"}
    assert found.ns == sum(int(rows.latency[0, 0]) for rows in problem.dense)


def test_it_keeps_the_limits(problem: Problem) -> None:
    found = fastest(asking(problem, 0.9), WORKLOAD, 0.05)
    assert found.loss <= 0.05
    assert found.params <= 0.9 * problem.params


def test_more_loss_is_never_slower(problem: Problem) -> None:
    times = [fastest(problem, WORKLOAD, loss).ns for loss in (0.0, 0.01, 0.03, 0.1)]
    assert times == sorted(times, reverse=True)


def test_nothing_is_faster_site_by_site(problem: Problem) -> None:
    """With one site, the fastest of its candidates that lose little enough."""
    one = replace(problem, sites=problem.sites[:1], curves=problem.curves)
    rows = one.candidates([ns_of(WORKLOAD)])[0]
    allowed = rows.latency[rows.loss <= 0.01, 0]
    assert fastest(one, WORKLOAD, 0.01).ns == allowed[allowed >= 0].min()


def test_a_loss_that_no_choice_within_the_budget_keeps_is_refused(problem: Problem) -> None:
    with pytest.raises(BudgetError, match=r"budget 0.5 with a loss of at most 0.001; expected \d+ parameters or more"):
        fastest(asking(problem, 0.5), WORKLOAD, 0.001)
