from itertools import product

import numpy as np
import pytest

from gac.allocation.weight_rules import Chosen
from gac.baselines.rules import most_important
from gac.core.errors import BudgetError
from gac.models.sites import Weight

WEIGHTS = [Weight(name, 64, 64) for name in "abc"]
SCORES = {"a": 1.0, "b": 2.0, "c": 3.0}
START = {weight.name: Chosen("low_rank", 20, 20) for weight in WEIGHTS}
RANKS = {weight.name: np.arange(8, 32, 4) for weight in WEIGHTS}


def dims(limit: int, window: int = 4, **ranks: np.ndarray) -> list[int]:
    found = most_important(WEIGHTS, SCORES, START, RANKS | ranks, limit, window)
    return [found[weight.name].dim for weight in WEIGHTS]


def test_the_best_score_goes_to_the_top_of_its_window_and_the_worst_to_the_bottom() -> None:
    assert dims(128 * 60) == [16, 20, 24]


def test_it_is_the_published_optimum() -> None:
    limit = 128 * 62
    options = [rank for rank in RANKS["a"].tolist() if abs(rank - 20) <= 8]
    best = max(
        sum(SCORES[name] * 128 * (rank - 20) for name, rank in zip("abc", chosen, strict=True))
        for chosen in product(options, repeat=3)
        if 128 * sum(chosen) <= limit
    )
    found = dims(limit, window=8)
    assert sum(SCORES[name] * 128 * (rank - 20) for name, rank in zip("abc", found, strict=True)) == best


def test_without_a_rank_in_the_window_the_nearest_is_taken() -> None:
    assert dims(128 * 60, a=np.array([4, 8]))[0] == 8


def test_without_any_rank_a_weight_stays_dense() -> None:
    assert most_important(WEIGHTS[:1], SCORES, START, {"a": np.arange(0)}, 4096)["a"] == Chosen("dense", 64, 64)


def test_what_starts_dense_stays_dense() -> None:
    start = {"a": Chosen("dense", 64, 64)}
    assert most_important(WEIGHTS[:1], SCORES, start, RANKS, 4096)["a"] == Chosen("dense", 64, 64)


def test_a_window_above_the_budget() -> None:
    with pytest.raises(BudgetError, match="the parameter limit of 100 cannot be met"):
        dims(100)
