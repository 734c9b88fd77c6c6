"""The fastest choice within a budget and a loss."""

from dataclasses import replace

import pytest

from gac.allocation.fastest import fastest
from gac.allocation.problem import Problem
from gac.errors import BudgetError
from gac.evaluation.shapes import field_of_shapes
from gac.forms import DEFAULT_FORMS
from gac.workloads import Workload

WORKLOAD = "decode:1@1024"


@pytest.fixture(scope="module")
def problem() -> Problem:
    workloads = [Workload.parse(WORKLOAD)]
    field = field_of_shapes("smollm2", workloads, "nvidia-h100-80gb-hbm3", layers=2)
    return field.posed(DEFAULT_FORMS, 64, False)[0]


def test_without_loss_the_dense_model_is_the_fastest(problem: Problem) -> None:
    found = fastest(problem, 1.0, WORKLOAD, 0.0)
    assert {choice.form for choice in found.choices} == {"dense"}
    assert found.ns == sum(int(rows.latency[0, 0]) for rows in problem.dense)


def test_it_keeps_the_limits_and_is_proved(problem: Problem) -> None:
    found = fastest(problem, 0.9, WORKLOAD, 0.05)
    assert found.loss <= 0.05
    assert found.params <= 0.9 * problem.params
    assert found.proved


def test_more_loss_is_never_slower(problem: Problem) -> None:
    times = [fastest(problem, 1.0, WORKLOAD, loss).ns for loss in (0.0, 0.01, 0.03, 0.1)]
    assert times == sorted(times, reverse=True)


def test_nothing_is_faster_site_by_site(problem: Problem) -> None:
    """With one site, the fastest of its candidates that lose little enough."""
    one = replace(problem, sites=problem.sites[:1], curves=problem.curves)
    rows = one.candidates([f"ns:{WORKLOAD}"])[0]
    allowed = rows.latency[rows.loss <= 0.01, 0]
    assert fastest(one, 1.0, WORKLOAD, 0.01).ns == allowed[allowed >= 0].min()


def test_a_loss_that_no_choice_within_the_budget_keeps_is_refused(problem: Problem) -> None:
    with pytest.raises(BudgetError, match=r"budget 0.5 with a loss of at most 0.001; expected \d+ parameters or more"):
        fastest(problem, 0.5, WORKLOAD, 0.001)


def test_the_latency_of_no_workload_is_refused(problem: Problem) -> None:
    for workload in ("decode:1@7", "params"):
        with pytest.raises(BudgetError, match=rf"workload '{workload}'; expected one of the plan's workloads"):
            fastest(problem, 0.9, workload, 0.05)
