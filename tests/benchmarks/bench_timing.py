"""Sets GAC's medians beside those of ``triton.testing`` on the local GPU, with the operands in the same place.

Hot: 100 shapes beside ``do_bench_cudagraph``, which replays launches on one set of buffers. Cold: 100 shapes of at
least 0.2 ms beside ``do_bench``, which clears L2 before every launch and times each launch by itself, so that a shorter
one would be charged for its own launch. Triton does not look at the clock: it is given a rest and few repetitions, so
that the power limit does not slow it down. Each Triton timing lies between two of GAC's. The bar: 2 %.

    python tests/benchmarks/bench_timing.py --output results.json
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from triton.testing import do_bench, do_bench_cudagraph

from gac.forms import linear, low_rank
from gac.profiling.operators import OPERATORS, operation
from gac.profiling.records import Cache, Point
from gac.profiling.timing.device import fingerprint
from gac.profiling.timing.measure import GpuMeasurer

SHAPES = 100
COLD_LEAST_NS = 200_000
REST_SECONDS = 0.05


def candidates() -> Iterator[Point]:
    """Shapes of several operators, from a few microseconds to some milliseconds."""
    for m in (1, 64, 1024, 4096, 8192):
        for k in (1024, 4095, 4096, 8192):
            yield from (Point(linear(m, k, n), dtype) for n in (1024, 4096, 4098, 14336) for dtype in ("bf16", "fp16"))
        yield from (Point(low_rank(m, 4096, rank, 14336)) for rank in (512, 1023, 1024, 2048, 3000))
    for d in (64, 96, 107, 112, 128, 192, 256):
        for s in (1024, 2048, 4096):
            for name in ("sdpa", "sdpa_causal"):
                yield Point(operation(name, b=4, h=32, kv=32, s=s, t=s, d=d))


def compare(measurer: GpuMeasurer, cache: Cache) -> list[dict[str, object]]:
    points = [replace(point, cache=cache) for point in candidates()]
    random.Random(0).shuffle(points)
    rows: list[dict[str, object]] = []
    for point in points:
        ours = Contest(measurer, point)
        before = ours.gac()
        if cache == "cold" and before < COLD_LEAST_NS:
            continue
        theirs = ours.triton()
        mean = (before + ours.gac()) / 2
        axes = " ".join(f"{axis}={size}" for axis, size in point.operation.shape)
        rows.append({"shape": f"{point.operation.operator} {point.dtype} {axes}", "gac_ns": mean, "triton_ns": theirs})
        if len(rows) == SHAPES:
            break
    return rows


class Contest:
    """One point, timed both ways; hot on the very same buffers, for where they lie in L2 makes a difference."""

    def __init__(self, measurer: GpuMeasurer, point: Point) -> None:
        self.measurer, self.point = measurer, point
        self.call = measurer._call(point)
        self.bytes = OPERATORS[point.operation.operator].bytes(point.operation.axes, point.dtype)

    def gac(self) -> float:
        """Nanoseconds by GAC."""
        with torch.cuda.stream(self.measurer._watch.stream):
            return self.measurer._watch.time(self._calls, self.bytes, self.point.cache).median_ns

    def triton(self) -> float:
        """Nanoseconds by Triton."""
        time.sleep(REST_SECONDS)
        if self.point.cache == "cold":
            return 1e6 * float(do_bench(self.call, warmup=1, rep=10, return_mode="median"))
        with torch.cuda.stream(torch.cuda.Stream()):
            return 1e6 * float(do_bench_cudagraph(self.call, rep=2, return_mode="median"))

    def _calls(self, count: int) -> list[Callable[[], object]]:
        return [self.call, *(self.measurer._call(self.point) for _ in range(count - 1))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    output = parser.parse_args().output
    header = fingerprint()
    measurer = GpuMeasurer(header)
    report: dict[str, object] = {"gpu": header.gpu, "torch": header.torch, "cuda": header.cuda, "date": header.date}
    for cache in ("hot", "cold"):
        rows = compare(measurer, cache)
        ratio = np.array([float(row["gac_ns"]) / float(row["triton_ns"]) for row in rows])  # type: ignore[arg-type]
        off = np.abs(ratio - 1)
        report[cache] = {
            "shapes": len(rows),
            "median_ratio": float(np.median(ratio)),
            "median_difference": float(np.median(off)),
            "within_2_percent": int((off <= 0.02).sum()),
            "largest_difference": float(off.max()),
            "rows": rows,
        }
        print(cache, {name: value for name, value in report[cache].items() if name != "rows"})  # type: ignore[attr-defined]
    output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
