"""The group relaxation is a lower bound of every choice of the remaining groups."""

from collections.abc import Iterator
from fractions import Fraction
from itertools import product

import numpy as np
import pytest

from gac.allocation.knapsack.relaxation import group_relaxation
from gac.core.arrays import Ints

SIZE = 1 << 14
ONE = np.zeros(1, dtype=np.int64)
GROUPS = [slice(0, 2), slice(2, 3), slice(3, 6)]


def choices(costs: Ints, reduced: Ints, remaining: int) -> Iterator[tuple[Ints, int]]:
    """Cost of each choice of the last groups under each limit, and the sum of its reduced values."""
    last = GROUPS[len(GROUPS) - remaining :]
    for choice in product(*([None, *range(group.start, group.stop)] for group in last)):
        chosen = [item for item in choice if item is not None]
        yield costs[:, chosen].sum(axis=1), sum(reduced[chosen].tolist())


@pytest.mark.parametrize("multiplier", [0.0, 1 / 3, 2.0**40 + 0.1])
@pytest.mark.parametrize("step", [1, 9, 2**48])
def test_under_one_limit_no_choice_adds_less_and_one_adds_hardly_more(multiplier: float, step: int) -> None:
    rng = np.random.default_rng(0)
    costs, reduced = rng.integers(-SIZE // 2, SIZE // 2, (1, 6)) * step, rng.integers(0, 1 << 40, 6)
    free = rng.integers(-SIZE // 2, SIZE // 2, 1) * step + rng.integers(step)
    width = np.gcd.reduce(costs, axis=1)
    relaxation = group_relaxation(ONE, costs, reduced, GROUPS, free, np.array([multiplier]), width)
    used = rng.integers(-SIZE, SIZE, (1, 10)) * width
    for remaining in range(len(GROUPS) + 1):
        for taken, added in zip(used[0].tolist(), relaxation.lower_bound(used, remaining).tolist(), strict=True):
            sums = []
            for (cost,), more in choices(costs, reduced, remaining):
                left = (int(free[0]) - taken - int(cost)) % (SIZE * int(width[0]))
                sums.append(more + min(Fraction(multiplier) * left, Fraction(2**61)))
            assert min(sums) * (1 - Fraction(1, 2**49)) - 1 <= added <= min(sums)


@pytest.mark.parametrize("widths", [(1, 7, 5), (13, 100, 5), (300, 2000, 5)])
@pytest.mark.parametrize("limits", [[0, 1], [2, 0, 1]])
def test_under_several_limits_no_choice_within_them_adds_less(widths: tuple[int, int, int], limits: list[int]) -> None:
    rng = np.random.default_rng(0)
    costs, reduced = rng.integers(-1000, 1000, (3, 6)), rng.integers(0, 10**5, 6)
    costs[:, :2] = 1000, 999
    free, multipliers = rng.integers(-1000, 1000, 3)[limits], rng.integers(1, 1000, len(limits))
    spans = np.array(widths)[: len(limits)]
    relaxation = group_relaxation(
        np.array(limits), costs[limits], reduced, GROUPS, free, multipliers.astype(float), spans
    )
    used = rng.integers(-3000, 1000, (3, 1000))
    for remaining in range(len(GROUPS) + 1):
        added = relaxation.lower_bound(used, remaining)
        for cost, more in choices(costs, reduced, remaining):
            left = free[:, None] - (used + cost[:, None])[limits]
            assert (added <= more + multipliers @ left)[(left >= 0).all(axis=0)].all()
        assert added.any()


def test_nothing_to_come() -> None:
    nothing = np.zeros((1, 0), dtype=np.int64)
    relaxation = group_relaxation(ONE, nothing, nothing[0], [], np.array([7]), np.array([2.0]), np.array([1]))
    assert relaxation.lower_bound(np.array([[0, 3, 8]]), 0).tolist() == [13, 7, 2 * (SIZE - 1) - 1]
