"""Cliffs planted in latencies that a synthetic clock spoils: how many are found, and how much that is found is true."""

from collections.abc import Callable, Iterable
from itertools import product

import numpy as np
import pytest

from gac.core.arrays import Floats, Ints
from gac.profiling.cliffs import find_cliffs
from gac.profiling.table import Sweep

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
