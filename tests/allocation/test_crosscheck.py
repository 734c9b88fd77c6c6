from dataclasses import replace

import numpy as np
import pytest
from knapsack_instances import curves, random_instance

from gac.allocation import highs
from gac.allocation.crosscheck import CrossCheck, crosscheck
from gac.allocation.knapsack import Group, knapsack
from gac.core.errors import GacError

TWO = [Group("a", [2.0, 0.0], [[0], [1]]), Group("b", [1.0, 0.0], [[0], [1]])]


@pytest.mark.parametrize("limits", [1, 2, 3])
def test_highs_agrees_on_curves(limits: int) -> None:
    groups, most = curves(groups=40, items=16, limits=limits)
    record = crosscheck(groups, most, knapsack(groups, most))
    assert (record.least, record.bound) == (1, pytest.approx(1, abs=2e-6))
    assert record.verdict == "HiGHS agrees: it proved that none is better by 2e-06 of the sum (limits within 1e-06)"


def test_the_search_and_its_check_share_no_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A solver that settles hard instances wrongly is found out."""
    groups, most = curves(groups=60, limits=2)
    best = knapsack(groups, most)
    worse = knapsack(groups, most, work_limit=0)
    lying = replace(best.certificate, value=worse.certificate.value, lower_bound=worse.certificate.value)
    monkeypatch.setattr("gac.allocation.knapsack.search.cp_sat", None)
    with pytest.raises(GacError, match="HiGHS found a choice that loses"):
        crosscheck(groups, most, replace(worse, certificate=lying))


def test_a_choice_that_is_not_the_best_is_found_out() -> None:
    best = knapsack(TWO, [1])
    proof = replace(best.certificate, value=2.0, lower_bound=2.0)
    with pytest.raises(GacError, match="HiGHS found a choice that loses 1; expected 2 or more, as was proved"):
        crosscheck(TWO, [1], replace(best, choice=(0, 1), used=(1,), certificate=proof))
    with pytest.raises(GacError, match="the checked choice loses 2; expected 1, as its certificate says"):
        crosscheck(TWO, [1], replace(best, choice=(0, 1), used=(1,)))
    with pytest.raises(GacError, match=r"the checked choice uses \(2,\); expected at most \(1,\)"):
        crosscheck(TWO, [1], replace(best, choice=(1, 1), used=(2,)))


def test_costs_that_float64_cannot_tell_apart_are_compared_exactly() -> None:
    """HiGHS takes two cheap items for one limit's worth; in integers they exceed it, so they contradict nothing."""
    costs = np.append(0, 2**55 + np.arange(30))[:, None]
    groups = [Group(f"g{index}", np.linspace(1, 0, 31), costs) for index in range(30)]
    solution = knapsack(groups, [2**56])
    record = crosscheck(groups, [2**56], solution)
    assert (solution.certificate.value, record.least) == (29, None)
    assert record.verdict == (
        "HiGHS found nothing better, and proved that none is better by 0.034 of the sum (limits within 1e-06)"
    )


@pytest.mark.parametrize("kind", ["huge costs", "scales", "ties"])
def test_no_right_choice_is_contradicted(kind: str) -> None:
    groups, most = random_instance(0, kind=kind)
    crosscheck(groups, most, knapsack(groups, most))


@pytest.mark.parametrize(
    ("least", "bound", "verdict"),
    [
        (1.0, 1.0, "HiGHS agrees: it proved that none is better by 2e-06 of the sum (limits within 1e-06)"),
        (0.9, 0.8, "HiGHS found a choice that is better by 0.1 of the sum, within the stated gap"),
        (
            1.2,
            0.75,
            "HiGHS found nothing better, and proved that none is better by 0.25 of the sum (limits within 1e-06)",
        ),
        (None, None, "HiGHS found nothing better, and proved nothing in 2,000 nodes"),
    ],
)
def test_a_verdict_claims_no_more_than_was_proved(least: float | None, bound: float | None, verdict: str) -> None:
    assert CrossCheck(least, bound, nodes=2000).verdict == verdict


def test_highs_that_breaks_off_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(highs, "_PROGRAM", "elsewhere.npz")
    with pytest.raises(GacError, match=r"HiGHS broke off: FileNotFoundError: .*program\.npz"):
        crosscheck(TWO, [1], knapsack(TWO, [1]))
