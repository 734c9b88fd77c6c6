"""The exact knapsack equals brute force, CP-SAT and HiGHS; more in ``knapsack_agreement.py`` and ``tests.fuzz``."""

import doctest
import importlib
import math
import time
from concurrent.futures import Future
from dataclasses import replace
from fractions import Fraction
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from knapsack_instances import KINDS, curves, fault, random_instance, within
from ortools.sat.python.cp_model import CpSolver

from gac.allocation import highs
from gac.allocation.crosscheck import CrossCheck, crosscheck
from gac.allocation.knapsack import Group, Solution, knapsack, lists, search, solve
from gac.allocation.knapsack.instance import reduced_items, rows_of
from gac.allocation.knapsack.lists import STEPS
from gac.allocation.knapsack.relaxation import relax
from gac.core.errors import BudgetError, GacError
from tests.fuzz.knapsack import faults

HARD = {"groups": 30, "items": 12, "kind": "correlated"}


def check_proved(solution: Solution, groups: list[Group], limits: list[int]) -> None:
    assert within(solution.choice, groups, limits)
    costs = [group.costs[item].tolist() for group, item in zip(groups, solution.choice, strict=True)]
    assert solution.used == tuple(map(sum, zip(*costs, strict=True)))
    proof = solution.certificate
    assert (proof.status, proof.gap, proof.lower_bound) == ("optimal", 0.0, proof.value)


@st.composite
def instances(draw: st.DrawFn) -> tuple[list[Group], list[int]]:
    """Any kind of instance, or any losses, costs up to 2**53, and limits within 1 of the costs of some choice."""
    if draw(st.booleans()):
        return random_instance(draw(st.integers(0, 10**6)), kind=draw(st.sampled_from(KINDS)))
    limits = draw(st.integers(1, 3))
    loss = st.floats(0, 1e12) | st.integers(0, 3).map(float)
    item = st.tuples(loss, st.lists(st.integers(0, 12) | st.integers(0, 2**53), min_size=limits, max_size=limits))
    rows = draw(st.lists(st.lists(item, min_size=1, max_size=4), min_size=1, max_size=5))
    groups = [Group(str(number), *map(list, zip(*items, strict=True))) for number, items in enumerate(rows)]
    picked = [draw(st.sampled_from(group.costs.tolist())) for group in groups]
    return groups, [sum(column) + draw(st.integers(-1, 1)) for column in zip(*picked, strict=True)]


# The relaxation's optimum is 0.
ZERO = [Group("a", [0.0, 4.0, 1.0, 0.0], [[1, 1], [0, 1], [0, 0], [0, 0]])], [1, 1]


@settings(max_examples=50)
@given(instances())
@example(ZERO)
def test_no_choice_is_better(instance: tuple[list[Group], list[int]]) -> None:
    assert fault(*instance) == ""


@pytest.mark.slow
def test_no_choice_is_better_in_many_instances() -> None:
    faulty = [seed for seed in range(40 * len(KINDS)) if fault(*random_instance(seed))]
    assert faulty == []


def test_extreme_instances_equal_every_choice() -> None:
    """The first of those that ``make fuzz`` tries."""
    assert [wrong for _, wrong in faults(seed=0, instances=100) if wrong] == []


def test_the_fuzzer_detects_a_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = lambda items, bound, value, *_, **__: search.Searched(None, value - bound.lower)  # noqa: E731
    monkeypatch.setattr(search, "search_margin", nothing)
    assert any("not the least" in wrong for _, wrong in faults(seed=0, instances=200))


@pytest.mark.parametrize("limits", [1, 2])
def test_the_multipliers_bound_every_choice(limits: int) -> None:
    groups, most = curves(limits=limits)
    proof = knapsack(groups, most).certificate
    multipliers = [Fraction(multiplier) for multiplier in proof.multipliers]
    relaxed = sum(
        min(
            Fraction(float(value)) + sum(m * int(cost) for m, cost in zip(multipliers, row, strict=True))
            for value, row in zip(group.values, group.costs, strict=True)
        )
        for group in groups
    )
    bound = float(relaxed - sum(m * limit for m, limit in zip(multipliers, most, strict=True)))
    assert 0.99 * proof.value < bound <= proof.value * (1 + 1e-12)


def test_multipliers_are_positive_where_the_first_columns_break_the_limits() -> None:
    """Time is minimised; parameters are limited, and loss, in fine units, to 1 % more than the least."""
    rng, timed, least = np.random.default_rng(0), [], []
    for number in range(30):
        params = np.sort(rng.integers(1, 1000, 60)) * 64
        loss = (np.exp(-params / 64000 * rng.uniform(2, 6)) * rng.uniform(0.1, 3) * 1e11).astype(np.int64)
        ns = params / 64000 * rng.uniform(0.5, 1) + rng.uniform(0, 0.2, 60)
        least.append(Group(str(number), loss, params[:, None]))
        timed.append(Group(str(number), ns, np.column_stack([params, loss])))
    limit = sum(int(group.costs.max()) for group in least) // 2
    rows = rows_of(timed, [limit, int(knapsack(least, [limit]).certificate.value * 1.01)])
    assert (relax(reduced_items(rows.items, rows.limits)[0])[0] > 0).all()


# --- exactness ------------------------------------------------------------------------------------------------------


def test_a_constant_cost_in_every_item_changes_nothing() -> None:
    groups, most = curves()
    shifted = [Group(group.name, group.values, group.costs * 7 + 2**40) for group in groups]
    assert knapsack(shifted, [most[0] * 7 + 6 + 2**40 * len(groups)]).choice == knapsack(groups, most).choice


CLOSE, TINY = np.nextafter(1.0, 2.0), np.nextafter(0.0, 1.0)


@pytest.mark.parametrize(
    ("values", "costs", "limit", "choice"),
    [
        ([[1.0, 0.0], [2.0, 0.0]], [[2**53 - 1, 2**53], [0, 2**53]], 2**54, (1, 1)),
        ([[1.0, 0.0], [2.0, 0.0]], [[2**53 - 1, 2**53], [0, 2**53]], 2**54 - 1, (0, 1)),
        ([[1.0, 0.0], [2.0, 0.0]], [[2**53 - 1, 2**53], [0, 2**53]], 2**54 - 2, (1, 0)),
        ([[1.0, 0.0]] * 3, [[0, 2**62]] * 3, 2**64, (1, 1, 1)),
        ([[1.0, 0.0]] * 3, [[0, 2**62]] * 3, 3 * 2**62, (1, 1, 1)),
        ([[1.0, 0.0]] * 2, [[0, 2**62], [0, 1]], 2**62, (1, 0)),
        ([[9.0, CLOSE, 1.0], [9.0, 1.0, CLOSE]], [[0, 1, 1]] * 2, 2, (2, 1)),
        ([[1e30, 2e-9, 1e-9], [1e30, 2e-9, 1.5e-9]], [[0, 1, 2]] * 2, 3, (2, 1)),
        ([[3 * TINY, TINY], [TINY, 0.0]], [[0, 1]] * 2, 1, (1, 0)),
        ([[3 * TINY, 6 * TINY], [3 * TINY, TINY]], [[4, 1], [2, 4]], 7, (0, 0)),
        ([[1e18], [0.0, 3.0, 1.0]], [[0], [2, 0, 1]], 1, (0, 2)),
        ([[3.0, 1.0, 0.0]] * 2000, [[0, 2, 3]] * 2000, 2001, None),
    ],
)
def test_the_last_unit_counts(values: list, costs: list, limit: int, choice: tuple[int, ...] | None) -> None:
    groups = [Group(str(n), v, [[cost] for cost in c]) for n, (v, c) in enumerate(zip(values, costs, strict=True))]
    solution = knapsack(groups, [limit])
    check_proved(solution, groups, [limit])
    assert solution.choice == choice if choice else solution.certificate.value == 3999.0


def test_a_loss_is_as_fine_as_the_optimum_needs() -> None:
    large = knapsack([Group("a", [1e18], [[0]]), Group("b", [0.0, 3.0, 1.0], [[2], [0], [1]])], [1])
    assert large.unit == 8 * math.ulp(1e18)
    assert large.grain < 1e-12


@pytest.mark.parametrize("least", [5e-324, 2.2e-313, 1.0, 5e307])
@pytest.mark.parametrize("limits", [1, 3])
def test_losses_of_any_size(least: float, limits: int) -> None:
    costs = [[[3] * limits, [2] * limits, [0] * limits], [[1] * limits, [0] * limits, [4] * limits]]
    for values, best in (([0.0, 0.0, least], 2 * least), ([least] * 3, 2 * least), ([0.0] * 3, 0.0)):
        second = [least, 2 * least, 0.0] if values[0] != values[2] else values
        groups = [Group("a", values, costs[0]), Group("b", second, costs[1])]
        solution = knapsack(groups, [2] * limits)
        check_proved(solution, groups, [2] * limits)
        assert solution.certificate.value == best


def test_costs_whose_sums_exceed_int64() -> None:
    odd = [Group(name, [1.0, 0.0], [[at], [2**63 - 1 - at]]) for at, name in enumerate("abcde")]
    assert knapsack(odd, [3 * 2**63 - 12 + 1]).used == (3 * 2**63 - 12 + 1,)
    assert knapsack(odd, [3 * 2**63 - 12]).certificate.value == 3.0
    assert knapsack(odd, [5 * 2**63]).certificate.value == 0.0
    trading = [Group(name, [0.0, 0.0], [[0, 2**63 - 1], [2**63 - 1, 0]]) for name in "abcd"]
    assert knapsack(trading, [2**64 - 2, 2**64 - 2]).used == (2**64 - 2, 2**64 - 2)
    with pytest.raises(BudgetError, match=r"limit 2 of \d+ cannot be met beside limit 1: it falls short by 1;"):
        knapsack(trading, [2**64 - 2, 2**64 - 3])
    with pytest.raises(BudgetError, match="limit 1 of 5 cannot be met: it falls short by 36893488147419103223;"):
        knapsack([Group(name, [0.0], [[2**63 - 1]]) for name in "abcd"], [5])


# --- the search -----------------------------------------------------------------------------------------------------


@pytest.fixture
def lists_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handful of states is enough for every relaxation, every look for dominated states, and shrinking margins."""
    monkeypatch.setattr(lists, "_SIFT_FROM", 1)
    monkeypatch.setattr(search, "_CHEAP", 1)
    monkeypatch.setattr(search, "_LONGER", 1)


@pytest.mark.usefixtures("lists_are_long")
@pytest.mark.parametrize("kind", ["several limits", "correlated", "staircase", "divisors", "ties"])
def test_long_lists_leave_out_nothing_better(kind: str) -> None:
    assert not any(fault(*random_instance(seed, kind=kind)) for seed in range(4))


@pytest.mark.parametrize("wide", [1, 2**60])
@pytest.mark.parametrize("limits", [1, 2, 3])
def test_a_start_is_where_the_search_begins(limits: int, wide: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solve, "relax", lambda items: (relax(items)[0], None))
    monkeypatch.setattr(solve, "feasible_choice", Mock(side_effect=AssertionError))
    groups = [
        Group(str(number), [0.0, 1.0, 4.0], [[wide * (cost + limit) for limit in range(limits)] for cost in row])
        for number, row in enumerate([[3, 1, 0], [2, 1, 0], [3, 2, 0]])
    ]
    most = [wide * (5 + 3 * limit) + limit for limit in range(limits)]
    with pytest.raises(AssertionError):
        knapsack(groups, most)
    for start in [(2, 2, 2), (1, 1, 1), (2, 0, 0)]:
        assert knapsack(groups, most, start=start).certificate.value == 2.0


# --- a limit of work ------------------------------------------------------------------------------------------------


def check_bounded(solution: Solution, groups: list[Group], limits: list[int]) -> None:
    assert within(solution.choice, groups, limits)
    proof = solution.certificate
    assert proof.status == "feasible"
    assert 0 < proof.gap == pytest.approx(proof.value - proof.lower_bound)


@pytest.mark.parametrize("steps", [0, 100, 3_000])
def test_a_search_that_is_cut_short_is_feasible_with_a_bound(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    groups, most = curves(groups=60, limits=3)
    best = knapsack(groups, most).certificate.value
    monkeypatch.setattr(search, "cp_sat", lambda *_, **__: ("UNKNOWN", None))
    early = knapsack(groups, most, work_limit=steps / STEPS)
    check_bounded(early, groups, most)
    assert 0.99 * best < early.certificate.lower_bound <= best <= early.certificate.value < 1.1 * best


def test_the_clock_changes_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, most = random_instance(560, **HARD)
    solutions = [knapsack(groups, most, work_limit=limit) for limit in (0.02, 0.5)]
    assert [solution.certificate.status for solution in solutions] == ["feasible"] * 2
    assert "CP-SAT" in solutions[1].certificate.method
    years = count(step=1e9)
    for clock in ("time", "monotonic", "perf_counter", "process_time"):
        monkeypatch.setattr(time, clock, lambda: float(next(years)))
    assert [knapsack(groups, most, work_limit=limit) for limit in (0.02, 0.5)] == solutions


def test_ctrl_c_stops_cp_sat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists, "MOST_STATES", 4)
    stop = Mock()
    monkeypatch.setattr(CpSolver, "stop_search", stop)
    monkeypatch.setattr(Future, "result", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        knapsack(*curves(groups=60, limits=2))
    stop.assert_called_once()


def test_a_search_that_grows_too_large_is_settled_by_cp_sat(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, most = curves(groups=60, limits=2)
    first = knapsack(groups, most, work_limit=0).certificate.value
    best, exact = knapsack(groups, most).certificate.value, search.cp_sat
    monkeypatch.setattr(lists, "MOST_STATES", 4)
    settled = knapsack(groups, most)
    check_proved(settled, groups, most)
    assert settled.certificate.value == best
    assert "CP-SAT" in settled.certificate.method
    monkeypatch.setattr(search, "cp_sat", lambda *args, **hint: ("FEASIBLE", exact(*args, **hint)[1]))
    unproved = knapsack(groups, most)  # its choice is kept
    check_bounded(unproved, groups, most)
    assert unproved.certificate.value < first


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "costs", "words"),
    [
        ([], np.zeros((0, 1), int), r"values of shape \(0,\)"),
        ([True, False], [[1], [2]], "type bool"),
        ([0.0, np.nan], [[1], [2]], "value nan at item 1"),
        ([-0.5, 1.0], [[1], [2]], "value -0.5 at item 0"),
        ([0.0, 1.0], [[1.5], [2.0]], "costs of type float64"),
        ([0.0, 1.0], [[1], [2**70]], "costs of type object"),
        ([0.0, 1.0], [[1]], r"costs of shape \(1, 1\) for 2 items"),
        ([0.0, 1.0], [[1], [2, 3]], "their lengths differ"),
        ([0.0, 1.0], [[1], [-2]], "cost -2 at item 1, limit 0"),
    ],
)
def test_a_malformed_group_is_refused(values: list, costs: list, words: str) -> None:
    with pytest.raises(GacError, match=f"group 'x' has .*{words}"):
        Group("x", values, costs)


SEVEN = Group("b", [0.0], [[7]])
A, B = Group("a", [0.0, 1.0], [[9, 1], [1, 9]]), Group("b", [0.0, 1.0], [[9, 1], [1, 9]])
TRADING = [Group(name, [0.0, 1.0], [[cost, 0], [0, cost]]) for name, cost in (("a", 2), ("b", 3), ("c", 3))]
WIDE = [Group(name, [0.0, 1.0], [[0, 2**53 + 1], [1, 2**53]]) for name in "abc"]


@pytest.mark.parametrize(
    ("groups", "limits", "options", "words"),
    [
        ([Group("a", [0.0, 1.0], [[9], [4]]), SEVEN], [10], {}, r"limit 1 of 10 .* by 1; expected 11 .*'b' alone"),
        ([A, B], [9, 9], {"names": ["params", "ns"]}, "ns of 9 cannot be met beside params: it falls short by 9;"),
        ([A, Group("b", [0.0], [[0, 3]])], [1, 3], {}, "limit 2 of 3 cannot be met: it falls short by 1;"),
        ([A, Group("b", [0.0], [[0, 0]])], [5, 5], {}, "limit 2 of 5 cannot be met beside limit 1: .* short by 4;"),
        (TRADING, [4, 4], {"work_limit": 0}, r"the work was spent before .* \(best 8\)"),
        (WIDE, [2, 3 * 2**53], {}, "limit 2 of 27021597764222976 .* it falls short by 1;"),
    ],
)
def test_limits_that_cannot_be_met(groups: list[Group], limits: list[int], options: Any, words: str) -> None:
    with pytest.raises(BudgetError, match=words):
        knapsack(groups, limits, **options)


ONE = [Group("a", [0.0, 1.0], [[3], [1]])]


def test_any_iterable_is_accepted() -> None:
    names, limits = iter(["params"]), (limit for limit in np.array([2]))
    assert knapsack(iter(ONE), limits, names=names, work_limit=math.inf).choice == (1,)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"groups": []}, "0 groups and 1 limits"),
        ({"limits": [1, 2]}, "group 'a' has costs under 1 limits"),
        ({"limits": 2}, "limits of 2; expected several"),
        ({"limits": np.array([2.0])}, "expected integers"),
        ({"groups": [0]}, "an entry of type int among the groups"),
        ({"names": ["a", "b"]}, "2 names for 1 limits"),
        *[({"work_limit": wrong}, "a work limit of") for wrong in (math.nan, -1, "5")],
        ({"start": (0, 0)}, "a start of 2 items"),
        ({"start": (0,)}, r"a start that costs \[3\]"),
        ({"groups": [Group(name, [1e308, 0.0], [[0], [1]]) for name in "abc"], "limits": [1]}, "losses of 1e.308"),
    ],
)
def test_an_instance_that_is_none_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(GacError, match=words):
        knapsack(**{"groups": ONE, "limits": [2]} | arguments)


TWO = [Group("a", [2.0, 0.0], [[0], [1]]), Group("b", [1.0, 0.0], [[0], [1]])]


@pytest.fixture
def highs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """HiGHS without a process of its own, which would import SciPy once more."""
    monkeypatch.setattr("subprocess.run", lambda command, **_: highs._solve(Path(command[-1])))


@pytest.mark.usefixtures("highs_here")
@pytest.mark.parametrize("limits", [1, 3])
def test_highs_agrees_on_curves(limits: int) -> None:
    groups, most = curves(groups=20, items=12, limits=limits)
    record = crosscheck(groups, most, knapsack(groups, most))
    assert (record.least, record.bound) == (1, pytest.approx(1, abs=2e-6))
    assert record.verdict.startswith("HiGHS agrees")


@pytest.mark.usefixtures("highs_here")
def test_the_search_and_its_check_share_no_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A solver that settles hard instances wrongly is found out."""
    groups, most = curves(groups=60, limits=2)
    best = knapsack(groups, most)
    worse = knapsack(groups, most, work_limit=0)
    lying = replace(best.certificate, value=worse.certificate.value, lower_bound=worse.certificate.value)
    monkeypatch.setattr("gac.allocation.knapsack.search.cp_sat", None)
    with pytest.raises(GacError, match="HiGHS found a choice that loses"):
        crosscheck(groups, most, replace(worse, certificate=lying))


@pytest.mark.usefixtures("highs_here")
def test_a_choice_that_is_not_the_best_is_found_out() -> None:
    best = knapsack(TWO, [1])
    proof = replace(best.certificate, value=2.0, lower_bound=2.0)
    with pytest.raises(GacError, match="HiGHS found a choice that loses 1; expected 2 or more, as was proved"):
        crosscheck(TWO, [1], replace(best, choice=(0, 1), used=(1,), certificate=proof))
    with pytest.raises(GacError, match="the checked choice loses 2; expected 1, as its certificate says"):
        crosscheck(TWO, [1], replace(best, choice=(0, 1), used=(1,)))
    with pytest.raises(GacError, match=r"the checked choice uses \(2,\); expected at most \(1,\)"):
        crosscheck(TWO, [1], replace(best, choice=(1, 1), used=(2,)))


@pytest.mark.usefixtures("highs_here")
def test_costs_that_float64_cannot_tell_apart_are_compared_exactly() -> None:
    """HiGHS takes two cheap items for one limit's worth; in integers they exceed it, so they contradict nothing."""
    costs = np.append(0, 2**55 + np.arange(30))[:, None]
    groups = [Group(f"g{index}", np.linspace(1, 0, 31), costs) for index in range(30)]
    solution = knapsack(groups, [2**56])
    record = crosscheck(groups, [2**56], solution)
    assert (solution.certificate.value, record.least) == (29, None)
    assert "proved that none is better by 0.034 of the sum" in record.verdict


@pytest.mark.usefixtures("highs_here")
@pytest.mark.parametrize("kind", ["huge costs", "scales"])
def test_no_right_choice_is_contradicted(kind: str) -> None:
    groups, most = random_instance(0, kind=kind)
    crosscheck(groups, most, knapsack(groups, most))


@pytest.mark.parametrize(
    ("least", "bound", "verdict"),
    [
        (1.0, 1.0, "agrees: it proved that none is better by 2e-06 of the sum (limits within 1e-06)"),
        (0.9, 0.8, "found a choice that is better by 0.1 of the sum, within the stated gap"),
        (1.2, 0.75, "found nothing better, and proved that none is better by 0.25 of the sum (limits within 1e-06)"),
        (None, None, "found nothing better, and proved nothing in 2,000 nodes"),
    ],
)
def test_a_verdict_claims_no_more_than_was_proved(least: float | None, bound: float | None, verdict: str) -> None:
    assert CrossCheck(least, bound, nodes=2000).verdict == f"HiGHS {verdict}"


def test_highs_that_breaks_off_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(highs, "_PROGRAM", "elsewhere.npz")
    with pytest.raises(GacError, match=r"HiGHS broke off: FileNotFoundError: .*program\.npz"):
        crosscheck(TWO, [1], knapsack(TWO, [1]))


@pytest.mark.parametrize("module", ["gac.allocation.knapsack.solve", "gac.plan.costs"])
def test_the_examples_in_docstrings(module: str) -> None:
    results = doctest.testmod(importlib.import_module(module))
    assert results.attempted > 0
    assert results.failed == 0
