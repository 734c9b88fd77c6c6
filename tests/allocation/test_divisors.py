"""Common divisors of costs bound what partial choices leave unused."""

from fractions import Fraction

import numpy as np
import pytest
from knapsack_instances import random_instance

from gac.allocation.knapsack import knapsack, lists
from gac.allocation.knapsack.lists import divisor_order, least_waste
from gac.core.errors import BudgetError


def test_the_groups_that_hide_a_divisor_come_first() -> None:
    divisors = np.array([36, 9, 16, 36, 4, 36, 9])
    order, gcds = divisor_order(divisors, np.array([1, 2, 3, 4, 5, 6, 7]))
    assert order == [2, 4, 6, 1, 5, 3, 0]
    assert gcds == [1, 1, 9, 9, 36, 36, 36, 0]
    assert divisor_order(divisors[:0], divisors[:0]) == ([], [0])


@pytest.mark.parametrize("multiplier", [0.0, 1 / 3, 2.0**40 + 0.1])
@pytest.mark.parametrize("step", [1, 36, 2**55])
def test_no_more_is_wasted_than_the_least_that_is_left_unused_costs(multiplier: float, step: int) -> None:
    rng = np.random.default_rng(1)
    unused = rng.integers(-(2**50), 2**50, 1000)
    for left, value in zip(unused.tolist(), least_waste(unused, step, multiplier).tolist(), strict=True):
        least = Fraction(multiplier) * (left % step)
        assert min(int(least * (1 - Fraction(1, 2**49))) - 1, 2**61) <= value <= least
        assert value >= 0


@pytest.mark.parametrize("seed", range(3))
def test_the_optimum_is_the_same_without(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    groups, limits = random_instance(seed, groups=60, items=12, kind="divisors")
    groups = [type(group)(group.name, group.values, group.costs[:, :1]) for group in groups]
    try:
        solution = knapsack(groups, limits[:1])
    except BudgetError:
        return
    monkeypatch.setattr(lists, "least_waste", lambda unused, step, multiplier: np.zeros_like(unused))
    plain = knapsack(groups, limits[:1])
    assert solution.certificate.status == plain.certificate.status == "optimal"
    assert solution.certificate.value == pytest.approx(plain.certificate.value, rel=1e-12)
