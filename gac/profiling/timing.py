"""Time one callable so that the number can be trusted: rotated buffers, a CUDA graph, and a rule for when to stop."""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

_cuda: Any = torch.cuda  # its constructors carry no annotations

TARGET_NS = 500_000.0
BATCH = 10
MOST_SAMPLES = 60
PRECISION = 0.01
STEADY_CLOCK = 0.97
SLOWEST_CLOCK = 0.75
_TAKES = 3
_REST_SECONDS = 0.01
_SPIN_CYCLES = 300_000
_RECENT = 101

METHOD = (
    "CUDA graph replays of at least 0.5 ms between CUDA events, every launch on other buffers until 2x L2 has gone by, "
    "L2 flushed before a replay that touches less; median of 10 to 60 replays, until 1.57 IQR / sqrt(n) <= 1 %; "
    "SM clock measured beside them by a kernel of known cycles; up to 3 takes while over 3 % below its usual value"
)

Sampler = Callable[[int], Sequence[float]]
Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Median and interquartile range in ns of ``samples`` samples, and the SM clock while they were taken."""

    median_ns: float
    iqr_ns: float
    samples: int
    converged: bool
    sm_clock_mhz: int = 0


def half_width(samples: Sequence[float]) -> float:
    """Half-width of the 95 % confidence interval of the median: 1.57 IQR / sqrt(n).

    McGill, Tukey & Larsen, "Variations of box plots" (1978).
    """
    low, high = np.percentile(samples, (25, 75))
    return float(1.57 * (high - low) / math.sqrt(len(samples)))


def sample_until(sampler: Sampler, *, batch: int = BATCH, most: int = MOST_SAMPLES) -> Timing:
    """Take samples (ns) in batches until the median is known to within 1 %, or there are ``most`` of them.

    Args:
        sampler: returns as many new samples as it is asked for.
    """
    samples: list[float] = []
    while len(samples) < most:
        samples += sampler(min(batch, most - len(samples)))
        median = float(np.median(samples))
        if half_width(samples) <= PRECISION * median:
            break
    low, high = np.percentile(samples, (25, 75))
    converged = half_width(samples) <= PRECISION * median
    return Timing(median, float(high - low), len(samples), converged)


def at_steady_clock(take: Callable[[], Timing], usual_mhz: float, max_mhz: int, rest: Callable[[], None]) -> Timing:
    """Take a timing while the SM clock is where it mostly is; the driver's own reading lags too far behind to tell.

    After a burst of heavy work the power limit holds the clock down for a while. So while the clock is more than
    3 % below its usual value, rest and take the timing again, three takes at most; the one at the highest clock
    counts. Below 75 % of the device's maximum it counts as unconverged.
    """
    timing = take()
    for _ in range(_TAKES - 1):
        if timing.sm_clock_mhz >= STEADY_CLOCK * usual_mhz:
            break
        rest()
        timing = max(timing, take(), key=lambda one: one.sm_clock_mhz)
    return replace(timing, converged=timing.converged and timing.sm_clock_mhz >= SLOWEST_CLOCK * max_mhz)


def plan_launches(launch_ns: float, bytes_each: int, l2_bytes: int) -> tuple[int, int, bool]:
    """How often to launch in one replay, over how many sets of buffers, and whether L2 must be flushed before it.

    Enough launches for a replay of 0.5 ms; sets until twice L2 has gone by. Where the sets of one replay hold
    less than that, each is used once a replay, and a flush between replays makes it cold again.
    """
    launches = max(1, math.ceil(TARGET_NS / launch_ns))
    sets = min(launches, math.ceil(2 * l2_bytes / bytes_each))
    return launches, sets, sets * bytes_each < 2 * l2_bytes


class Stopwatch:
    """Times calls on the current CUDA device, on its own stream.

    Args:
        l2_bytes: size of the L2 cache.
        max_clock_mhz: the highest SM clock the device can have.
    """

    def __init__(self, l2_bytes: int, max_clock_mhz: int) -> None:
        self.stream = _cuda.Stream()
        self._l2_bytes = l2_bytes
        self._max_clock = max_clock_mhz
        self._large = torch.ones(2 * l2_bytes // 4, dtype=torch.float32, device="cuda")
        self._sum = torch.empty((), dtype=torch.float32, device="cuda")
        self._clocks: deque[int] = deque([round(STEADY_CLOCK * max_clock_mhz)], maxlen=_RECENT)
        self._spins = [(_cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)) for _ in range(2)]
        self._starts = [_cuda.Event(enable_timing=True) for _ in range(BATCH)]
        self._ends = [_cuda.Event(enable_timing=True) for _ in range(BATCH)]
        _cuda._sleep(1)  # loads the kernel, which would otherwise look like a very slow clock

    def time(self, call_on: Callable[[int], Sequence[Call]], bytes_each: int) -> Timing:
        """Time one launch, operands cold.

        Args:
            call_on: makes as many calls as it is asked for, each on buffers of its own.
            bytes_each: what one call reads and writes.
        """
        with torch.cuda.stream(self.stream):
            launches, sets, flush = plan_launches(self._estimate(call_on(1)[0]), bytes_each, self._l2_bytes)
            calls = call_on(sets)
            graph = self._capture([calls[index % sets] for index in range(launches)])
            return at_steady_clock(
                lambda: self._timing(graph, launches, flush), float(np.median(self._clocks)), self._max_clock, _rest
            )

    def _timing(self, graph: torch.cuda.CUDAGraph, launches: int, flush: bool) -> Timing:
        clocks: list[float] = []

        def sampler(count: int) -> list[float]:
            times = self._replays(graph, count, flush, clocks)
            return [replay / launches for replay in times]

        timing = sample_until(sampler)
        self._clocks.append(round(min(clocks)))
        return replace(timing, sm_clock_mhz=self._clocks[-1])

    def _replays(self, graph: torch.cuda.CUDAGraph, count: int, flush: bool, clocks: list[float]) -> list[float]:
        """Time ``count`` replays in ns. They are queued behind an untimed one, so that the GPU never waits for us."""
        timed = list(zip(self._starts[:count], self._ends[:count], strict=True))
        graph.replay()
        self._spin(*self._spins[0])
        for start, end in timed:
            if flush:
                self._flush()
            start.record()
            graph.replay()
            end.record()
        self._spin(*self._spins[1])
        self.stream.synchronize()
        clocks += [_SPIN_CYCLES / (1e3 * start.elapsed_time(end)) for start, end in self._spins]
        return [1e6 * start.elapsed_time(end) for start, end in timed]

    def _spin(self, start: torch.cuda.Event, end: torch.cuda.Event) -> None:
        """A kernel of known cycles between two events: cycles over time is the clock, less 1 % for the launch."""
        start.record()
        _cuda._sleep(_SPIN_CYCLES)
        end.record()

    def _estimate(self, call: Call, launches: int = 3) -> float:
        """Rough ns a launch. The flushes keep the GPU busy while we queue, so that launch overhead is not counted."""
        call()
        for _ in range(3):
            self._flush()
        self._starts[0].record()
        for _ in range(launches):
            call()
        self._ends[0].record()
        self.stream.synchronize()
        return max(1e6 * float(self._starts[0].elapsed_time(self._ends[0])) / launches, 1000.0)

    def _capture(self, calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        try:
            for call in calls:
                call()
        finally:
            graph.capture_end()
        return graph

    def _flush(self) -> None:
        """Read twice L2. A write would leave dirty lines whose eviction is charged to what is timed next."""
        torch.sum(self._large, dim=0, out=self._sum)


def _rest() -> None:
    time.sleep(_REST_SECONDS)
