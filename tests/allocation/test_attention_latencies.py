"""Attention in plans by latency, from tables that are made up: what counts of it, and where it is not known."""

import numpy as np
import pytest

from gac.allocation.decide import speed_defaults
from gac.allocation.latencies import UNKNOWN, Timing, attention_latency, has_latencies
from gac.core.errors import ProfileError
from gac.core.operations import attend, attend_latents
from gac.core.workloads import Workload
from gac.forms import form_named
from gac.models.families import family_of
from gac.models.shapes import SHAPES
from gac.models.sites import Weight
from gac.plan.recipe import Recipe
from gac.profiling.records import Point
from gac.profiling.sweeps.coverage import model_points
from tests.allocation.test_scheme_latencies import by_bytes, table
from tests.small_pipeline import Small

DECODE, PREFILL = "decode:1@32768", "prefill:1x1024"
WORKLOADS = tuple(map(Workload.parse, (PREFILL, DECODE)))
SITES = family_of(SHAPES["llama-3-8b"]).sites(SHAPES["llama-3-8b"])
POINTS = model_points("llama-3-8b", WORKLOADS, forms=("latent:1",))
TIMING = Timing(table(POINTS), WORKLOADS)
DENSE, LATENT = form_named("dense"), form_named("latent:1")
K, V = (
    next(weight for site in SITES for weight in site.weights if weight.name.endswith(name))
    for name in ("k_proj", "v_proj")
)
WHOLE, HALF = attend(1, 32, 8, 32768, 128), attend_latents(1, 32, 8, 32768, 128, 8, 64, 64)


def ns(operation) -> int:
    return int(np.ceil(by_bytes(Point(operation))))


def counted(form: str, weight: Weight, *dims: int) -> list[list[int]]:
    return attention_latency(TIMING, form_named(form), weight, np.array(dims))[0].tolist()


def test_keys_and_values_each_count_half_where_a_token_is_decoded() -> None:
    assert counted("dense", K, 1024) == counted("dense", V, 1024) == [[0, -(-ns(WHOLE) // 2)]]
    keys, values = (counted("latent:1", weight, 64)[0] for weight in (K, V))
    assert keys[0] == values[0] == 0
    assert abs(keys[1] + values[1] - ns(HALF)) <= 1
    more = counted("latent:1", K, 96)[0][1] - keys[1]
    assert more == ns(attend_latents(1, 32, 8, 32768, 128, 8, 96, 64)) - ns(HALF)
    assert counted("latent:1", K, 63)[0][1] == UNKNOWN
    assert counted("dense", Weight("w", 64, 64), 64) == [[0, 0]]


@pytest.mark.parametrize(("form", "dim", "kept"), [("heads", 4, 0.5), ("head_dim", 96, 0.75), ("low_rank", 64, 1.0)])
def test_other_forms_take_their_share_of_the_cache(form: str, dim: int, kept: float) -> None:
    assert counted(form, V, dim) == [[0, np.ceil(kept * ns(WHOLE) / 2)]]


def test_a_rank_that_is_slower_than_a_larger_one_is_not_sound() -> None:
    def slow(point: Point) -> float:
        return by_bytes(point) * (2 if point.operation.axes.get("k") == 40 and "g" in point.operation.axes else 1)

    dims = np.array([32, 40, 64])
    assert TIMING.sound(LATENT, K, dims, fused=False).tolist() == [True, True, True]
    assert Timing(table(POINTS, slow), WORKLOADS).sound(LATENT, K, dims, fused=False).tolist() == [True, False, True]


def test_a_limit_of_latency_with_latents_needs_a_table_that_has_attention() -> None:
    recipe = Recipe.of(forms=("latent:1",), workloads=[PREFILL, DECODE], latency={DECODE: 0.7}, fuse=False)
    assert speed_defaults(recipe, SITES, table(POINTS)).limits.latency == {DECODE: 0.7}
    for lacking in ("sdpa", "latent_attention"):
        profile = table([each for each in POINTS if each.operation.operator != lacking])
        assert not has_latencies(Timing(profile, WORKLOADS), LATENT, SITES)
        with pytest.raises(ProfileError, match="with form latent:1; expected forms whose latency is measured"):
            speed_defaults(recipe, SITES, profile)


def test_a_plan_keeps_a_limit_that_attention_alone_can_reach(small: Small) -> None:
    workload = Workload.parse(DECODE)
    profile = table(model_points(small.model.config, [workload], forms=("latent:1",)))
    asked = {"forms": ("latent:1",), "workloads": [DECODE], "profile": profile, "refit": "none", "fuse": False}
    plan = small.allocate(1.0, latency={DECODE: 0.8}, **asked)
    (decode,) = plan.workloads
    assert decode.dense_ns is not None
    assert decode.plan_ns is not None
    assert decode.plan_ns <= 0.8 * decode.dense_ns
    assert plan.kv_numbers[0] < plan.kv_numbers[1]


def test_rounded_latents_have_attention_of_their_own() -> None:
    """Tables without it know no latency of the form; keys and values count halves as others do."""
    form, points = form_named("latent:1:int8"), model_points("llama-3-8b", WORKLOADS, forms=("latent:1:int8",))
    both = attend_latents(1, 32, 8, 32768, 128, 8, 64, 64, 8)
    assert both.operator == "latent_attention_int8"
    assert Point(both) in points
    timing = Timing(table(points), WORKLOADS)
    assert has_latencies(timing, form, SITES)
    assert not has_latencies(TIMING, form, SITES)
    keys, values = (attention_latency(timing, form, weight, np.array([64]))[0][0] for weight in (K, V))
    assert abs(int(keys[1] + values[1]) - ns(both)) <= 1
    assert ns(both) < ns(HALF)
