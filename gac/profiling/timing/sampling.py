"""When a latency can be trusted: how often to launch, which samples count, when there are enough of them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gac.profiling.records import Cache

TARGET_NS = 300_000.0
BATCH = 10
LEAST_BATCH = 3
MOST_BATCHES = 6
BATCH_NS = 200_000_000.0
PRECISION = 0.01
STEADY_CLOCK = 0.97
SLOWEST_CLOCK = 0.75
PATIENCE = 16
ROTATION = 6
"""How often L2 goes by before a buffer is used again: L2 evicts at random, so after twice its size an eighth stays."""

METHOD = (
    "CUDA graph replays of at least 0.3 ms between CUDA events; cold: every launch on other buffers until 6x L2 has "
    "gone by, L2 flushed with as much before a replay that touches less; hot: always the same buffers; median of 10 to "
    "60 replays (3 to 18 where they take long), until 1.57 IQR / sqrt(n) <= 1 %; SM clock measured beside them by a "
    "kernel of known cycles; up to 16 batches discarded that are over 3 % below its usual value, and then up to 16 "
    "below 75 % of the highest"
)


class Batch(NamedTuple):
    """Samples in ns a launch that were taken together, and the lowest SM clock in MHz beside them."""

    ns: Sequence[float]
    clock_mhz: int


Sampler = Callable[[int], Batch]


@dataclass(frozen=True)
class Clocks:
    """What the SM clock should be, in MHz: what it usually is in this run, and the highest that the device can have."""

    usual_mhz: float
    max_mhz: int


@dataclass(frozen=True)
class Timing:
    """Median and interquartile range in ns of ``samples`` samples, the lowest SM clock beside them, batches dropped."""

    median_ns: float
    iqr_ns: float
    samples: int
    converged: bool
    sm_clock_mhz: int
    discarded: int = 0


def half_width(samples: Sequence[float]) -> float:
    """Half-width of the 95 % confidence interval of the median: 1.57 IQR / sqrt(n).

    McGill, Tukey & Larsen, "Variations of box plots" (1978).
    """
    low, high = np.percentile(samples, (25, 75))
    return float(1.57 * (high - low) / math.sqrt(len(samples)))


def sample_until(sampler: Sampler, clocks: Clocks, rest: Callable[[int], None], batch_size: int = BATCH) -> Timing:
    """Take samples in batches until the median is known to within 1 %, or there are six batches.

    After a burst of heavy work the power limit holds the clock down for a while. A batch over 3 % below the usual
    clock is discarded and taken again after a rest, 16 times at most; after that, and again 16 times at most, only
    one below 75 % of the highest clock is. A timing with either in it counts as unconverged.

    Args:
        sampler: returns as many new samples as it is asked for.
        rest: waits, the longer the more batches were discarded before (it is told how many).
    """
    samples: list[float] = []
    slowest = clocks.max_mhz
    discarded = 0
    while len(samples) < MOST_BATCHES * batch_size:
        batch = sampler(batch_size)
        if discarded < 2 * PATIENCE and batch.clock_mhz < _least(clocks, discarded):
            discarded += 1
            rest(discarded)
            continue
        samples += batch.ns
        slowest = min(slowest, batch.clock_mhz)
        if half_width(samples) <= PRECISION * float(np.median(samples)):
            break
    low, median, high = (float(value) for value in np.percentile(samples, (25, 50, 75)))
    converged = half_width(samples) <= PRECISION * median and slowest >= _least(clocks, discarded=0)
    return Timing(median, high - low, len(samples), converged, slowest, discarded)


def _least(clocks: Clocks, discarded: int) -> float:
    throttled = SLOWEST_CLOCK * clocks.max_mhz
    return max(STEADY_CLOCK * clocks.usual_mhz, throttled) if discarded < PATIENCE else throttled


class Replay(NamedTuple):
    """How often to launch in one replay, over how many sets of buffers, and whether L2 is flushed before it.

    ``batch`` is how many replays are queued at a time.
    """

    launches: int
    sets: int
    flush: bool
    batch: int


def plan_launches(launch_ns: float, bytes_each: int, l2_bytes: int, cache: Cache) -> Replay:
    """Enough launches for a replay of 0.3 ms, so that short ones are timed together.

    Cold: sets of buffers until six times L2 has gone by, in whole rounds, so that the last launch of a replay does not
    warm the first of the next one. Where the sets of one replay hold less than that, each is used once a replay, and a
    flush between replays makes it cold again. Hot: one set. A batch lasts at most about 0.2 s.
    """
    count = max(1, math.ceil(TARGET_NS / launch_ns))
    batch = max(LEAST_BATCH, min(BATCH, int(BATCH_NS / (count * launch_ns))))
    if cache == "hot":
        return Replay(count, 1, False, batch)
    sets = min(count, math.ceil(ROTATION * l2_bytes / bytes_each))
    rounds = math.ceil(count / sets)
    return Replay(rounds * sets, sets, sets * bytes_each < ROTATION * l2_bytes, batch)
