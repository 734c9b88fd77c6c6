import numpy as np
import pytest

from gac.baselines.rules import zero_sum_ranks
from gac.forms import form_named
from gac.models.sites import Weight

A, B = Weight("a", 8, 8), Weight("b", 8, 8)  # a pair saves from rank 3 on, 16 parameters a component
SAVES = 3


def changes(*last_first: float, full: int = 8) -> np.ndarray:
    """The smallest components' changes, then large ones that raise the loss."""
    return np.array([*last_first, *[9.0] * (full - len(last_first))])[::-1]


def test_the_smallest_change_goes_first() -> None:
    given = {"a": changes(*[0.1] * 8), "b": changes(*[0.2] * 8)}
    assert zero_sum_ranks([A, B], given, 64 + 48) == {"a": SAVES, "b": 8}


def test_what_lowers_the_loss_makes_up_for_what_raised_it() -> None:
    """First +1 of a; then, above zero, -3 of b before +1 of a; then, below zero, a until it saves."""
    given = {"a": changes(*[1.0] * 8), "b": changes(-3.0, 5.0)}
    assert zero_sum_ranks([A, B], given, 64 + 48) == {"a": SAVES, "b": 7}


def test_only_the_smallest_component_of_a_weight_is_offered() -> None:
    """The second smallest of b is free, but lies behind one that costs more than all of a."""
    given = {"a": changes(*[0.1] * 8), "b": changes(5.0, 0.0, 0.0)}
    assert zero_sum_ranks([A, B], given, 64 + 48) == {"a": SAVES, "b": 8}


def test_components_above_the_break_even_rank_save_nothing() -> None:
    assert zero_sum_ranks([A], {"a": changes()}, 63) == {"a": SAVES}
    assert zero_sum_ranks([A], {"a": changes()}, 47) == {"a": SAVES - 1}


def test_the_other_kind_is_taken_where_one_has_run_out_and_one_component_stays() -> None:
    assert zero_sum_ranks([A], {"a": np.full(8, -1.0)}, 48) == {"a": SAVES}
    assert zero_sum_ranks([A], {"a": changes()}, 1) == {"a": 1}
    assert zero_sum_ranks([Weight("c", 1, 8)], {"c": np.ones(1)}, 1) == {"c": 1}


@pytest.mark.parametrize("budget", [0.3, 0.6, 0.9])
def test_the_limit_is_kept_and_nothing_is_dropped_in_vain(budget: float) -> None:
    draw = np.random.default_rng(0)
    weights = [Weight(f"w{at}", 24, int(size)) for at, size in enumerate(draw.integers(16, 60, 20))]
    given = {weight.name: draw.normal(size=min(24, weight.in_features)) for weight in weights}
    limit = int(budget * sum(weight.params for weight in weights))
    ranks = zero_sum_ranks(weights, given, limit)
    low_rank = form_named("low_rank")
    used = sum(min(low_rank.params(weight, ranks[weight.name]), weight.params) for weight in weights)
    most = max(weight.out_features + weight.in_features for weight in weights)
    assert limit - 2 * most < used <= limit
