"""The exact knapsack beside its peers, and what must hold of any optimum; ``knapsack_agreement.py`` does 10,000."""

import time
from concurrent.futures import Future
from dataclasses import replace
from fractions import Fraction
from itertools import count
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from knapsack_instances import KINDS, curves, random_instance, within
from knapsack_peers import brute_force_finds, cp_sat_finds, fault, highs_finds
from ortools.sat.python.cp_model import CpSolver

from gac.allocation.knapsack import Group, Solution, knapsack, lists, search, states
from gac.allocation.knapsack.lists import Lists
from gac.allocation.knapsack.search import Answer
from gac.allocation.knapsack.states import STEPS, Core, Work
from gac.core.errors import BudgetError, GacError

SMALL = st.integers(0, 12)


def check_proved(solution: Solution, groups: list[Group], limits: list[int]) -> None:
    """Within the limits, counted in Python integers, and optimal by its own account."""
    assert within(solution.choice, groups, limits)
    assert solution.used == tuple(
        sum(int(group.costs[item, at]) for group, item in zip(groups, solution.choice, strict=True))
        for at in range(len(limits))
    )
    proof = solution.certificate
    assert (proof.status, proof.gap, proof.lower_bound) == ("optimal", 0.0, proof.value)


@pytest.mark.parametrize("seed", range(40 * len(KINDS)))
def test_no_choice_is_better(seed: int) -> None:
    assert fault(*random_instance(seed), brute_force_finds) == ""


@pytest.mark.parametrize("seed", range(len(KINDS) - 1))
def test_cp_sat_finds_nothing_better(seed: int) -> None:
    assert fault(*random_instance(seed, groups=30, items=12), cp_sat_finds) == ""


@st.composite
def instances(draw: st.DrawFn) -> tuple[list[Group], list[int]]:
    """Any losses, costs up to 2**53, and limits that are within 1 of what some choice uses."""
    limits = draw(st.integers(1, 3))
    loss = st.floats(0, 1e12) | st.integers(0, 3).map(float)
    item = st.tuples(loss, st.lists(SMALL | st.integers(0, 2**53), min_size=limits, max_size=limits))
    rows = draw(st.lists(st.lists(item, min_size=1, max_size=4), min_size=1, max_size=5))
    groups = [
        Group(f"g{at}", [loss for loss, _ in items], [costs for _, costs in items]) for at, items in enumerate(rows)
    ]
    picked = [draw(st.sampled_from(group.costs.tolist())) for group in groups]
    return groups, [sum(column) + draw(st.integers(-1, 1)) for column in zip(*picked, strict=True)]


# The relaxation's optimum is 0.
ZERO = [Group("a", [0.0, 4.0, 1.0, 0.0], [[1, 1], [0, 1], [0, 0], [0, 0]])], [1, 1]


@given(instances())
@example(ZERO)
def test_limits_that_a_choice_just_meets_or_misses(instance: tuple[list[Group], list[int]]) -> None:
    assert fault(*instance, brute_force_finds) == ""


@pytest.mark.parametrize("limits", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", [0, 1])
def test_equals_highs(limits: int, seed: int) -> None:
    assert fault(*curves(groups=30, items=16, limits=limits, seed=seed), highs_finds) == ""


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


def test_a_constant_cost_in_every_item_changes_nothing() -> None:
    groups, most = curves()
    shifted = [Group(group.name, group.values, group.costs * 7 + 2**40) for group in groups]
    assert knapsack(shifted, [most[0] * 7 + 6 + 2**40 * len(groups)]).choice == knapsack(groups, most).choice


def test_a_budget_for_everything_takes_the_smallest_losses() -> None:
    groups, _ = curves()
    solution = knapsack(groups, [10**12])
    assert solution.choice == tuple(int(group.values.argmin()) for group in groups)
    assert solution.certificate.method == "every group at its smallest loss"


def test_the_last_unit_of_a_budget_counts() -> None:
    groups = [Group("a", [1.0, 0.0], [[2**53 - 1], [2**53]]), Group("b", [2.0, 0.0], [[0], [2**53]])]
    assert knapsack(groups, [2**54]).choice == (1, 1)
    assert knapsack(groups, [2**54 - 1]).choice == (0, 1)
    assert knapsack(groups, [2**54 - 2]).choice == (1, 0)


def test_a_limit_beyond_int64_is_divided_before_it_is_cut() -> None:
    solution = knapsack([Group(name, [1.0, 0.0], [[0], [2**62]]) for name in "abc"], [2**64])
    assert (solution.choice, solution.certificate.value) == ((1, 1, 1), 0.0)


def test_losses_a_few_units_apart_are_told_apart() -> None:
    close = np.nextafter(1.0, 2.0)
    groups = [Group("a", [9.0, close, 1.0], [[0], [1], [1]]), Group("b", [9.0, 1.0, close], [[0], [1], [1]])]
    assert knapsack(groups, [2]).choice == (2, 1)


def test_a_hopeless_candidate_does_not_coarsen_the_others() -> None:
    groups = [Group("a", [1e30, 2e-9, 1e-9], [[0], [1], [2]]), Group("b", [1e30, 2e-9, 1.5e-9], [[0], [1], [2]])]
    assert knapsack(groups, [3]).choice == (2, 1)
    assert knapsack(groups, [3]).unit < 1e-23


def test_subnormal_losses() -> None:
    tiny = np.nextafter(0.0, 1.0)
    groups = [Group("a", [3 * tiny, tiny], [[0], [1]]), Group("b", [tiny, 0.0], [[0], [1]])]
    assert knapsack(groups, [1]).choice == (1, 0)


def test_limits_that_cannot_bind_are_not_kept_track_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(points: np.ndarray) -> None:
        raise AssertionError("one limit needs no front of several columns")

    groups, (most,) = curves(groups=60)
    loose = [Group(group.name, group.values, np.hstack([group.costs, group.costs // 3])) for group in groups]
    monkeypatch.setattr(lists, "nondominated", refuse)
    monkeypatch.setattr(lists, "_SIFT_FROM", 1)
    assert knapsack(loose, [most, most]).choice == knapsack(groups, [most]).choice


@pytest.fixture
def lists_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handful of states is enough for every outlook, every look for dominated states, and margins that shrink."""
    monkeypatch.setattr(lists, "_SIFT_FROM", 1)
    monkeypatch.setattr(search, "_CHEAP", 1)
    monkeypatch.setattr(search, "_LONGER", 1)


@pytest.mark.usefixtures("lists_are_long")
@pytest.mark.parametrize("kind", ["several limits", "correlated", "staircase", "divisors", "ties"])
@pytest.mark.parametrize("seed", range(15))
def test_long_lists_leave_out_nothing_better(kind: str, seed: int) -> None:
    assert fault(*random_instance(seed, kind=kind), brute_force_finds) == ""


@pytest.mark.usefixtures("lists_are_long")
@pytest.mark.parametrize("limits", [2, 3])
def test_margins_shrink_where_lists_grow(limits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shrunk, grown_lists = [], search.grown_lists

    def watched(core: Core, work: Work) -> Lists:
        grown = grown_lists(core, work)
        shrunk.append(grown.room < core.room)
        return grown

    monkeypatch.setattr(search, "grown_lists", watched)
    assert fault(*curves(groups=30, items=16, limits=limits), highs_finds) == ""
    assert any(shrunk)


def test_many_equal_groups() -> None:
    groups = [Group(f"g{at}", [3.0, 1.0, 0.0], [[0], [2], [3]]) for at in range(2000)]
    solution = knapsack(groups, [2001])
    assert (solution.certificate.status, solution.certificate.value) == ("optimal", 3999.0)


# --- a limit of work -------------------------------------------------------------------------------------------------


def check_bounded(solution: Solution, groups: list[Group], limits: list[int]) -> None:
    assert within(solution.choice, groups, limits)
    proof = solution.certificate
    assert proof.status == "feasible"
    assert 0 < proof.gap == pytest.approx(proof.value - proof.lower_bound)


def test_without_work_it_says_feasible_and_how_far_the_bound_is() -> None:
    groups, most = curves(groups=60, limits=2)
    best = knapsack(groups, most).certificate.value
    solution = knapsack(groups, most, work_limit=0)
    check_bounded(solution, groups, most)
    assert 0.99 * best < solution.certificate.lower_bound <= best <= solution.certificate.value < 1.1 * best
    # Three limits, and losses that are a sum of the costs.
    hard = random_instance(560, groups=30, items=12, kind="correlated")
    check_bounded(knapsack(*hard, work_limit=0), *hard)


@pytest.mark.parametrize("steps", [1, 100, 1_000, 3_000])
def test_a_search_is_cut_short_wherever_it_is(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    groups, most = curves(groups=60, limits=3)
    best = knapsack(groups, most).certificate.value
    monkeypatch.setattr(search, "cp_sat", lambda *_, **__: Answer("UNKNOWN", None, 0.0))
    early = knapsack(groups, most, work_limit=steps / STEPS)
    check_bounded(early, groups, most)
    assert early.certificate.lower_bound <= best <= early.certificate.value


def test_the_clock_changes_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of lists that are given up, nor of CP-SAT, which is stopped before it has a proof."""
    groups, most = random_instance(560, groups=30, items=12, kind="correlated")
    solutions = [knapsack(groups, most, work_limit=limit) for limit in (0.02, 1.0)]
    assert [solution.certificate.status for solution in solutions] == ["feasible"] * 2
    assert "CP-SAT" in solutions[1].certificate.method
    years = count(step=1e9)
    for clock in ("time", "monotonic", "perf_counter", "process_time"):
        monkeypatch.setattr(time, clock, lambda: float(next(years)))
    assert [knapsack(groups, most, work_limit=limit) for limit in (0.02, 1.0)] == solutions


def test_ctrl_c_stops_cp_sat(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, most = random_instance(560, groups=30, items=12, kind="correlated")
    monkeypatch.setattr(states, "MOST_STATES", 4)
    stopped, stop = [], CpSolver.stop_search

    def watched(solver: CpSolver) -> None:
        stopped.append(solver)
        stop(solver)

    monkeypatch.setattr(CpSolver, "stop_search", watched)
    monkeypatch.setattr(Future, "result", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        knapsack(groups, most)
    assert stopped


def test_a_search_that_grows_too_large_is_settled_by_cp_sat(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what CP-SAT finds without a proof is kept."""
    groups, most = curves(groups=60, limits=2)
    first = knapsack(groups, most, work_limit=0).certificate.value
    best, exact = knapsack(groups, most).certificate.value, search.cp_sat
    monkeypatch.setattr(states, "MOST_STATES", 4)
    settled = knapsack(groups, most)
    check_proved(settled, groups, most)
    assert settled.certificate.value == best
    assert "CP-SAT" in settled.certificate.method
    monkeypatch.setattr(search, "cp_sat", lambda *given, **hint: replace(exact(*given, **hint), status="FEASIBLE"))
    solution = knapsack(groups, most)
    check_bounded(solution, groups, most)
    assert solution.certificate.value < first


def test_cp_sat_loses_no_choice_of_large_costs() -> None:
    assert fault(*random_instance(4351, groups=30, items=12, kind="huge costs"), cp_sat_finds) == ""


# --- what cannot be solved ------------------------------------------------------------------------------------------


def test_one_unit_short_of_a_sum_beyond_float64() -> None:
    groups = [Group(name, [0.0, 1.0], [[0, 2**53 + 1], [1, 2**53]]) for name in "abc"]
    assert knapsack(groups, [2, 3 * 2**53 + 1]).used == (2, 3 * 2**53 + 1)
    with pytest.raises(BudgetError, match=r"limit 2 of 27021597764222976 .* it falls short by 1;"):
        knapsack(groups, [2, 3 * 2**53])


NUMBERS = "expected one number an item, and one item at least. Give every group a one-dimensional array of losses."
LOSSES = "expected finite losses, 0 or more. Remove the item, or shift the group's losses so that the smallest is 0."
WHOLE = "expected integers that fit int64. Round the costs up to whole units (parameters, ns, bytes) first."
ROWS = "expected shape (2, limits). Give one row an item and one column a limit."
LENGTHS = "expected one entry an item, all of one length. Give every item one value and one cost under each limit."


@pytest.mark.parametrize(
    ("values", "costs", "message"),
    [
        ([], np.zeros((0, 1), int), f"group 'x' has values of shape (0,) and type float64; {NUMBERS}"),
        ([True, False], [[1], [2]], f"group 'x' has values of shape (2,) and type bool; {NUMBERS}"),
        ([0.0, np.nan], [[1], [2]], f"group 'x' has value nan at item 1; {LOSSES}"),
        ([0.0, np.inf], [[1], [2]], f"group 'x' has value inf at item 1; {LOSSES}"),
        ([-0.5, 1.0], [[1], [2]], f"group 'x' has value -0.5 at item 0; {LOSSES}"),
        ([0.0, 1.0], [[1.5], [2.0]], f"group 'x' has costs of type float64; {WHOLE}"),
        ([0.0, 1.0], [[1], [2**70]], f"group 'x' has costs of type object; {WHOLE}"),
        ([0.0, 1.0], [1, 2], f"group 'x' has costs of shape (2,) for 2 items; {ROWS}"),
        ([0.0, 1.0], [[1]], f"group 'x' has costs of shape (1, 1) for 2 items; {ROWS}"),
        ([0.0, 1.0], [[1], [2, 3]], f"group 'x' has costs that make no array: their lengths differ; {LENGTHS}"),
        (
            [0.0, 1.0],
            [[1], [-2]],
            "group 'x' has cost -2 at item 1, limit 0; expected costs of 0 or more. "
            "Correct the cost; an unknown cost cannot be limited.",
        ),
    ],
)
def test_a_malformed_group_is_named(values: list, costs: list, message: str) -> None:
    with pytest.raises(GacError) as caught:
        Group("x", values, costs)
    assert str(caught.value) == message


ONE, NO_ONE = Group("a", [0.0], [[1]]), "expected one of each at least. Give a group and a limit."
A, B = Group("a", [0.0, 1.0], [[9, 1], [1, 9]]), Group("b", [0.0, 1.0], [[9, 1], [1, 9]])
TRADING = [Group(name, [0.0, 1.0], [[cost, 0], [0, cost]]) for name, cost in (("a", 2), ("b", 3), ("c", 3))]
CHEAPER = "Raise the limit, or add cheaper candidates."


@pytest.mark.parametrize(
    ("groups", "limits", "named", "message"),
    [
        (
            [Group("a", [0.0, 1.0], [[9], [4]]), Group("b", [0.0], [[7]])],
            [10],
            {},
            "limit 1 of 10 cannot be met: it falls short by 1; expected 11 or more, the smallest reachable "
            f"(group 'b' alone takes 7). {CHEAPER}",
        ),
        (
            [A, B],
            [9, 9],
            {"names": ["parameters", "latency"]},
            "latency of 9 cannot be met beside parameters: it falls short by 9; expected 18 or more, the smallest "
            f"reachable beside parameters (group 'a' alone takes 9). {CHEAPER}",
        ),
        (
            [A, Group("b", [0.0], [[0, 3]])],
            [1, 3],
            {},
            "limit 2 of 3 cannot be met: it falls short by 1; expected 4 or more, the smallest reachable "
            f"(group 'b' alone takes 3). {CHEAPER}",
        ),
        (
            [A, Group("b", [0.0], [[0, 0]])],
            [5, 5],
            {},
            "limit 2 of 5 cannot be met beside limit 1: it falls short by 4; expected 9 or more, the smallest "
            f"reachable beside limit 1 (group 'a' alone takes 9). {CHEAPER}",
        ),
        (
            TRADING,
            [4, 4],
            {"work_limit": 0},
            "limit 2 of 4 beside limit 1: the work was spent before a choice was found or ruled out (best 8); expected "
            "a choice that takes 4 or less. Raise the limit, or allow more work.",
        ),
        ([], [1], {}, f"0 groups and 1 limits; {NO_ONE}"),
        ([ONE], [], {}, f"1 groups and 0 limits; {NO_ONE}"),
        (
            [ONE],
            [1, 2],
            {},
            "group 'a' has costs under 1 limits; expected 2, as many as there are limits. "
            "Give one column of costs a limit.",
        ),
        (
            [ONE],
            [1.5],
            {},
            "limits [1.5]; expected integers. Round the limits down to whole units (parameters, ns, bytes).",
        ),
        (
            [ONE],
            [1],
            {"names": ["a", "b"]},
            "2 names for 1 limits; expected one name a limit. Name every limit, or none.",
        ),
    ],
)
def test_an_instance_that_cannot_be_solved(groups: list[Group], limits: list, named: Any, message: str) -> None:
    with pytest.raises(GacError) as caught:
        knapsack(groups, limits, **named)
    assert str(caught.value) == message
    assert isinstance(caught.value, BudgetError) == ("Raise the limit" in message)
