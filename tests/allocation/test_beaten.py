import numpy as np
import pytest

from gac.allocation import beaten
from gac.allocation.beaten import Beaters


@pytest.mark.parametrize("columns", [1, 2, 4])
@pytest.mark.parametrize("at_once", [1, 64, 70, 512])
def test_equals_every_pair_compared(columns: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beaten, "_AT_ONCE", at_once)
    for seed in range(40):
        rng = np.random.default_rng(seed)
        points, by = (
            rng.integers(0, rng.integers(2, 30), (rng.integers(0, 150), columns)).astype(np.float64) for _ in range(2)
        )
        points[rng.random(points.shape) < 0.1] = np.inf
        by[rng.random(by.shape) < 0.1] = np.inf
        no_larger = (by[None] <= points[:, None]).all(axis=2)
        smaller = (by[None] < points[:, None]).any(axis=2)
        assert Beaters(by).beat(points).tolist() == (no_larger & smaller).any(axis=1).tolist()


def test_equals_do_not_beat_each_other() -> None:
    points = np.array([[1.0, 2.0], [1.0, 3.0], [0.0, 2.0], [np.inf, 2.0]])
    assert Beaters(points[:1]).beat(points).tolist() == [False, True, False, True]
    assert Beaters(points).beat(points).tolist() == [True, True, False, True]
