"""Time calls on the GPU: rotated buffers, a CUDA graph, events, and a kernel of known cycles that shows the clock."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from gac.core.distributed.ranks import ALONE, Ranks
from gac.profiling.records import Cache
from gac.profiling.timing.sampling import (
    BATCH,
    ROTATION,
    STEADY_CLOCK,
    Batch,
    Clocks,
    Timing,
    plan_launches,
    sample_until,
    slowest,
)

_cuda: Any = torch.cuda  # its constructors carry no annotations

_REST_SECONDS = 0.01
_SPIN_CYCLES = 300_000
_RECENT = 101
_PRESUMED = 21
_WARM_UP_SECONDS = 1.0
_LEAST_NS = 1000.0
_ESTIMATES = 8
_LEAST_LEAD = 200_000
_MOST_LEAD = 40_000_000
_SHORTER = 0.98
_WARM_RUNS = 2
_CAPTURE_MODE = "thread_local"  # the thread of NCCL may query its events while this one captures

Call = Callable[[], object]


def next_lead(cycles: int, late: bool) -> int:
    """Return the cycles that the GPU is held back while the next batch is queued: doubled after a late one, else -2 %.

    Queueing takes 0.1 ms to some milliseconds, by the speed and the load of the host.
    """
    return min(max(2 * cycles if late else int(_SHORTER * cycles), _LEAST_LEAD), _MOST_LEAD)


class Stopwatch:
    """Time calls on the current CUDA device, on a stream of its own.

    Where several processes time a collective, a sample is that of the slowest. All of them decide from the same
    samples, so that they launch the same, and as often.
    """

    def __init__(self, l2_bytes: int, max_clock_mhz: int, ranks: Ranks = ALONE) -> None:
        self.stream = _cuda.Stream()
        self._l2_bytes, self._max_clock, self._ranks = l2_bytes, max_clock_mhz, ranks
        self._large = torch.ones(ROTATION * l2_bytes // 4, dtype=torch.float32, device="cuda")
        self._sum = torch.empty((), dtype=torch.float32, device="cuda")
        self._word = ranks.total(torch.zeros((), dtype=torch.int32, device="cuda"))  # connects them
        self._recent: deque[int] = deque([round(STEADY_CLOCK * max_clock_mhz)] * _PRESUMED, maxlen=_RECENT)
        self._lead = 2 * _LEAST_LEAD
        self._spins = [(_cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)) for _ in range(2)]
        self._starts = [_cuda.Event(enable_timing=True) for _ in range(BATCH)]
        self._ends = [_cuda.Event(enable_timing=True) for _ in range(BATCH)]
        _cuda._sleep(1)  # loads the kernel, which would otherwise look like a very slow clock
        self._pool = _cuda.graph_pool_handle()
        with torch.cuda.stream(self.stream):
            self._keeper = self._capture([self._flush])  # while it lives, what graphs allocate is reused, not returned
            until = time.monotonic() + _WARM_UP_SECONDS
            while time.monotonic() < until:
                for _ in range(_RECENT):
                    self._flush()
                self.stream.synchronize()

    def time(self, call_on: Callable[[int], Sequence[Call]], bytes_each: int, cache: Cache) -> Timing:
        """Time one launch that moves ``bytes_each``; ``call_on`` makes so many calls, each on other buffers."""
        with torch.cuda.stream(self.stream):
            first = self._estimate(call_on(1)[0])
            launches, sets, flush, batch = plan_launches(first, bytes_each, self._l2_bytes, cache)
            calls = call_on(sets)
            graph = self._capture([calls[index % sets] for index in range(launches)])
            clocks = Clocks(float(np.median(self._recent)), self._max_clock)

            def sampler(count: int) -> Batch:
                graph.replay()
                ns, clock, late = self._queued([graph] * count, flush)
                return Batch([replay / launches for replay in ns], clock, late)

            return sample_until(sampler, clocks, lambda discarded: time.sleep(_REST_SECONDS * discarded), batch)

    def graph_of(self, call: Call) -> torch.cuda.CUDAGraph:
        """Capture one call as a graph, after two runs of it that are not captured."""
        torch.cuda.synchronize()  # what the call reads may still be written on another stream
        with torch.cuda.stream(self.stream):
            for _ in range(_WARM_RUNS):
                call()
            self.stream.synchronize()
            return self._capture([call])

    def round(self, graphs: Sequence[torch.cuda.CUDAGraph]) -> Batch:
        """Replay each graph once, in this order and without a gap, after a replay of the last; return ns of each.

        L2 is not flushed: with graphs that read more than L2 holds, each finds nothing of its own there.
        """
        assert len(graphs) <= BATCH, f"{len(graphs)} graphs in one round"
        with torch.cuda.stream(self.stream):
            graphs[-1].replay()
            return self._queued(graphs, flush=False)

    def _queued(self, graphs: Sequence[torch.cuda.CUDAGraph], flush: bool) -> Batch:
        """Time a replay of each, queued while the GPU is held back, so that it never waits for the host.

        Kernels of known cycles run before and after: cycles over their time is the clock, less 1 % for the launch.
        """
        timed = list(zip(self._starts, self._ends, graphs, strict=False))
        self._hold_back()
        late = self._timed(*self._spins[0], lambda: _cuda._sleep(_SPIN_CYCLES))
        for start, end, graph in timed:
            if flush:
                self._flush()
            late |= self._timed(start, end, graph.replay)
        late |= self._timed(*self._spins[1], lambda: _cuda._sleep(_SPIN_CYCLES))
        self.stream.synchronize()
        clock = round(min(_SPIN_CYCLES / (1e3 * start.elapsed_time(end)) for start, end in self._spins))
        batch = self._slowest([start.elapsed_time(end) for start, end, _ in timed], clock, late)
        if not batch.late:
            self._recent.append(batch.clock_mhz)
        return batch

    def _hold_back(self) -> None:
        _cuda._sleep(self._lead)
        self._ranks.total(self._word)  # the next work begins on all GPUs at once

    def _slowest(self, ms: Sequence[float], clock_mhz: int, late: bool) -> Batch:
        batch = slowest(self._ranks.gathered(Batch([1e6 * time_ms for time_ms in ms], clock_mhz, late)))
        self._lead = next_lead(self._lead, batch.late)
        return batch

    def _timed(self, start: Any, end: Any, work: Call) -> bool:
        """Queue work between two events; return True if the GPU had reached the first before all was queued."""
        start.record()
        work()
        end.record()
        return bool(start.query())

    def _estimate(self, call: Call, launches: int = 3) -> float:
        call()
        for _ in range(_ESTIMATES):
            self._flush()
            self._hold_back()
            late = self._timed(self._starts[0], self._ends[0], lambda: [call() for _ in range(launches)])
            self.stream.synchronize()
            batch = self._slowest([self._starts[0].elapsed_time(self._ends[0])], self._max_clock, late)
            if not batch.late:
                break
        return max(batch.ns[0] / launches, _LEAST_NS)

    def _capture(self, calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode=_CAPTURE_MODE)
        try:
            for call in calls:
                call()
        finally:
            graph.capture_end()
        return graph

    def _flush(self) -> None:
        """Read what evicts L2. A write would leave dirty lines whose eviction is charged to what is timed next."""
        torch.sum(self._large, dim=0, out=self._sum)
