from itertools import product

import numpy as np
import pytest

from gac.allocation.weight_rules import Chosen, Rounding, at_ranks
from gac.core.errors import BudgetError
from gac.forms import form_named
from gac.models.sites import Weight
from gac_extensions.baselines.rules import (
    fisher_ranks,
    most_important,
    sensitivity_ranks,
    uniform_ranks,
    zero_sum_ranks,
)

LOW_RANK = form_named("low_rank")
Q, K = Weight("q", 64, 64), Weight("k", 32, 64)


def test_uniform_ranks_of_llama_3_8b_at_0_8() -> None:
    weights = [Weight("q", 4096, 4096), Weight("k", 1024, 4096), Weight("gate", 14336, 4096)]
    assert uniform_ranks(weights, 0.8) == {"q": 1638, "k": 655, "gate": 2548}


def test_a_weight_that_fisher_would_grow_stays_dense_and_leaves_the_rest_to_others() -> None:
    weights = [Q, Weight("b", 64, 64), Weight("c", 64, 64)]
    ranks = fisher_ranks(weights, {"q": 100.0, "b": 1.0, "c": 1.0}, Q.params + 128 * 20)
    assert ranks == {"q": 64, "b": 10, "c": 10}


@pytest.mark.parametrize("budget", [0.2, 0.8])
def test_fisher_ranks_keep_the_limit(budget: float) -> None:
    draw = np.random.default_rng(0)
    weights = [Weight(f"w{index}", 64, int(size)) for index, size in enumerate(draw.integers(40, 200, 30))]
    scores = {weight.name: float(draw.lognormal()) for weight in weights}
    limit = int(budget * sum(weight.params for weight in weights))
    chosen = at_ranks(weights, fisher_ranks(weights, scores, limit), None, LOW_RANK)
    assert sum(form_named(chosen[w.name].form).params(w, chosen[w.name].dim) for w in weights) <= limit


def test_of_groups_the_cache_is_shared_out() -> None:
    """Two groups of 32 rows: a rank costs 2 numbers of a token, whatever its parameters."""
    form, weights = form_named("latent:2"), [Weight(name, 64, 48, heads=4, cached=True) for name in "ab"]
    assert uniform_ranks(weights, 0.5, form) == {"a": 16, "b": 16}
    assert fisher_ranks(weights, {"a": 1.0, "b": 3.0}, 64, form) == {"a": 8, "b": 24}
    assert fisher_ranks(weights, {"a": 1.0, "b": 30.0}, 80, form) == {"a": 8, "b": 32}
    assert at_ranks(weights, {"a": 8, "b": 32}, None, form)["b"] == Chosen("dense", 48, 48)


LOSSES = {"q": np.array([[8, 3.0], [16, 2.2], [24, 2.1]]), "k": np.array([[4, 2.5], [8, 2.3], [12, 2.0]])}


@pytest.mark.parametrize(
    ("limit", "ranks"),
    [
        (4096 + 2048, {"q": 64, "k": 32}),
        (4096 + 96 * 12, {"q": 64, "k": 12}),
        (128 * 24 + 96 * 12, {"q": 24, "k": 12}),
        (128 * 16 + 96 * 8, {"q": 16, "k": 8}),
        (128 * 16 + 96 * 8 - 1, {"q": 16, "k": 4}),
        (1, {"q": 8, "k": 4}),
    ],
)
def test_sensitivity_finds_the_least_threshold_that_keeps_the_limit(limit: int, ranks: dict[str, int]) -> None:
    assert sensitivity_ranks([Q, K], LOSSES, limit) == ranks


@pytest.mark.parametrize(
    ("way", "dims"),
    [
        ("nearest", [8, 8, 8, 16, 16]),
        ("down", [8, 8, 8, 8, 16]),
        ("up", [8, 8, 16, 16, 16]),
        ("pad", [8, 8, 16, 16, 16]),
    ],
)
def test_roundings_to_8(way: str, dims: list[int]) -> None:
    assert [Rounding(way, 8).dim(rank) for rank in (1, 8, 11, 12, 16)] == dims


@pytest.mark.parametrize(
    ("rank", "rounding", "choice"),
    [
        (20, Rounding("pad", 8), ("low_rank", 24, 20)),  # it keeps the loss of the rank
        (20, Rounding("up", 8), ("low_rank", 24, 24)),
        (0, None, ("low_rank", 1, 1)),
        (31, None, ("low_rank", 31, 31)),
        (32, None, ("dense", 64, 64)),  # a pair is no smaller
        (20, Rounding("pad", 64), ("dense", 64, 64)),
    ],
)
def test_a_rank_becomes_a_choice(rank: int, rounding: Rounding | None, choice: tuple[str, int, int]) -> None:
    assert at_ranks([Q], {"q": rank}, rounding, LOW_RANK) == {"q": Chosen(*choice)}


def test_a_weight_without_a_rank_stays_dense() -> None:
    nine = Weight("o", 576, 576, values="in", heads=9)
    assert at_ranks([nine], {}, None, form_named("latent")) == {"o": Chosen("dense", 576, 576)}


# --- ZS-SVD ---

A, B = Weight("a", 8, 8), Weight("b", 8, 8)  # a pair saves from rank 3 on, 16 parameters a component
SAVES = 3


def changes(*last_first: float) -> np.ndarray:
    """The smallest components' changes, then large ones that raise the loss."""
    return np.array([*last_first, *[9.0] * (8 - len(last_first))])[::-1]


def test_the_smallest_change_goes_first() -> None:
    chosen = {"a": changes(*[0.1] * 8), "b": changes(*[0.2] * 8)}
    assert zero_sum_ranks([A, B], chosen, 64 + 48) == {"a": SAVES, "b": 8}


def test_what_lowers_the_loss_makes_up_for_what_raised_it() -> None:
    """First +1 of a; then, above zero, -3 of b before +1 of a; then, below zero, a until it saves."""
    chosen = {"a": changes(*[1.0] * 8), "b": changes(-3.0, 5.0)}
    assert zero_sum_ranks([A, B], chosen, 64 + 48) == {"a": SAVES, "b": 7}


def test_the_other_kind_is_taken_where_one_has_run_out_and_one_component_stays() -> None:
    assert zero_sum_ranks([A], {"a": np.full(8, -1.0)}, 48) == {"a": SAVES}
    assert zero_sum_ranks([A], {"a": changes()}, 1) == {"a": 1}
    assert zero_sum_ranks([Weight("c", 1, 8)], {"c": np.ones(1)}, 1) == {"c": 1}


@pytest.mark.parametrize("budget", [0.3, 0.9])
def test_the_limit_is_kept_and_nothing_is_dropped_in_vain(budget: float) -> None:
    draw = np.random.default_rng(0)
    weights = [Weight(f"w{index}", 24, int(size)) for index, size in enumerate(draw.integers(16, 60, 20))]
    chosen = {weight.name: draw.normal(size=min(24, weight.in_features)) for weight in weights}
    limit = int(budget * sum(weight.params for weight in weights))
    ranks = zero_sum_ranks(weights, chosen, limit)
    used = sum(min(LOW_RANK.params(weight, ranks[weight.name]), weight.params) for weight in weights)
    most = max(weight.out_features + weight.in_features for weight in weights)
    assert limit - 2 * most < used <= limit


# --- the importance objective ---

WEIGHTS = [Weight(name, 64, 64) for name in "abc"]
SCORES = {"a": 1.0, "b": 2.0, "c": 3.0}
START = {weight.name: Chosen("low_rank", 20, 20) for weight in WEIGHTS}
CANDIDATES = {weight.name: np.arange(8, 32, 4) for weight in WEIGHTS}


def importance_dims(limit: int, window: int = 4, **ranks: np.ndarray) -> list[int]:
    choice = most_important(WEIGHTS, SCORES, START, CANDIDATES | ranks, limit, window)
    return [choice[weight.name].dim for weight in WEIGHTS]


def test_it_is_the_published_optimum() -> None:
    limit = 128 * 62
    options = [rank for rank in CANDIDATES["a"].tolist() if abs(rank - 20) <= 8]
    best = max(
        sum(SCORES[name] * 128 * (rank - 20) for name, rank in zip("abc", chosen, strict=True))
        for chosen in product(options, repeat=3)
        if 128 * sum(chosen) <= limit
    )
    choice = importance_dims(limit, window=8)
    assert sum(SCORES[name] * 128 * (rank - 20) for name, rank in zip("abc", choice, strict=True)) == best


def test_without_any_rank_a_weight_stays_dense() -> None:
    assert most_important(WEIGHTS[:1], SCORES, START, {"a": np.arange(0)}, 4096)["a"] == Chosen("dense", 64, 64)


def test_a_window_above_the_budget() -> None:
    with pytest.raises(BudgetError, match="the parameter limit of 100 cannot be met"):
        importance_dims(100)
