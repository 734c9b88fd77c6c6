import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gac.profiling.cliffs import cliffs_of, find_cliffs, operator_period, sound_dims
from gac.profiling.table import Profile, Sweep

FIXED = {"m": 1024, "k": 4096, "n": 4096}


def make_sweep(latency, dims, iqr: float = 0.002) -> Sweep:
    where = np.array(sorted(dims), dtype=np.int64)
    ns = np.array([latency(int(dim)) for dim in where], dtype=np.float64)
    return Sweep("low_rank", "bf16", "r", (("m", 1024),), where, ns, iqr * ns, ((),) * len(where))


def hopper(dim: int) -> float:
    """Five times slower where odd, 2.5 times where even, as on an H100."""
    return (20_000 + 10 * dim) * (1.0 if dim % 8 == 0 else 2.5 if dim % 2 == 0 else 5.0)


def noisy(latency, spread: float, seed: int = 0):
    random = np.random.default_rng(seed)
    return lambda dim: latency(dim) * (1 + spread * random.standard_normal())


def test_planted_alignment_cliffs_are_found_through_noise() -> None:
    cliffs = find_cliffs(make_sweep(noisy(hopper, 0.003), range(960, 1089)))
    assert cliffs.period == 8
    assert cliffs.collapsed.tolist() == [dim for dim in range(960, 1088) if dim % 8]
    assert dict(cliffs.class_slowdown)[1] == pytest.approx(5.0, rel=0.05)
    assert dict(cliffs.class_slowdown)[8] == pytest.approx(1.0, rel=0.02)


def test_a_collapsed_dim_is_rescued_by_the_next_dim_that_is_as_fast_as_any() -> None:
    cliffs = find_cliffs(make_sweep(hopper, range(1016, 1033)))
    at = cliffs.collapsed.tolist().index(1021)
    assert cliffs.rescue[at] == 1024
    assert cliffs.slowdown[at] == pytest.approx(hopper(1021) / hopper(1024))


def test_a_flat_curve_has_no_cliffs() -> None:
    cliffs = find_cliffs(make_sweep(noisy(lambda dim: 5000.0, 0.002), range(8, 600)))
    assert cliffs.period == 1
    assert (len(cliffs.collapsed), len(cliffs.edges), len(cliffs.sweet_spots)) == (0, 0, 0)


def test_growth_in_proportion_to_the_dim_is_no_staircase() -> None:
    cliffs = find_cliffs(make_sweep(lambda dim: 100.0 * dim, range(64, 2048, 64)))
    assert len(cliffs.edges) == 0


def test_a_staircase_has_its_sweet_spots_before_the_jumps() -> None:
    cliffs = find_cliffs(make_sweep(lambda dim: 10_000.0 * -(-dim // 128), range(512, 1025, 8)))
    assert cliffs.sweet_spots.tolist() == [512, 640, 768, 896]
    assert cliffs.edges.tolist() == [520, 648, 776, 904]
    assert len(cliffs.collapsed) == 0
    assert cliffs.period == 1


def test_a_difference_within_the_spread_of_the_samples_is_no_collapse() -> None:
    points = {64: 1040.0, 128: 1000.0}
    assert find_cliffs(make_sweep(points.get, points, iqr=0.001)).collapsed.tolist() == [64]
    assert find_cliffs(make_sweep(points.get, points, iqr=0.05)).collapsed.tolist() == []


@pytest.mark.parametrize("dims", [[], [64]])
def test_a_sweep_of_no_or_one_dim_has_no_cliffs(dims) -> None:
    cliffs = find_cliffs(make_sweep(hopper, dims))
    assert (len(cliffs.collapsed), len(cliffs.edges), cliffs.period) == (0, 0, 1)


@given(st.dictionaries(st.integers(1, 500), st.floats(1.0, 1e6), max_size=50))
def test_a_dim_is_collapsed_exactly_when_a_larger_one_is_faster_by_over_two_percent(points) -> None:
    sweep = make_sweep(points.get, points, iqr=0.0)
    cliffs = find_cliffs(sweep)
    expected = [d for d in sorted(points) if any(points[d] - points[o] > 0.02 * points[d] for o in points if o > d)]
    assert cliffs.collapsed.tolist() == expected
    assert (cliffs.rescue > cliffs.collapsed).all()
    assert (cliffs.slowdown > 1).all()


@pytest.fixture
def profile(profile_file) -> Profile:
    latency = {dim: hopper(dim) for dim in range(960, 1089)} | {1040: 1.2 * hopper(1040)}
    return Profile.load(profile_file.ranks(latency).ranks(dict.fromkeys(range(960, 1089), 3000.0), m=1).write())


def test_sound_dims_are_aligned_and_not_collapsed(profile) -> None:
    dims = np.arange(1016, 1050)
    sound = sound_dims(profile, "low_rank", [FIXED, FIXED | {"m": 1}], "r", dims)
    assert dims[sound].tolist() == [1016, 1024, 1032, 1048]


def test_an_aligned_dim_is_sound_even_where_misaligned_ones_are_faster(profile_file) -> None:
    one_row = {dim: 3000.0 if dim % 8 else 4000.0 for dim in range(960, 1089)}
    profile_file.ranks({dim: hopper(dim) for dim in range(960, 1089)}).ranks(one_row, m=1)
    profile = Profile.load(profile_file.write())
    assert sound_dims(profile, "low_rank", [FIXED, FIXED | {"m": 1}], "r", np.arange(1000, 1033, 8)).all()


def test_alignment_alone_decides_where_the_profile_lacks_the_shape(profile) -> None:
    dims = np.arange(1, 33)
    sound = sound_dims(profile, "low_rank", [{"m": 7, "k": 64, "n": 64}], "r", dims)
    assert dims[sound].tolist() == [8, 16, 24, 32]


def test_every_dim_is_sound_for_an_operator_that_was_never_measured(profile) -> None:
    assert sound_dims(profile, "linear", [{"m": 1, "k": 64}], "n", np.arange(1, 9)).all()


def test_an_operators_period_is_that_of_the_sweeps_where_alignment_matters(profile) -> None:
    assert operator_period(profile, "low_rank") == 8
    assert operator_period(profile, "linear") == 1


def test_every_sweep_of_a_profile_has_its_cliffs(profile) -> None:
    found = cliffs_of(profile)
    assert [label for label, _ in found] == [
        "low_rank bf16 m=1 k=4096 n=4096, r",
        "low_rank bf16 m=1024 k=4096 n=4096, r",
    ]
    assert [cliffs.period for _, cliffs in found] == [1, 8]


def test_on_the_h100_both_operators_keep_to_multiples_of_8() -> None:
    profile = Profile.load("nvidia-h100-80gb-hbm3")
    assert (operator_period(profile, "linear"), operator_period(profile, "low_rank")) == (8, 8)
    sound = sound_dims(profile, "low_rank", [FIXED], "r", np.arange(1016, 1034))
    assert np.flatnonzero(sound).tolist() == [0, 8, 16]
