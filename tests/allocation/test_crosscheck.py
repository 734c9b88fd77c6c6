import sys
from dataclasses import replace

import numpy as np
import pytest
from knapsack_instances import curves

from gac.allocation.crosscheck import CrossCheck, check_installed, crosscheck
from gac.allocation.knapsack import Group, knapsack
from gac.errors import GacError

TWO = [Group("a", [2.0, 0.0], [[0], [1]]), Group("b", [1.0, 0.0], [[0], [1]])]


# Losses of the last are too many for CP-SAT's int64, and lose their last bits.
@pytest.mark.parametrize("sizes", [{"groups": 50}, {"groups": 50, "limits": 2}, {"groups": 40, "items": 100}])
def test_cp_sat_agrees_on_curves(sizes: dict[str, int]) -> None:
    groups, most = curves(**sizes)
    record = crosscheck(groups, most, knapsack(groups, most))
    assert (record.status, record.objective) == ("OPTIMAL", record.value)


def test_a_choice_that_is_not_the_best_is_found_out() -> None:
    solution = replace(knapsack(TWO, [1]), choice=(0, 1), used=(1,))
    with pytest.raises(GacError) as caught:
        crosscheck(TWO, [1], solution)
    best, worse = 2**51, 2**52
    assert caught.value.given == (
        f"CP-SAT ends OPTIMAL with {best} (bound {best}) where the knapsack has {worse}, in units of {solution.grain:g}"
    )


def test_a_choice_beyond_the_limit_is_found_out() -> None:
    with pytest.raises(GacError, match=r"the checked choice uses \(2,\); expected at most \(1,\)"):
        crosscheck(TWO, [1], replace(knapsack(TWO, [1]), choice=(1, 1), used=(2,)))


def test_costs_too_large_for_cp_sat() -> None:
    costs = np.append(0, 2**55 + np.arange(30))[:, None]
    groups = [Group(f"g{at}", np.linspace(1, 0, 31), costs) for at in range(30)]
    with pytest.raises(GacError, match="sums of all costs that fit int64, for CP-SAT"):
        crosscheck(groups, [2**56], knapsack(groups, [2**56]))


@pytest.mark.parametrize(
    ("status", "objective", "verdict"),
    [
        ("OPTIMAL", 100, "CP-SAT agrees: it proved the same optimum"),
        ("OPTIMAL", 90, "CP-SAT found a choice that loses 0.1 less, within the stated gap"),
        ("FEASIBLE", 120, "CP-SAT found nothing better, and proved nothing in time"),
        ("UNKNOWN", None, "CP-SAT found no choice in time, and contradicts nothing"),
    ],
)
def test_a_verdict_claims_no_more_than_was_proved(status: str, objective: int | None, verdict: str) -> None:
    assert CrossCheck(status, objective, bound=0.0, value=100, seconds=1.0).verdict == verdict


def test_without_or_tools_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools", None)
    with pytest.raises(GacError) as caught:
        check_installed()
    assert str(caught.value) == (
        "OR-Tools is not installed; expected the package ortools, whose CP-SAT solves the instance a second time. "
        "Install it with pip install ortools, or do not ask to verify."
    )
