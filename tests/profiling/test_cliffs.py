"""Cliffs of sweeps by hand, of published ones, and of ones planted in latencies that a synthetic clock spoils."""

from collections.abc import Callable, Iterable
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gac.core.arrays import Floats, Ints
from gac.profiling.cliffs import compare_classes, operator_period, sound_dims
from gac.profiling.table import Profile, Sweep
from gac_extensions.lab.cliffs import find_cliffs
from tests.profiling.examples import make_sweep

FIXED = {"m": 1024, "k": 4096, "n": 4096}


def along(latency: Callable[[int], float], dims: Iterable[int], iqr: float = 0.002) -> Sweep:
    return make_sweep({dim: latency(dim) for dim in dims}, iqr)


def hopper(dim: int) -> float:
    """Five times slower where odd, 2.5 times where even, as on an H100."""
    return (20_000 + 10 * dim) * (1.0 if dim % 8 == 0 else 2.5 if dim % 2 == 0 else 5.0)


def test_a_staircase_has_its_sweet_spots_before_the_jumps() -> None:
    cliffs = find_cliffs(along(lambda dim: 10_000.0 * -(-dim // 128), range(512, 1025, 8)))
    assert cliffs.sweet_spots.tolist() == [512, 640, 768, 896]
    assert cliffs.edges.tolist() == [520, 648, 776, 904]
    assert len(cliffs.collapsed) == 0
    assert cliffs.period == 1


def test_points_whose_passes_disagree_prove_nothing() -> None:
    sweep = along(lambda dim: 1200.0 if dim == 96 else 1000.0, range(64, 160, 8))
    assert find_cliffs(sweep).collapsed.tolist() == [96]
    sweep.iqr[sweep.dims == 96] = 250.0
    cliffs = find_cliffs(sweep)
    assert (cliffs.collapsed.tolist(), cliffs.sweet_spots.tolist()) == ([], [])


def test_the_period_rests_on_a_comparison_of_each_class_with_what_padding_gives() -> None:
    finest, *_, coarsest = compare_classes(along(hopper, range(960, 1089)))
    assert (finest.step, finest.against, finest.dims) == (1, 8, 64)
    assert finest.slowdown == pytest.approx(5.0, rel=0.01)
    assert finest.low <= finest.slowdown <= finest.high
    assert not finest.keeps_up
    assert coarsest.step == 16
    assert coarsest.keeps_up


def test_alignment_shows_even_where_latency_grows_with_the_dim() -> None:
    """Up to the next multiple of 64, growth hides a slowdown of 1.5; up to the next of 8 it cannot."""
    cliffs = find_cliffs(along(lambda dim: dim * (1.5 if dim % 8 else 1.0), range(8, 129)))
    assert cliffs.period == 8


FLASH = {112: 1.548, **dict.fromkeys(range(113, 120), 2.22), 120: 1.608, 121: 2.21}
DENSE = {64: 0.826, 96: 1.140, 104: 1.551, 107: 2.147, 112: 1.545, 120: 1.603, 128: 1.485}
REPAIRS = {107: 2.064, 112: 1.490, 114: 2.049, 117: 2.054, 120: 1.557, 121: 1.964, 125: 1.975, 128: 1.430}


@pytest.mark.parametrize(
    ("points", "rescues", "sweet_spots"),
    [
        (FLASH, dict.fromkeys(range(113, 120), 120), [120]),
        (DENSE, {107: 112, 120: 128}, [96]),  # 120 too loses 8 % to 128, as the published padding to 16 shows
        (REPAIRS, {107: 112, **dict.fromkeys((114, 117, 120, 121, 125), 128)}, []),
    ],
    ids=["flash", "dense", "repairs"],
)
def test_the_published_sweeps_of_an_a100(points, rescues, sweet_spots) -> None:
    """Latencies in ms of attention by head_dim."""
    cliffs = find_cliffs(make_sweep({dim: 1e6 * ms for dim, ms in points.items()}, 0.01))
    assert dict(zip(cliffs.collapsed.tolist(), cliffs.rescue.tolist(), strict=True)) == rescues
    assert cliffs.slowdown == pytest.approx([points[dim] / points[rescue] for dim, rescue in rescues.items()])
    assert cliffs.sweet_spots.tolist() == sweet_spots


@pytest.mark.parametrize("dims", [[], [64]])
def test_a_sweep_of_no_or_one_dim_has_no_cliffs(dims) -> None:
    cliffs = find_cliffs(along(hopper, dims))
    assert (len(cliffs.collapsed), len(cliffs.edges), cliffs.period) == (0, 0, 1)


@settings(max_examples=50)
@given(st.dictionaries(st.integers(1, 500), st.floats(1.0, 1e6), max_size=30))
def test_a_dim_is_collapsed_exactly_when_a_larger_one_is_faster_by_over_six_percent(points) -> None:
    sweep = make_sweep(points, iqr=0.0)
    cliffs = find_cliffs(sweep)
    expected = [d for d in sorted(points) if any(points[d] - points[o] > 0.06 * points[d] for o in points if o > d)]
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


def test_on_the_h100_both_operators_keep_to_multiples_of_8() -> None:
    profile = Profile.load("nvidia-h100-80gb-hbm3")
    assert (operator_period(profile, "linear"), operator_period(profile, "low_rank")) == (8, 8)
    sound = sound_dims(profile, "low_rank", [FIXED], "r", np.arange(1016, 1034))
    assert np.flatnonzero(sound).tolist() == [0, 8, 16]


Clock = Callable[[Floats, np.random.Generator], Floats]
SEEDS = range(4)
PLANTED = 0.08  # a difference that has to be found
NOTHING = 0.02  # one that must not be


def aligned(dims: Ints, *slowdowns: float) -> Floats:
    """``slowdowns`` of the dims that 1, 2, 4, ... is the largest power of two to divide; 1 for coarser ones."""
    factor = np.ones(len(dims))
    for power, slowdown in enumerate(slowdowns):
        factor[(dims & -dims) == 2**power] = slowdown
    return factor


def stairs(dims: Ints, *templates: int) -> Floats:
    """The first template that holds the dim."""
    return np.array(templates, dtype=np.float64)[np.searchsorted(templates, dims)]


def waves(dims: Ints, tile: int, processors: int) -> Floats:
    """Waves of 32 rows of CTAs, each ``tile`` wide."""
    return np.ceil(32 * np.ceil(dims / tile) / processors)


WIDE = np.arange(512, 1089)
HEADS = np.arange(33, 257)
COARSE = np.arange(256, 4097, 8)
TEMPLATES = (64, 96, 128, 160, 192, 256)
SHAPES = {
    "alignment to 8, steep": (WIDE, (20 + WIDE / 100) * aligned(WIDE, 5, 2.5, 2.5), 8),
    "alignment to 8, shallow": (WIDE, 20 * aligned(WIDE, 1.3, 1.2, 1.15), 8),
    "alignment to 16": (WIDE, (20 + WIDE / 200) * aligned(WIDE, 3, 2, 2, 1.3), 16),
    "alignment to 64": (WIDE, 20 * aligned(WIDE, 2, 2, 2, 1.5, 1.5, 1.3), 64),
    "templates": (HEADS, stairs(HEADS, *TEMPLATES), 1),
    "templates and padding": (HEADS, stairs(HEADS, *TEMPLATES) * aligned(HEADS, 1.8, 1.8, 1.8), 8),
    "waves": (COARSE, waves(COARSE, 256, 132), 1),
    "waves and alignment": (WIDE, (4 + waves(WIDE, 128, 132)) * aligned(WIDE, 2, 1.5, 1.5), 8),
    "a slow kernel between fast ones": (COARSE, 50 * np.where((COARSE > 1728) & (COARSE < 2304), 1.3, 1.0), 1),
    "flat": (WIDE, np.full(len(WIDE), 20.0), 1),
    "in proportion": (COARSE, COARSE / 10.0, 1),
}


def calm(true: Floats, _random: np.random.Generator) -> Floats:
    """One pass without noise."""
    return true


def rough(true: Floats, random: np.random.Generator) -> Floats:
    """One pass in an order of its own: 1 % noise, 3 % drift, 1 % of outliers and a burst of throttling, 30 % each."""
    count = len(true)
    when = random.permutation(count) / count
    burst = random.uniform(0, 0.99)
    spoilt = (random.random(count) < 0.01) | ((when >= burst) & (when < burst + 0.01))
    return true * (1 + 0.01 * random.standard_normal(count)) * (1 + 0.03 * when) * np.where(spoilt, 1.3, 1.0)


def measured(dims: Ints, true: Floats, clock: Clock, seed: int) -> Sweep:
    """A sweep as a profile holds it after three passes by this clock."""
    random = np.random.default_rng(seed)
    passes = np.array([clock(1000 * true, random) for _ in range(3)])
    low, ns, high = np.quantile(passes, (0.25, 0.5, 0.75), axis=0)
    iqr = np.maximum(0.003 * passes[0], high - low)
    return Sweep("linear", "bf16", "cold", "n", (("m", 1024), ("k", 64)), dims, ns, iqr, ((),) * len(dims))


def slower_than_a_larger(dims: Ints, true: Floats, by: float) -> Ints:
    best = np.append(np.minimum.accumulate(true[::-1])[::-1][1:], np.inf)
    return dims[true - best > by * true]


def jumps(dims: Ints, true: Floats, by: float) -> Ints:
    """Dims before a jump of more than ``by`` beyond proportion, among those that nothing larger beats."""
    sound = ~np.isin(dims, slower_than_a_larger(dims, true, NOTHING))
    dims, true = dims[sound], true[sound]
    return dims[:-1][true[1:] / true[:-1] - dims[1:] / dims[:-1] > by]


def tallies(clock: Clock, seeds: Iterable[int]) -> Floats:
    """Of collapsed dims and of sweet spots, over every shape: planted, found, and found where nothing was planted."""
    counts = np.zeros((2, 3))
    for (dims, true, _), seed in product(SHAPES.values(), seeds):
        cliffs = find_cliffs(measured(dims, true, clock, seed))
        pairs = ((cliffs.collapsed, slower_than_a_larger), (cliffs.sweet_spots, jumps))
        for row, (detected, cliffs_of) in zip(counts, pairs, strict=True):
            planted, possible = cliffs_of(dims, true, PLANTED), cliffs_of(dims, true, NOTHING)
            row += len(planted), len(np.intersect1d(detected, planted)), len(np.setdiff1d(detected, possible))
    return counts


@pytest.mark.parametrize(
    ("clock", "seeds", "least", "recall", "precision"),
    [(calm, [0], [1, 1], 1, 1), (rough, SEEDS, [3_001, 51], 0.95, 0.99)],
)
def test_planted_cliffs_are_found(clock, seeds, least, recall, precision) -> None:
    planted, detected, false = tallies(clock, seeds).T
    assert (planted >= least).all()
    assert (detected >= recall * planted).all()
    assert (detected >= precision * (detected + false)).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_the_period_is_the_planted_one(shape: str) -> None:
    dims, true, period = SHAPES[shape]
    assert {find_cliffs(measured(dims, true, rough, seed)).period for seed in SEEDS} == {period}
