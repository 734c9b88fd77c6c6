import numpy as np
import pytest

from gac.allocation import pareto
from gac.allocation.pareto import front


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
