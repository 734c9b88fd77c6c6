"""Profile the local GPU: estimate the work, do it, sum it up."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gac.core.errors import ProfileError
from gac.core.progress import rough_duration
from gac.profiling.folders import default_path
from gac.profiling.operators import work_of
from gac.profiling.records import Header, Measurement, Point
from gac.profiling.sweeps.journal import check_same_machine
from gac.profiling.sweeps.multi_gpu import measurers_on
from gac.profiling.sweeps.sweep import PASSES, missing, run_sweep
from gac.profiling.table import Profile
from gac.profiling.timing.device import fingerprint
from gac.profiling.timing.sampling import BATCH, LEAST_NS

logger = logging.getLogger("gac")

DRIFT = 0.03

_OVERHEAD_SECONDS = 0.008
_REPLAYS = BATCH + 2
_FLOPS_PER_CYCLE = 2048  # of one SM: half of the bf16 rate of Hopper's tensor cores
_BYTES_PER_SECOND = 1.5e12


@dataclass(frozen=True)
class Estimate:
    """The work of a sweep here: shapes, timings that the file lacks (several a shape), and rough seconds."""

    path: Path
    shapes: int
    remaining: int
    seconds: float
    header: Header

    def __str__(self) -> str:
        duration = rough_duration(self.seconds)
        return f"{self.shapes:,} shapes, {self.remaining:,} timings to take into {self.path}: {duration}"


def estimate(
    points: Sequence[Point],
    path: str | Path | None = None,
    passes: int = PASSES,
    header: Header | None = None,
    gpus: int = 1,
) -> Estimate:
    """Estimate the work of ``profile_gpu`` with the same arguments on this GPU; raises the same errors.

    A timing is twelve replays, at half the tensor cores' rate or half the memory's, and some ms for everything else.
    """
    _check_passes(passes)
    header = header or fingerprint()
    target = default_path(header.gpu) if path is None else Path(path)
    known: dict[Point, Measurement] = {}
    if target.is_file() and target.stat().st_size:
        profile = Profile.load(target)
        check_same_machine(target, profile.header, header)
        known = {row.point: row for row in profile.measurements}
    todo = [point for number in range(passes) for point in missing(points, known.get, number)]
    rate = header.sm_count * header.sm_clock_max_mhz * 1e6 * _FLOPS_PER_CYCLE
    seconds = 0.0
    for point in todo:
        flops, moved = work_of(point.operation, point.dtype)
        launch = max(LEAST_NS[point.cache] / 1e9, flops / rate, moved / _BYTES_PER_SECOND)
        seconds += _OVERHEAD_SECONDS + _REPLAYS * launch
    return Estimate(target, len(points), len(todo), seconds / gpus, header)


def profile_gpu(
    points: Sequence[Point],
    path: str | Path | None = None,
    passes: int = PASSES,
    seconds: float | None = None,
    gpus: int = 1,
) -> Path:
    """Measure the local GPU at these points, or go on where an earlier run stopped; logs the work, and the rest.

    Args:
        path: the file, which is returned; None: the default place of this GPU's profile.
        passes: timings of every point.
        seconds: stop after about this long; the next call goes on.
        gpus: the number of GPUs of this host that share the timings, the first ones.

    Raises:
        ProfileError: there are fewer GPUs, they differ, one failed, ``passes`` is below 1, or the file cannot be
            resumed here.
    """
    _check_passes(passes)  # before a process starts
    with measurers_on(gpus, points) as (header, ready):
        ahead = estimate(points, path, passes, header, gpus)
        logger.info("%s", ahead)
        if ahead.remaining:
            measurers = ready()
            warn_if_shared(header)
            begun = time.monotonic()
            timed = run_sweep(points, ahead.path, measurers, header, passes, seconds)
            remaining = ahead.remaining - timed
            logger.info("%s", f"{timed:,} timings in {time.monotonic() - begun:.0f} s, {remaining:,} left")
    return ahead.path


def _check_passes(passes: int) -> None:
    if passes < 1:
        raise ProfileError(f"{passes} passes", "at least 1", f"Use {PASSES}, the default.")


def warn_if_shared(header: Header) -> None:
    if header.shared_with:
        logger.warning("Others use this GPU: %s. Latencies may be too high.", header.shared_with)


def summary(profile: Profile) -> str:
    doubts = [f"the sentinels drifted by {profile.drift:.1%}"] if profile.drift > DRIFT else []
    doubts += [profile.header.shared_with] if profile.header.shared_with else []
    return (
        f"{len(profile.measurements):,} shapes of {profile.header.gpu}, {len(profile.failed):,} failed; "
        f"{profile.converged_fraction:.1%} converged, passes within {profile.spread:.1%} for 95 %, "
        f"drift {profile.drift:.1%}" + "".join(f"; DOUBTFUL: {doubt}" for doubt in doubts)
    )
