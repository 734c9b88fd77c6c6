"""Sets GAC's medians beside those of ``triton.testing.do_bench`` on the local GPU, with the operands in the same place.

Cold: 100 shapes of at least 0.5 ms, one launch at a time. ``do_bench`` clears L2 by writing to it, and the call then
pays for the lines that are written back: here it clears L2 as GAC does, by reading. Hot: 100 shapes of any length on
one set of buffers; L2 is not cleared, and what is timed is as many launches in a row as take 3 ms, for ``do_bench``
would charge a short call for its launch. Either way the launches are a CUDA graph, for the gaps between eager kernels
are the host's. Triton does not look at the clock: it is given a rest and few repetitions, and a turn of either during
which the clock dropped is taken again. They take five turns each, in alternation; shapes that take over 4 ms, or whose
clock never holds, are left out. The bar: 2 %.

    python tests/benchmarks/bench_timing.py --output results.json
"""

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import takewhile
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from tqdm import tqdm
from triton import runtime
from triton.testing import do_bench

from gac.core.operations import linear
from gac.forms.low_rank import low_rank
from gac.profiling.operators import OPERATORS, operation
from gac.profiling.records import Cache, Point
from gac.profiling.timing.device import fingerprint
from gac.profiling.timing.measure import GpuMeasurer
from gac.profiling.timing.sampling import LEAST_NS, STEADY_CLOCK
from gac.profiling.timing.stopwatch import _SPIN_CYCLES, next_lead
from tests.benchmarks.harness import options, write

SHAPES = 100
COLD_LEAST_NS = 500_000
MOST_NS = 4_000_000
REPETITION_MS = {"cold": 10, "hot": 30}
REST_SECONDS = 0.02
TURNS = 5
PATIENCE = 4


def candidates() -> Iterator[Point]:
    """Shapes of several operators, from a few microseconds to tens of milliseconds."""
    for m in (1, 64, 1024, 4096, 8192, 16384):
        for k in (1024, 2048, 4095, 4096, 6144, 8192):
            yield from (
                Point(linear(m, k, n), dtype) for n in (1024, 4096, 4098, 8192, 14336) for dtype in ("bf16", "fp16")
            )
        yield from (Point(low_rank(m, 4096, rank, 14336)) for rank in (512, 1023, 1024, 2048, 3000))
    for d in (64, 96, 107, 112, 128, 192, 256):
        for s in (1024, 2048, 4096):
            for name in ("sdpa", "sdpa_causal"):
                yield Point(operation(name, b=4, h=32, kv=32, s=s, t=s, d=d))


def compare(measurer: GpuMeasurer, cache: Cache) -> list[dict[str, Any]]:
    points = [replace(point, cache=cache) for point in candidates()]
    random.Random(0).shuffle(points)
    rows: list[dict[str, Any]] = []
    for point in tqdm(points, desc=cache, mininterval=5):
        contest = Contest(measurer, point)
        if not (COLD_LEAST_NS if cache == "cold" else 0) < contest.estimate < MOST_NS:
            continue
        turns = list(takewhile(lambda turn: not any(map(math.isnan, turn)), contest.turns()))
        if len(turns) < TURNS:
            continue
        ours, theirs = (float(np.median(side)) for side in zip(*turns, strict=True))
        axes = " ".join(f"{axis}={size}" for axis, size in point.operation.shape)
        shape = f"{point.operation.operator} {point.dtype} {axes}"
        rows.append({"shape": shape, "gac_ns": ours, "triton_ns": theirs, "turns": turns})
        if len(rows) == SHAPES:
            break
    return rows


class Contest:
    """One point, timed both ways; hot on the very same buffers, for where they lie in L2 makes a difference."""

    def __init__(self, measurer: GpuMeasurer, point: Point) -> None:
        self.watch, self.point = measurer._watch, point
        self.make = lambda: measurer._call(point)
        self.call = self.make()
        self.bytes = OPERATORS.get(point.operation.operator).bytes(point.operation.axes, point.dtype)
        with torch.cuda.stream(self.watch.stream):
            self.estimate = self.watch._estimate(self.call)
            self.launches = 1 if point.cache == "cold" else math.ceil(LEAST_NS["hot"] / self.estimate)
            self.graph = self.watch._capture([self.call] * self.launches)

    def turns(self) -> Iterator[tuple[float, float]]:
        """Nanoseconds by GAC and by Triton, in alternation."""
        return ((self.steady(self.gac), self.steady(self.triton)) for _ in range(TURNS))

    def steady(self, turn: Callable[[], tuple[float, float]]) -> float:
        """Nanoseconds of a turn with the clock at its usual height; not a number if it never is."""
        for attempt in range(PATIENCE):
            time.sleep(REST_SECONDS * (1 + attempt))
            ns, clock_mhz = turn()
            if clock_mhz >= STEADY_CLOCK * float(np.median(self.watch._recent)):
                return ns
        return math.nan

    def gac(self) -> tuple[float, float]:
        """Nanoseconds by GAC, and MHz."""
        with torch.cuda.stream(self.watch.stream):
            timing = self.watch.time(self._calls, self.bytes, self.point.cache)
        return timing.median_ns, timing.sm_clock_mhz

    def triton(self) -> tuple[float, float]:
        """Nanoseconds by Triton, and MHz right after."""
        clear = self.watch._flush if self.point.cache == "cold" else _nothing
        with patch.object(runtime.driver.active, "clear_cache", lambda _: clear()):
            ms = do_bench(self.graph.replay, warmup=1, rep=REPETITION_MS[self.point.cache], return_mode="median")
        ns = 1e6 * float(ms) / self.launches
        return ns, self._clock_mhz()

    def _clock_mhz(self) -> float:
        start, end = self.watch._spins[0]
        while True:
            torch.cuda._sleep(self.watch._lead)
            late = self.watch._timed(start, end, lambda: torch.cuda._sleep(_SPIN_CYCLES))
            torch.cuda.synchronize()
            self.watch._lead = next_lead(self.watch._lead, late)
            if not late:
                return _SPIN_CYCLES / (1e3 * start.elapsed_time(end))

    def _calls(self, count: int) -> list[Callable[[], object]]:
        return [self.call, *(self.make() for _ in range(count - 1))]


def _nothing() -> None:
    """Leaves L2 as it is."""


def main() -> None:
    asked = options(__doc__, "--output").parse_args()
    measurer = GpuMeasurer(fingerprint())
    report: dict[str, dict[str, object]] = {}
    for cache in ("hot", "cold"):
        rows = compare(measurer, cache)
        ratio = np.array([row["gac_ns"] / row["triton_ns"] for row in rows])
        off = np.abs(ratio - 1)
        figures = {
            "shapes": len(rows),
            "median_ratio": float(np.median(ratio)),
            "median_difference": float(np.median(off)),
            "within_2_percent": int((off <= 0.02).sum()),
            "largest_difference": float(off.max()),
        }
        report[cache] = figures | {"rows": rows}
        write(asked.output, **report)
        print(cache, figures)


if __name__ == "__main__":
    main()
