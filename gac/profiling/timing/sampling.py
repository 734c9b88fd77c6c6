"""Sampling of a latency: how often to launch, which samples count, when there are enough."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gac.core.arrays import Floats
from gac.profiling.records import Cache

LEAST_NS: dict[Cache, float] = {"cold": 300_000.0, "hot": 3_000_000.0}
"""Least length of a replay. Hot, the contents of L2 settle only after hundreds of launches."""

BATCH = 10
LEAST_BATCH = 3
MOST_BATCHES = 6
BATCH_NS = 200_000_000.0
PRECISION = 0.01
AGREEMENT = 0.03  # largest relative range of the middle eight of ten samples: two of ten elsewhere are no outliers

STEADY_CLOCK = 0.97
SLOWEST_CLOCK = 0.75
PATIENCE = 16
ROTATION = 6
"""Multiples of L2 that are read before a buffer is used again: L2 evicts at random, so after twice its size an eighth
stays."""

METHOD = (
    "CUDA graph replays of at least 0.3 ms between CUDA events; cold: every launch on other buffers until 6x L2 has "
    "gone by, L2 flushed with as much before each replay; hot: always the same buffers, at least 3 ms; median of ten "
    "means (three where replays take long), each of one to six replays, until 1.57 IQR / sqrt(n) <= 1 % and the "
    "middle eight lie within 3 %; a batch is queued while a kernel holds the GPU back, and discarded if the GPU "
    "reached any of it too early; SM clock measured beside them by a kernel of known cycles; up to 16 batches "
    "discarded that are over 3 % below its usual value, and then up to 16 below 75 % of the highest"
)


class Batch(NamedTuple):
    """Samples in ns a launch that were taken in one go, and the lowest SM clock in MHz during them.

    ``late``: the GPU waited for the host to queue one of them, so that launch overhead is in it.
    """

    ns: Sequence[float]
    clock_mhz: int
    late: bool = False


def slowest(batches: Sequence[Batch]) -> Batch:
    """Combine batches of several GPUs that ran the same at once: of each sample the longest, and the lowest clock."""
    ns = [max(times) for times in zip(*(batch.ns for batch in batches), strict=True)]
    return Batch(ns, min(batch.clock_mhz for batch in batches), any(batch.late for batch in batches))


@dataclass(frozen=True)
class Clocks:
    """Expected SM clock in MHz: the usual one in this run, and the highest of the device."""

    usual_mhz: float
    max_mhz: int


@dataclass(frozen=True)
class Timing:
    """Median and interquartile range in ns of the means of ``samples`` samples, and the lowest SM clock."""

    median_ns: float
    iqr_ns: float
    samples: int
    converged: bool
    sm_clock_mhz: int
    discarded: int = 0


def half_width(samples: Sequence[float] | Floats) -> float:
    """Return the half-width of the 95 % confidence interval of the median: 1.57 IQR / sqrt(n).

    McGill, Tukey & Larsen, "Variations of box plots" (1978).
    """
    low, high = np.percentile(samples, (25, 75))
    return float(1.57 * (high - low) / math.sqrt(len(samples)))


def sample_until(
    sampler: Callable[[int], Batch], clocks: Clocks, rest: Callable[[int], None], batch_size: int = BATCH
) -> Timing:
    """Take samples in batches until the median of their means is known to within 1 %, or there are six batches.

    It is known if its half-width is at most 1 %, and the middle eight of ten means lie within 3 %.

    A mean is taken over the batches, of the samples at the same position of each. Many kernels have two latencies,
    some 6 % apart, and take either by chance: a median of single samples would be one or the other. A median of means
    converges, and yet ignores an outlier (Nemirovsky & Yudin, "Problem complexity and method efficiency in
    optimization" (1983)).

    After a burst of heavy work the power limit holds the clock down for a while. A batch over 3 % below the usual
    clock is discarded and taken again after a ``rest``, 16 times at most; after that, and again 16 times at most, only
    one below 75 % of the highest clock is. A batch that was queued too late is discarded as well, without a rest. A
    timing with any of them in it counts as unconverged.
    """
    batches: list[Sequence[float]] = []
    means = np.empty(0)
    lowest_mhz, late, discarded = clocks.max_mhz, False, 0
    while len(batches) < MOST_BATCHES:
        batch = sampler(batch_size)
        if discarded < 2 * PATIENCE and (batch.late or batch.clock_mhz < _least_clock(clocks, discarded)):
            discarded += 1
            if not batch.late:
                rest(discarded)
            continue
        batches.append(batch.ns)
        means = np.mean(batches, axis=0)
        lowest_mhz, late = min(lowest_mhz, batch.clock_mhz), late or batch.late
        ends = len(means) // 10
        middle = np.ptp(np.sort(means)[ends : len(means) - ends])
        if _is_known(means) and middle <= AGREEMENT * np.median(means):
            break
    low, median, high = (float(value) for value in np.percentile(means, (25, 50, 75)))
    converged = not late and lowest_mhz >= _least_clock(clocks, discarded=0) and _is_known(means)
    return Timing(median, high - low, len(batches) * batch_size, converged, lowest_mhz, discarded)


def _is_known(samples: Floats) -> bool:
    return half_width(samples) <= PRECISION * float(np.median(samples))


def _least_clock(clocks: Clocks, discarded: int) -> float:
    throttled = SLOWEST_CLOCK * clocks.max_mhz
    return max(STEADY_CLOCK * clocks.usual_mhz, throttled) if discarded < PATIENCE else throttled


class Replay(NamedTuple):
    """Launches in one replay, over how many sets of buffers, after a flush of L2 or not, and replays in a batch."""

    launches: int
    sets: int
    flush: bool
    batch: int


def plan_launches(launch_ns: float, bytes_each: int, l2_bytes: int, cache: Cache) -> Replay:
    """Plan a replay of at least 0.3 ms (cold) or 3 ms (hot), so that short launches are timed several at once.

    Cold: sets of buffers until six times L2 has gone by, in whole rounds. L2 is flushed before each replay unless one
    launch does it: the rest of the last replay there would warm the next one, or hold it, for as long as the graph is
    replayed, in one of the latencies that the kernel can have. Hot: one set. A batch lasts at most about 0.2 s.
    """
    count = max(1, math.ceil(LEAST_NS[cache] / launch_ns))
    batch = max(LEAST_BATCH, min(BATCH, int(BATCH_NS / (count * launch_ns))))
    if cache == "hot":
        return Replay(count, 1, False, batch)
    sets = min(count, math.ceil(ROTATION * l2_bytes / bytes_each))
    rounds = math.ceil(count / sets)
    return Replay(rounds * sets, sets, bytes_each < ROTATION * l2_bytes, batch)
