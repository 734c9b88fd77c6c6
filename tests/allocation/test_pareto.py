import numpy as np
import pytest

from gac.allocation import pareto
from gac.allocation.pareto import front, front_of_each_kind


def beaten(points: np.ndarray, at: int) -> bool:
    others = [i for i in range(len(points)) if i != at and (points[i] <= points[at]).all()]
    return any((points[i] < points[at]).any() or i < at for i in others)


@pytest.mark.parametrize("columns", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("pairwise", [4, 1 << 11])
def test_equals_every_pair_compared(columns: int, pairwise: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pareto, "_PAIRWISE", pairwise)
    for seed in range(40):
        rng = np.random.default_rng(seed)
        points = rng.integers(0, rng.integers(2, 30), (rng.integers(1, 50), columns))
        expected = [not beaten(points, at) for at in range(len(points))]
        assert front(points).tolist() == expected


@pytest.mark.parametrize("rounds", [0, 1, 64])
def test_kinds_are_not_compared(rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pareto, "_ROUNDS", rounds)
    for seed in range(100):
        rng = np.random.default_rng(seed)
        points = rng.integers(0, rng.integers(2, 30), (rng.integers(1, 200), 3)).astype(np.float64)
        points[rng.random(points.shape) < 0.1] = np.inf
        kinds = rng.integers(0, rng.integers(1, 5), (len(points), 2))
        expected = np.zeros(len(points), dtype=np.bool_)
        for kind in np.unique(kinds, axis=0):
            same = np.flatnonzero((kinds == kind).all(axis=1))
            expected[same[front(points[same])]] = True
        assert front_of_each_kind(points, kinds).tolist() == expected.tolist()
