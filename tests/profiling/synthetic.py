"""Made-up sweeps and a made-up machine: latencies that are known, seen through noise."""

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
    """Measures as ``GpuMeasurer`` does; ``latency`` is in ns, ``noise`` a sample's relative standard deviation."""

    latency: Callable[[Point], float]
    noise: float = 0.003
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def measure(self, point: Point, checked: bool = False) -> Measurement:
        def sampler(count: int) -> Batch:
            samples = self.latency(point) * (1 + self.noise * self.random.standard_normal(count))
            return Batch(list(np.abs(samples)), MAX_MHZ)

        timing = sample_until(sampler, Clocks(0.98 * MAX_MHZ, MAX_MHZ), lambda discarded: None)
        clock = timing.sm_clock_mhz
        return Measurement.of(point, timing.median_ns, timing.iqr_ns, timing.samples, clock, timing.converged)

    def launches(self, points: Sequence[Point]) -> list[tuple[Launch, ...]]:
        return [()] * len(points)
