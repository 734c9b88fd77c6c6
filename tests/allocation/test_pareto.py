"""Fronts, dominance queries and pruned combinations equal every pair compared."""

from functools import reduce
from itertools import product

import numpy as np
import pytest

from gac.allocation import pareto
from gac.allocation.pareto import ParetoSet, dominated, nondominated
from gac.core.arrays import Floats


def points_of(rng: np.random.Generator, most: int, columns: int) -> Floats:
    """Small integers with ties, and some unknown ones."""
    points = rng.integers(0, rng.integers(2, 30), (rng.integers(1, most), columns)).astype(np.float64)
    points[rng.random(points.shape) < 0.1] = np.inf
    return points


def beaten(points: Floats, by: Floats) -> np.ndarray:
    no_larger = (by[None] <= points[:, None]).all(axis=2)
    return (no_larger & (by[None] < points[:, None]).any(axis=2)).any(axis=1)


def front(points: Floats) -> list[bool]:
    """Nondominated, and the first of equal ones."""
    first = [not (points[:row] == points[row]).all(axis=1).any() for row in range(len(points))]
    return (~beaten(points, points) & first).tolist()


@pytest.mark.parametrize("columns", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("pairwise", [4, 1 << 11])
def test_the_front_equals_every_pair_compared(columns: int, pairwise: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pareto, "_PAIRWISE", pairwise)
    for seed in range(10):
        points = points_of(np.random.default_rng(seed), 50, columns)
        assert nondominated(points).tolist() == front(points)


@pytest.mark.parametrize("columns", [1, 2, 4])
@pytest.mark.parametrize("pairwise", [4, 1 << 11])
def test_dominance_queries_equal_every_pair_compared(
    columns: int, pairwise: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pareto, "_PAIRWISE", pairwise)
    for seed in range(10):
        rng = np.random.default_rng(seed)
        points, by = points_of(rng, 150, columns), points_of(rng, 150, columns)
        assert dominated(points, by).tolist() == beaten(points, by).tolist()


def kept(known: ParetoSet, options: list[Floats], extra: Floats) -> list[tuple[int, ...]] | None:
    positions = known.nondominated(options, extra)
    return None if positions is None else list(zip(*(picked.tolist() for picked in positions), strict=True))


@pytest.mark.parametrize("blocks", [1, 4, 1 << 11])
@pytest.mark.parametrize("weights", [1, 2, 3])
def test_pruned_combinations_are_the_dominated_ones(blocks: int, weights: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses are floats whose sums are rounded, some of them ties; a few latencies are unknown."""
    monkeypatch.setattr(pareto, "_FEW", 0)
    monkeypatch.setattr(pareto, "_BLOCKS", blocks)
    for seed in range(10):
        rng = np.random.default_rng(seed)
        columns = int(rng.integers(1, 5))
        options = [rng.integers(0, 9, (rng.integers(1, 16), columns)) * 0.1 for _ in range(weights)]
        for rows in options:
            rows[rng.random(rows.shape) < 0.02] = np.inf
        extra = rng.integers(0, 3, columns) * 0.1
        combinations = list(product(*(range(len(rows)) for rows in options)))
        sums = np.array(
            [
                reduce(np.add, [rows[row] for rows, row in zip(options, picked, strict=True)]) + extra
                for picked in combinations
            ]
        )
        known = [sums[rng.integers(0, len(sums), 5)], sums[rng.integers(0, len(sums), 9)] * rng.choice([0.9, 1.0, 1.2])]
        mask = ~beaten(sums, np.concatenate(known))
        expected = [combination for combination, stays in zip(combinations, mask, strict=True) if stays]
        assert kept(ParetoSet().extend(*known), options, extra) == expected
