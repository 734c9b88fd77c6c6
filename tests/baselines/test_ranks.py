import numpy as np
import pytest

from gac.allocation.weight_rules import Chosen, Rounding, at_ranks
from gac.baselines.rules import (
    fisher_ranks,
    fisher_score,
    sensitivity_ranks,
    uniform_ranks,
)
from gac.forms import form_named
from gac.forms.loss_curves import LossCurve
from gac.models.sites import Weight

LOW_RANK = form_named("low_rank")
Q, K = Weight("q", 64, 64), Weight("k", 32, 64)


def test_uniform_ranks_of_llama_3_8b_at_0_8() -> None:
    weights = [Weight("q", 4096, 4096), Weight("k", 1024, 4096), Weight("gate", 14336, 4096)]
    assert uniform_ranks(weights, 0.8) == {"q": 1638, "k": 655, "gate": 2548}


def test_a_fisher_score_is_the_loss_at_rank_0_by_parameter() -> None:
    assert fisher_score(Weight("w", 2, 4), LossCurve(np.array([4.0, 1.0, 0.0]))) == 0.5


def test_fisher_ranks_share_out_parameters_where_shapes_differ() -> None:
    ranks = fisher_ranks([Q, K], {"q": 1.0, "k": 2.0}, 128 * 5 + 96 * 10)
    assert ranks == {"q": 5, "k": 10}


def test_a_weight_that_fisher_would_grow_stays_dense_and_leaves_the_rest_to_others() -> None:
    weights = [Q, Weight("b", 64, 64), Weight("c", 64, 64)]
    ranks = fisher_ranks(weights, {"q": 100.0, "b": 1.0, "c": 1.0}, Q.params + 128 * 20)
    assert ranks == {"q": 64, "b": 10, "c": 10}


@pytest.mark.parametrize("budget", [0.2, 0.5, 0.8, 1.0])
def test_fisher_ranks_keep_the_limit(budget: float) -> None:
    draw = np.random.default_rng(0)
    weights = [Weight(f"w{at}", 64, int(size)) for at, size in enumerate(draw.integers(40, 200, 30))]
    scores = {weight.name: float(draw.lognormal()) for weight in weights}
    limit = int(budget * sum(weight.params for weight in weights))
    given = at_ranks(weights, fisher_ranks(weights, scores, limit), None, LOW_RANK)
    assert sum(form_named(given[w.name].form).params(w, given[w.name].dim) for w in weights) <= limit


def test_nothing_scores_anything() -> None:
    assert fisher_ranks([Q, K], {"q": 0.0, "k": 0.0}, 1000) == {"q": 1, "k": 1}


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


def test_padding_keeps_the_loss_of_the_rank_and_stores_the_padded_dim() -> None:
    assert at_ranks([Q], {"q": 20}, Rounding("pad", 8), LOW_RANK) == {"q": Chosen("low_rank", 24, 20)}
    assert at_ranks([Q], {"q": 20}, Rounding("up", 8), LOW_RANK) == {"q": Chosen("low_rank", 24, 24)}


def test_a_rank_is_1_or_more_and_a_pair_no_smaller_than_its_weight_stays_dense() -> None:
    assert at_ranks([Q], {"q": 0}, None, LOW_RANK) == {"q": Chosen("low_rank", 1, 1)}
    assert at_ranks([Q], {"q": 31}, None, LOW_RANK) == {"q": Chosen("low_rank", 31, 31)}
    assert at_ranks([Q], {"q": 32}, None, LOW_RANK) == {"q": Chosen("dense", 64, 64)}
    assert at_ranks([Q], {"q": 20}, Rounding("pad", 64), LOW_RANK) == {"q": Chosen("dense", 64, 64)}


def test_a_weight_without_a_rank_is_not_asked_what_the_form_would_make_of_it() -> None:
    nine = Weight("o", 576, 576, values="in", heads=9)
    assert at_ranks([nine], {}, None, form_named("latent")) == {"o": Chosen("dense", 576, 576)}
