"""A machine that is made up: latencies that are known, seen through noise, drift, outliers and throttling."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gac.profiling.records import Launch, Measurement, Point
from gac.profiling.table import Sweep
from gac.profiling.timing.sampling import Batch, Clocks, sample_until

MAX_MHZ = 1980


def make_sweep(points: Mapping[int, float], iqr: float = 0.0) -> Sweep:
    """Latencies of low-rank pairs by rank; ``iqr`` is relative to them."""
    dims = np.array(sorted(points), dtype=np.int64)
    ns = np.array([points[dim] for dim in dims.tolist()], dtype=np.float64)
    return Sweep("low_rank", "bf16", "cold", "r", (("m", 1024),), dims, ns, iqr * ns, ((),) * len(dims))


@dataclass
class SyntheticGpu:
    """Measures as ``GpuMeasurer`` does, through ``sample_until``, on a clock that is only imagined.

    Attributes:
        latency: true ns of a point at the highest clock.
        noise: relative standard deviation of a sample.
        drift: by how much the machine is slower after 10,000 timings, as a fraction.
        throttled: fraction of batches in which the SM clock is at 60 % and everything takes that much longer.
    """

    latency: Callable[[Point], float]
    noise: float = 0.003
    drift: float = 0.0
    throttled: float = 0.0
    timed: int = 0
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def measure(self, point: Point, checked: bool = False) -> Measurement:
        self.timed += 1
        true = self.latency(point) * (1 + self.drift * self.timed / 10_000)
        timing = sample_until(
            lambda count: self._batch(true, count), Clocks(0.98 * MAX_MHZ, MAX_MHZ), lambda discarded: None
        )
        return Measurement.of(
            point, timing.median_ns, timing.iqr_ns, timing.samples, timing.sm_clock_mhz, timing.converged
        )

    def launches(self, points: Sequence[Point]) -> list[tuple[Launch, ...]]:
        return [()] * len(points)

    def _batch(self, true: float, count: int) -> Batch:
        clock = 0.6 if self.random.random() < self.throttled else 1.0
        samples = true / clock * (1 + self.noise * self.random.standard_normal(count))
        return Batch(list(np.abs(samples)), round(clock * MAX_MHZ))
