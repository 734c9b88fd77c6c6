"""What the groups to come add at least, beside every choice of them."""

from fractions import Fraction
from itertools import product

import numpy as np
import pytest

from gac.allocation.knapsack.outlook import outlook

SIZE = 1 << 14


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("multiplier", [0.0, 1 / 3, 12345.678, 2.0**40 + 0.1])
@pytest.mark.parametrize("step", [1, 9, 2**20, 2**48])
def test_no_choice_adds_less_and_one_adds_hardly_more(seed: int, multiplier: float, step: int) -> None:
    rng = np.random.default_rng(seed)
    costs, reduced = rng.integers(-SIZE // 2, SIZE // 2, 6) * step, rng.integers(0, 1 << 40, 6)
    groups = [slice(0, 2), slice(2, 3), slice(3, 6)]
    free = int(rng.integers(-SIZE // 2, SIZE // 2) * step + rng.integers(step))
    found = outlook(costs, reduced, groups, free, multiplier)
    used = rng.integers(-SIZE, SIZE, 10) * found.step
    for place in range(len(groups) + 1):
        for taken, added in zip(used.tolist(), found.added(used, place).tolist(), strict=True):
            sums = []
            for choice in product(*([None, *range(group.start, group.stop)] for group in groups[place:])):
                chosen = [item for item in choice if item is not None]
                left = (free - taken - sum(int(costs[item]) for item in chosen)) % (SIZE * found.step)
                wasted = min(Fraction(multiplier) * left, Fraction(2**61))
                sums.append(sum(int(reduced[item]) for item in chosen) + wasted)
            assert min(sums) * (1 - Fraction(1, 2**49)) - 1 <= added <= min(sums)


def test_nothing_to_come() -> None:
    nothing = np.zeros(0, dtype=np.int64)
    found = outlook(nothing, nothing, [], 7, 2.0)
    assert found.added(np.array([0, 3, 8]), 0).tolist() == [13, 7, 2 * (SIZE - 1) - 1]
