"""Losses from subnormal to 1e308, costs whose sums exceed int64, and what is no instance at all."""

import math
from typing import Any

import numpy as np
import pytest

from gac.allocation.knapsack import Group, Solution, knapsack, refine, search, solve
from gac.core.errors import BudgetError, GacError
from tests.fuzz.knapsack import faults


def test_extreme_instances_against_every_choice() -> None:
    """More, and others: ``python -m tests.fuzz.knapsack``."""
    assert [wrong for _, wrong in faults(seed=0, instances=1000) if wrong] == []


def test_the_fuzzer_sees_a_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "better", lambda items, bound, value, *_: search.Found(None, value - bound.lower))
    assert any("not the least" in wrong for _, wrong in faults(seed=0, instances=200))


def found(values: list[list[float]], costs: list[list[list[int]]], limits: Any) -> Solution:
    groups = [Group(f"g{at}", *one) for at, one in enumerate(zip(values, costs, strict=True))]
    solution = knapsack(groups, limits)
    proof = solution.certificate
    assert (proof.status, proof.lower_bound, proof.gap) == ("optimal", proof.value, 0.0)
    return solution


def test_losses_of_many_orders_are_compared_as_finely_as_the_optimum_needs() -> None:
    values = [[9, 1, 7, 8], [1e18, 7, 3], [3, 1e18], [9, 9, 2, 1e18]]
    costs = [
        [[7, 8], [3, 3], [0, 4], [0, 8]],
        [[2, 5], [4, 5], [9, 8]],
        [[1, 2], [5, 7]],
        [[9, 3], [0, 6], [4, 0], [7, 9]],
    ]
    solution = found(values, costs, [12, 19])
    assert (solution.choice, solution.certificate.value) == ((1, 1, 0, 2), 13.0)
    assert solution.unit < 1e-9


def test_losses_beside_much_larger_ones_that_have_to_be_taken() -> None:
    """What a float of the sum cannot tell apart, the choice and the bound do not claim."""
    solution = found([[1e18], [0.0, 3.0, 1.0]], [[[0]], [[2], [0], [1]]], [1])
    assert (solution.choice, solution.certificate.value) == ((0, 2), 1e18)
    assert solution.unit == 8 * math.ulp(1e18)
    assert solution.grain < 1e-12


@pytest.mark.parametrize("least", [5e-324, 2.2e-313, 1e-300, 1.0, 1e300, 5e307])
@pytest.mark.parametrize("limits", [1, 2, 3])
def test_losses_of_any_size(least: float, limits: int) -> None:
    values = [[0.0, 0.0, least], [least, 2 * least, 0.0]]
    costs = [[[3] * limits, [2] * limits, [0] * limits], [[1] * limits, [0] * limits, [4] * limits]]
    assert found(values, costs, [2] * limits).certificate.value == 2 * least
    assert found([[least] * 3] * 2, costs, [2] * limits).certificate.value == 2 * least
    assert found([[0.0] * 3] * 2, costs, [2] * limits).certificate.value == 0.0


def nothing_found(*_: Any) -> Any:
    raise AssertionError("a first choice was looked for")


@pytest.mark.parametrize("wide", [1, 2**40, 2**60])
@pytest.mark.parametrize("limits", [1, 2, 3])
def test_a_start_is_where_the_search_begins(limits: int, wide: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the relaxation finds no choice, no other one is looked for; costs whose sums exceed int64 too."""
    relax = refine.relax
    monkeypatch.setattr(refine, "relax", lambda items: (relax(items)[0], None))
    monkeypatch.setattr(solve, "within_limits", nothing_found)
    costs = [[3, 1, 0], [2, 1, 0], [3, 2, 0]]
    groups = [
        Group(str(at), [0.0, 1.0, 4.0], [[wide * (one + limit) for limit in range(limits)] for one in row])
        for at, row in enumerate(costs)
    ]
    most = [wide * (5 + 3 * limit) + limit for limit in range(limits)]
    with pytest.raises(AssertionError):
        knapsack(groups, most)
    for start in [(2, 2, 2), (1, 1, 1), (2, 0, 0)]:
        solution = knapsack(groups, most, start=start)
        assert (solution.certificate.status, solution.certificate.value) == ("optimal", 2.0)


@pytest.mark.parametrize(
    ("start", "given"),
    [((0,), "a start of 1 items"), ((0, 0), r"a start that takes \[5\]"), ((0, 0, 0), "a start of 3")],
)
def test_a_start_beyond_the_limits(start: tuple[int, ...], given: str) -> None:
    groups = [Group("a", [0.0, 1.0], [[3], [1]]), Group("b", [0.0, 1.0], [[2], [1]])]
    with pytest.raises(GacError, match=f"^{given}.*; expected an item of each of 2 groups, within \\[4\\]"):
        knapsack(groups, [4], start=start)


def test_losses_whose_sum_no_float_holds() -> None:
    groups = [Group(name, [1e308, 0.0], [[0], [1]]) for name in "abc"]
    assert knapsack(groups, [2]).certificate.value == 1e308
    with pytest.raises(GacError, match=r"^losses of 1e\+308 and others in the best choice; "):
        knapsack(groups, [1])


def test_costs_whose_sums_exceed_int64() -> None:
    wide = [Group(name, [1.0, 0.0], [[0], [2**62]]) for name in "abc"]
    assert knapsack(wide, [2**64]).certificate.value == 0.0
    assert knapsack(wide, [3 * 2**62]).certificate.value == 0.0
    assert knapsack(wide, [3 * 2**62 - 1]).certificate.value == 1.0
    odd = [Group(name, [1.0, 0.0], [[at], [2**63 - 1 - at]]) for at, name in enumerate("abcde")]
    assert knapsack(odd, [3 * 2**63 - 12 + 1]).used == (3 * 2**63 - 12 + 1,)
    assert knapsack(odd, [3 * 2**63 - 12]).certificate.value == 3.0
    assert knapsack(odd, [5 * 2**63]).certificate.value == 0.0
    assert knapsack([Group("a", [1.0, 0.0], [[0], [2**62]]), Group("b", [1.0, 0.0], [[0], [1]])], [2**62]).used == (
        2**62,
    )


def test_costs_whose_sums_exceed_int64_and_cannot_be_met() -> None:
    groups = [Group(name, [0.0, 0.0], [[0, 2**63 - 1], [2**63 - 1, 0]]) for name in "abcd"]
    assert knapsack(groups, [2**64 - 2, 2**64 - 2]).used == (2**64 - 2, 2**64 - 2)
    with pytest.raises(BudgetError, match=r"limit 2 of \d+ cannot be met beside limit 1: it falls short by 1;"):
        knapsack(groups, [2**64 - 2, 2**64 - 3])
    groups = [Group(name, [0.0], [[2**63 - 1]]) for name in "abcd"]
    with pytest.raises(BudgetError, match=r"limit 1 of 5 cannot be met: it falls short by 36893488147419103223; exp"):
        knapsack(groups, [5])


ONE = [Group("a", [0.0, 1.0], [[3], [1]])]


@pytest.mark.parametrize(
    "given",
    [
        {"limits": np.array([2])},
        {"limits": (2,)},
        {"limits": (limit for limit in [2])},
        {"groups": (group for group in ONE)},
        {"names": None},
        {"names": iter(["params"])},
        {"work_limit": np.float32(1)},
        {"work_limit": math.inf},
    ],
)
def test_whatever_can_be_listed_is_taken(given: dict[str, Any]) -> None:
    assert knapsack(**{"groups": ONE, "limits": [2]} | given).choice == (1,)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"limits": 2}, "limits of 2; expected several, one after the other. Pass a list with one integer a limit."),
        ({"limits": np.array([2.0])}, "limits [np.float64(2.0)]; expected integers"),
        ({"limits": None}, "limits of None; expected several, one after the other"),
        ({"groups": ONE[0]}, "groups of Group("),
        ({"groups": [0]}, "an entry of type int among the groups; expected Group objects. Pass a list of Group."),
        ({"names": 3}, "names of 3; expected several, one after the other. Name every limit, or none."),
        (
            {"work_limit": None},
            "a work limit of None; expected a number of 0 or more. Say how many units of work may be done.",
        ),
        ({"work_limit": math.nan}, "a work limit of nan; expected a number of 0 or more"),
        ({"work_limit": -1}, "a work limit of -1; expected a number of 0 or more"),
        ({"work_limit": "5"}, "a work limit of '5'; expected a number of 0 or more"),
        ({"work_limit": True}, "a work limit of True; expected a number of 0 or more"),
    ],
)
def test_what_is_no_instance_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(GacError) as caught:
        knapsack(**{"groups": ONE, "limits": [2]} | given)
    assert str(caught.value).startswith(message)


def test_a_group_has_a_name() -> None:
    name: Any = 3
    with pytest.raises(GacError, match="a group that is called 3; expected a string"):
        Group(name, [0.0], [[1]])


def test_a_choice_that_leaves_more_than_half_of_the_largest_integer_unused_is_found() -> None:
    """Two limits, the first of which the best choice leaves nearly all of."""
    groups = [
        Group("a", [0, 1727880262], [[8099504023265682, 0], [0, 1450937988]]),
        Group(
            "b", [1053612906, 935681623, 0], [[0, 29375986], [977608156788846075, 0], [7943743032916010, 1224482481]]
        ),
        Group("c", [0, 1753090999], [[2391037122757936821, 0], [0, 3696156929]]),
        Group("d", [0, 1, 2, 3], [[0, 12884901888], [0, 8589934592], [0, 4294967296], [0, 0]]),
    ]
    assert knapsack(groups, [2391037122757936822, 13023049903]).choice == (0, 2, 1, 2)
