"""Latencies as weights run: what a sweep measures for a model answers whatever its allocation asks."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from gac.allocation.feasibility import check_reachable
from gac.allocation.latencies import (
    INTERPOLATED,
    MEASURED,
    MODELLED,
    UNKNOWN,
    Timing,
    attention_latency,
    has_attention_latency,
)
from gac.allocation.resolve import SLACK, speed_defaults
from gac.core.errors import BudgetError, ProfileError
from gac.core.operations import attend, attend_latents, linear, round_inputs
from gac.core.workloads import Workload
from gac.forms import form_named
from gac.forms.planned_sites import as_planned, fuse_sites
from gac.models.families import family_of
from gac.models.shapes import SHAPES, Shapes
from gac.models.sites import Site, Weight
from gac.plan.plan import WeightChoice
from gac.plan.recipe import Recipe
from gac.profiling.operators import OPERATORS
from gac.profiling.records import Measurement, Point
from gac.profiling.sweeps.coverage import WORKLOADS, fused_points, model_points
from gac.profiling.table import Profile
from gac.runtime.contract import apart_from
from gac.schemes import scheme_named
from gac_extensions.lab.shapes.models import planner_of_shapes
from tests.headers import make_profile
from tests.small_pipeline import Small

DENSE, LOW_RANK = form_named("dense"), form_named("low_rank")
PREFILL, DECODE = (WORKLOADS.index(Workload.parse(name)) for name in ("prefill:1x1024", "decode:1@1024"))


@pytest.fixture(scope="module", params=["smollm2", "qwen3-8b"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def first_layer(name: str) -> tuple[Site, ...]:
    sites = family_of(SHAPES[name]).sites(SHAPES[name])
    return fuse_sites([site for site in sites if site.layer == 0])


def test_every_fused_width_and_every_rank_has_a_latency(name: str) -> None:
    timing = Timing(table((*model_points(name), *fused_points(name)), lambda _: 1.0), WORKLOADS)
    for site in first_layer(name):
        weights = [site.weights[position] for position in site.fused]
        widths = np.arange(8, sum(weight.out_features for weight in weights) + 1, 8)
        for_all = np.repeat(widths[:, None], len(WORKLOADS), axis=1)
        assert not weights or (timing.of_shared(weights[0], for_all)[0] == 1).all()
        for position, weight in enumerate(site.weights):
            ranks = np.arange(8, LOW_RANK.max_useful_dim(weight) + 1, 8)
            assert (timing.of_weight(LOW_RANK, weight, ranks)[0] == 1).all()
            if position in site.fused:
                apart = ranks >= apart_from(1024)
                assert timing.after_fused(LOW_RANK, weight, ranks)[0][:, PREFILL].tolist() == (1 + apart).tolist()
                assert (timing.after_fused(LOW_RANK, weight, ranks)[0][:, DECODE] == 1).all()


@pytest.mark.parametrize(("rows", "features"), [(1, 4_194_304), (1024, 4096), (3, 1_398_102), (8_388_608, 1)])
def test_four_mi_outputs_are_enough_to_run_apart(rows: int, features: int) -> None:
    assert apart_from(rows) == features


W4A16, FP8 = scheme_named("w4a16"), scheme_named("fp8")


def by_bytes(point: Point) -> float:
    """1 us and a ns for each 100 bytes; three times as long where a size is no multiple of 8."""
    operation = point.operation
    uneven = any(size % 8 for axis, size in operation.shape if axis != "m")
    return (1000 + OPERATORS.get(operation.operator).bytes(operation.axes, point.dtype) / 100) * (3 if uneven else 1)


def table(points: Sequence[Point], ns: Callable[[Point], float] = by_bytes) -> Profile:
    rows = [Measurement.of(point, ns(point), 0.0, 10, 1980, True) for point in dict.fromkeys(points)]
    return make_profile(rows)


def sites_of(name: str) -> tuple[Site, ...]:
    return as_planned(family_of(SHAPES[name]).sites(SHAPES[name]), ["low_rank", "narrow"], fused=False)


# --- what is looked up ------------------------------------------------------------------------------------------------


def test_each_scheme_has_its_own_latency_and_the_table_says_how_it_is_known() -> None:
    timing = Timing(table(model_points("qwen3-8b", schemes=("w4a16",))), WORKLOADS)
    weight, ranks = Weight("w", 4096, 4096), np.array([256, 1088])
    plain, how = timing.of_weight(LOW_RANK, weight, ranks)
    stored, known = timing.of_weight(LOW_RANK, weight, ranks, W4A16)
    assert (stored < plain).all()
    assert stored[0, DECODE] == np.ceil(by_bytes(Point(LOW_RANK.latency.operation(weight, 256, 1), "w4a16")))
    assert how.tolist() == [[MEASURED] * 2] * 2
    assert known.tolist() == [[MEASURED] * 2, [INTERPOLATED] * 2]
    assert (timing.of_weight(LOW_RANK, weight, ranks, scheme_named("w3a16"))[0] == UNKNOWN).all()


def test_latencies_are_modelled_in_a_scheme_where_the_table_has_rows_of_it() -> None:
    timing = Timing(table(model_points("qwen3-8b", schemes=("w4a16",))), WORKLOADS)
    weight = Weight("w", 3000, 4992)
    latency, how = timing.of_weight(DENSE, weight, np.array([1]), W4A16)
    assert how.tolist() == [[MODELLED] * 2]
    expected = by_bytes(Point(DENSE.latency.operation(weight, 1, 1), "w4a16"))
    assert latency[0, DECODE] == pytest.approx(expected, rel=0.05)
    assert (timing.of_weight(DENSE, weight, np.array([1]), scheme_named("w4a16:64"))[0] == UNKNOWN).all()
    assert timing.profile.model.error(1, "w4a16") < 0.05
    assert timing.profile.model.error(1, "w4a16:64") is None


def test_weights_in_one_scheme_share_a_gemm_and_take_what_the_table_has_for_it() -> None:
    schemes = ("w4a16", "fp8")
    points = (*model_points("smollm2", schemes=schemes), *fused_points("smollm2", schemes=schemes))
    planner = planner_of_shapes("smollm2", WORKLOADS, table(points), layers=1, schemes=schemes)
    for fuse, kinds in ((True, {True}), ("auto", {True, False})):
        of = planner.problem_of(0.8, forms=("low_rank",), fuse=fuse, latency=1.0)
        of = replace(of, recipe=replace(of.recipe, space=replace(of.recipe.space, schemes=schemes)))
        q_k_v = of.candidates(["params", "ns:prefill:1x1024", "ns:decode:1@1024"])[0]
        assert {*q_k_v.shared.tolist()} == kinds
        assert (q_k_v.schemes[q_k_v.shared] == q_k_v.schemes[q_k_v.shared][:, :1]).all()
        read = (q_k_v.dims % 32 == 0).all(axis=1)  # the table has too few weights that no kernel reads
        assert read.any()
        assert (q_k_v.latency[read] != UNKNOWN).all()
    shared = Timing(table(points), WORKLOADS).of_shared(Weight("w", 960, 576), np.array([[960, 960]]), W4A16)
    assert shared[0].tolist() == [[np.ceil(by_bytes(Point(linear(rows, 576, 960), "w4a16"))) for rows in (1024, 1)]]


@pytest.mark.parametrize(("name", "dims"), [("dense", [576]), ("low_rank", [64, 128])])
def test_what_is_rounded_where_it_is_made_is_not_rounded_again(name: str, dims: list[int]) -> None:
    """By the norm before the weight; what else reads 16 bits rounds them, as behind a gated MLP."""
    profile = table(model_points("smollm2", schemes=("fp8", "w4a16")))
    timing, form, dim_array = Timing(profile, WORKLOADS), form_named(name), np.array(dims)
    weight, down = (
        next(each.weights[-1] for each in sites_of("smollm2") if each.kind == kind) for kind in ("q_proj", "mlp")
    )
    assert weight.input_from_norm
    assert not down.input_from_norm
    apart = replace(weight, input_from_norm=False)
    rounding = [int(np.ceil(by_bytes(Point(round_inputs("fp8", each.rows, 576), "bf16")))) for each in WORKLOADS]
    saved = timing.of_weight(form, apart, dim_array, FP8)[0] - timing.of_weight(form, weight, dim_array, FP8)[0]
    assert saved.tolist() == [rounding] * len(dims)
    for scheme in (W4A16, scheme_named("bf16")):
        same = (timing.of_weight(form, each, dim_array, scheme)[0].tolist() for each in (apart, weight))
        assert next(same) == next(same)
    points = [each for each in model_points("smollm2", schemes=("fp8",)) if "round" not in each.operation.operator]
    other = Timing(table(points), WORKLOADS)
    assert (other.of_weight(form, weight, dim_array, FP8)[0] == other.of_weight(form, apart, dim_array, FP8)[0]).all()


# --- which dims are sound ---------------------------------------------------------------------------------------------


def by_hundreds(point: Point) -> float:
    """As above; in w4a16 also four times as long where a size is no multiple of 64."""
    cut = point.dtype == "w4a16" and any(size % 64 for axis, size in point.operation.shape if axis != "m")
    return by_bytes(point) * (4 if cut else 1)


@pytest.mark.parametrize(("schemes", "step"), [((), 8), (("w4a16",), 64)])
def test_dims_are_sound_by_a_schemes_own_rows_and_else_by_those_of_16_bits(schemes: Sequence[str], step: int) -> None:
    timing = Timing(table(model_points("smollm2", schemes=schemes), by_hundreds), WORKLOADS)
    weight, ranks = Weight("w", 576, 576), np.arange(1, 288)
    sound = ranks[timing.sound(LOW_RANK, weight, ranks, False, W4A16)]
    assert sound.tolist() == list(range(step, 288, step))
    assert ranks[timing.sound(LOW_RANK, weight, ranks, False)].tolist() == list(range(8, 288, 8))


# --- what is settled and refused --------------------------------------------------------------------------------------

BOTH = {"prefill:1x1024": 1.0, "decode:1@1024": 1.0}


def test_limits_of_latency_where_there_are_schemes() -> None:
    profile = table(model_points("smollm2", schemes=("w4a16", "fp8")))
    recipe = speed_defaults(Recipe.of(memory=0.3, schemes=("w4a16", "fp8")), sites_of("smollm2"), profile)
    assert (recipe.limits.latency, recipe.slack) == (BOTH, SLACK)
    other = speed_defaults(Recipe.of(memory=0.3, schemes=("w4a16", "w3a16")), sites_of("smollm2"), profile)
    assert (other.limits.latency, other.slack) == ({}, 0.0)
    profile, asked = table(model_points("smollm2", schemes=("w4a16",))), ("w4a16", "w8a8")
    with pytest.raises(ProfileError, match=r"with scheme w8a8, .* gac profile --model NAME .*--scheme w8a8"):
        speed_defaults(Recipe.of(memory=0.3, latency=0.9, schemes=asked), sites_of("smollm2"), profile)
    shapes = Shapes("llama", 64, 72, 2, 2, 1, 32, 1000)  # 72 is no multiple of 16
    sites = as_planned(family_of(shapes).sites(shapes), ["low_rank"], False)
    profile = table(model_points(shapes, schemes=("fp8",)))
    recipe = speed_defaults(Recipe.of(0.9, latency=0.9, schemes=("bf16", "fp8")), sites, profile)
    assert recipe.limits.latency == dict.fromkeys(BOTH, 0.9)


def test_a_latency_that_only_fewer_bits_reach_is_reachable() -> None:
    profile, sites = table(model_points("llama-3-8b", schemes=("w4a16",))), sites_of("llama-3-8b")
    asked = {"forms": (), "latency": {"decode:1@1024": 0.5}, "fuse": False}
    check_reachable(sites, Recipe.of(1.0, schemes=("bf16", "w4a16"), **asked), profile)
    with pytest.raises(BudgetError):
        check_reachable(sites, Recipe.of(1.0, schemes=("bf16",), **asked), profile)


# --- plans ------------------------------------------------------------------------------------------------------------


def test_a_plan_keeps_a_limit_that_attention_alone_can_reach(small: Small) -> None:
    points = model_points(small.model.config, [Workload.parse("decode:1@32768")], forms=("latent:1",))
    asked = {"forms": ("latent:1",), "workloads": ["decode:1@32768"], "profile": table(points)}
    plan = small.allocate(1.0, latency={"decode:1@32768": 0.8}, refit="none", fuse=False, **asked)
    (decode,) = plan.workloads
    assert 0 < decode.plan_ns <= 0.8 * decode.dense_ns
    assert plan.kv_numbers[0] < plan.kv_numbers[1]


def test_a_plan_keeps_a_limit_of_latency_with_schemes_and_counts_what_is_known(small: Small) -> None:
    """The baseline is the dense model in 16 bits."""
    profile = table(model_points(small.model.config, schemes=("w4a16:32",)))
    asked = {"schemes": ("bf16", "w4a16:32"), "profile": profile, "refit": "none", "fuse": False}
    plan = small.allocate(1.0, latency={"decode:1@1024": 0.8}, **asked)
    (decode,) = (each for each in plan.workloads if each.workload == "decode:1@1024")
    dense = sum(ns_of(profile, each, True) for each in plan.weights)
    known = [ns for each in plan.weights if (ns := ns_of(profile, each, False))]
    assert decode.dense_ns <= dense  # weights of one input share a GEMM where the table has it
    assert sum(known) <= decode.plan_ns <= 0.8 * decode.dense_ns
    assert "w4a16:32" in {each.scheme for each in plan.weights}
    assert (decode.measured + decode.interpolated, decode.unknown) == (len(plan.weights), 0)
    assert plan.certificate.status == "optimal"


def ns_of(profile: Profile, choice: WeightChoice, dense: bool) -> int | None:
    """What the table says of one weight for one row."""
    form = DENSE if dense else form_named(choice.form)
    dim = form.full(choice.weight) if dense else choice.dim
    dtype = "bf16" if dense else scheme_named(choice.scheme).dtype
    return profile.point(form.latency.operation(choice.weight, dim, 1), dtype)


LONG_DECODE, LONG_PREFILL = "decode:1@32768", "prefill:1x1024"
LONG_WORKLOADS = tuple(map(Workload.parse, (LONG_PREFILL, LONG_DECODE)))
SITES = family_of(SHAPES["llama-3-8b"]).sites(SHAPES["llama-3-8b"])
POINTS = model_points("llama-3-8b", LONG_WORKLOADS, forms=("latent:1",))
TIMING = Timing(table(POINTS), LONG_WORKLOADS)
LATENT = form_named("latent:1")
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
    timing = Timing(table(POINTS, slow), LONG_WORKLOADS)
    assert timing.sound(LATENT, K, dims, fused=False).tolist() == [True, False, True]


def test_a_limit_of_latency_with_latents_needs_a_table_that_has_attention() -> None:
    limit, workloads = {LONG_DECODE: 0.7}, [LONG_PREFILL, LONG_DECODE]
    recipe = Recipe.of(forms=("latent:1",), workloads=workloads, latency=limit, fuse=False)
    assert speed_defaults(recipe, SITES, table(POINTS)).limits.latency == {LONG_DECODE: 0.7}
    for lacking in ("sdpa", "latent_attention"):
        profile = table([each for each in POINTS if each.operation.operator != lacking])
        assert not has_attention_latency(Timing(profile, LONG_WORKLOADS), LATENT, SITES)
        with pytest.raises(ProfileError, match="with form latent:1; expected forms whose latency is measured"):
            speed_defaults(recipe, SITES, profile)


def test_rounded_latents_have_attention_of_their_own() -> None:
    """Tables without it know no latency of the form; keys and values count halves as others do."""
    form, points = form_named("latent:1:int8"), model_points("llama-3-8b", LONG_WORKLOADS, forms=("latent:1:int8",))
    both = attend_latents(1, 32, 8, 32768, 128, 8, 64, 64, 8)
    assert both.operator == "latent_attention_int8"
    assert Point(both) in points
    timing = Timing(table(points), LONG_WORKLOADS)
    assert has_attention_latency(timing, form, SITES)
    assert not has_attention_latency(TIMING, form, SITES)
    keys, values = (attention_latency(timing, form, weight, np.array([64]))[0][0] for weight in (K, V))
    assert abs(int(keys[1] + values[1]) - ns(both)) <= 1
    assert ns(both) < ns(HALF)
