"""Profile the local GPU: estimate the work, do it, sum it up."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gac.core.errors import ProfileError
from gac.core.words import about
from gac.profiling.folders import default_path
from gac.profiling.operators import OPERATORS
from gac.profiling.records import Header, Measurement, Point
from gac.profiling.sweeps.journal import check_same_machine
from gac.profiling.sweeps.several import check_agree, one_header
from gac.profiling.sweeps.sweep import PASSES, Measurer, missing, run_sweep
from gac.profiling.table import Profile
from gac.profiling.timing.device import fingerprint
from gac.profiling.timing.sampling import BATCH, LEAST_NS

logger = logging.getLogger("gac")

DRIFT = 0.03

_OVERHEAD_SECONDS = 0.008
_REPLAYS = BATCH + 2
_FLOPS_PER_CYCLE = 2048  # of one SM: half of what Hopper's tensor cores can do in bf16
_BYTES_PER_SECOND = 1.5e12


@dataclass(frozen=True)
class Estimate:
    """The work of a sweep here: shapes, timings that the file lacks (several a shape), and roughly how many seconds."""

    path: Path
    shapes: int
    remaining: int
    seconds: float
    header: Header

    def __str__(self) -> str:
        return f"{self.shapes:,} shapes, {self.remaining:,} timings to take into {self.path}: {about(self.seconds)}"


def estimate(
    points: Sequence[Point],
    path: str | Path | None = None,
    passes: int = PASSES,
    header: Header | None = None,
    gpus: int = 1,
) -> Estimate:
    """What ``profile_gpu`` with the same arguments would have to do on this GPU.

    A timing is twelve replays, at half the tensor cores' rate or half the memory's, and some ms for everything else.

    Args:
        header: of the GPU; None: its fingerprint is taken.
        gpus: how many share the timings.

    Raises:
        ProfileError: there is no GPU, ``passes`` is below 1, or the file is malformed or of another machine.
    """
    _check_passes(passes)
    header = header or fingerprint()
    target = default_path(header.gpu) if path is None else Path(path)
    known: dict[Point, Measurement] = {}
    if target.is_file() and target.stat().st_size:
        found = Profile.load(target)
        check_same_machine(target, found.header, header)
        known = {row.point: row for row in found.measurements}
    todo = [one for number in range(passes) for one in missing(points, known.get, number)]
    rate = header.sm_count * header.sm_clock_max_mhz * 1e6 * _FLOPS_PER_CYCLE
    launches = (max(LEAST_NS[one.cache] / 1e9, _launch_seconds(one, rate)) for one in todo)
    seconds = sum(_OVERHEAD_SECONDS + _REPLAYS * launch for launch in launches)
    return Estimate(target, len(points), len(todo), seconds / gpus, header)


def profile_gpu(
    points: Sequence[Point],
    path: str | Path | None = None,
    passes: int = PASSES,
    seconds: float | None = None,
    gpus: int = 1,
) -> Path:
    """Measure the local GPU at these points, or go on where an earlier run stopped.

    How much there is to do and what is left is logged; how it goes is said on standard error.

    Args:
        path: the file; by default the place where this GPU's profile is looked for.
        passes: how often to time every point.
        seconds: stop after about this long; the next call goes on.
        gpus: how many GPUs of this host measure, the first ones; each time one of those shapes that are left.

    Returns:
        the file's path.

    Raises:
        ProfileError: there are not so many GPUs, they differ, one failed, ``passes`` is below 1, or the file cannot be
            resumed here.
    """
    _check_passes(passes)
    with _measuring(points, gpus) as (header, ready):
        ahead = estimate(points, path, passes, header, gpus)
        logger.info("%s", ahead)
        if ahead.remaining:
            measurer, *beside = ready()
            say_shared(header)
            begun = time.monotonic()
            timed = run_sweep(points, ahead.path, measurer, header, passes, seconds, beside=beside)
            left = ahead.remaining - timed
            logger.info("%s", f"{timed:,} timings in {time.monotonic() - begun:.0f} s, {left:,} left")
    return ahead.path


def say_shared(header: Header) -> None:
    """Warn where others use the GPU too."""
    if header.shared_with:
        logger.warning("This GPU is not ours alone: %s. Latencies may be too high.", header.shared_with)


@contextmanager
def _measuring(points: Sequence[Point], gpus: int) -> Iterator[tuple[Header, Callable[[], Sequence[Measurer]]]]:
    """The header, and what makes ready to measure: here, or in a process for each of several GPUs, which agree."""
    from gac.profiling.timing.measure import GpuMeasurer
    from gac.profiling.timing.remote import RemoteMeasurer

    if gpus == 1:
        own = fingerprint()
        yield own, lambda: [GpuMeasurer(own)]
        return
    _check_count(gpus)
    remote = [RemoteMeasurer(gpu) for gpu in range(gpus)]
    with ThreadPoolExecutor(gpus) as threads:
        try:
            header = one_header(list(threads.map(RemoteMeasurer.header, remote)))

            def ready() -> Sequence[Measurer]:
                list(threads.map(lambda one: one.prepare(header), remote))
                check_agree(points, remote)
                return remote

            yield header, ready
        finally:
            list(threads.map(RemoteMeasurer.close, remote))


def _check_passes(passes: int) -> None:
    if passes < 1:
        raise ProfileError(f"{passes} passes", "at least 1", f"Use {PASSES}, the default.")


def _check_count(gpus: int) -> None:
    import torch

    if gpus > torch.cuda.device_count():
        raise ProfileError(
            f"{gpus} GPUs where PyTorch sees {torch.cuda.device_count()}",
            "at most as many as there are",
            "Give --gpus a smaller number, or look at CUDA_VISIBLE_DEVICES.",
        )


def summary(profile: Profile) -> str:
    """What a profile holds and how reliable it is, in one line."""
    doubts = [f"the sentinels drifted by {profile.drift:.1%}"] if profile.drift > DRIFT else []
    doubts += [profile.header.shared_with] if profile.header.shared_with else []
    return (
        f"{len(profile.measurements):,} shapes of {profile.header.gpu}, {len(profile.failed):,} failed; "
        f"{profile.converged_fraction:.1%} converged, passes within {profile.spread:.1%} for 95 %, "
        f"drift {profile.drift:.1%}" + "".join(f"; DOUBTFUL: {doubt}" for doubt in doubts)
    )


def _launch_seconds(point: Point, rate: float) -> float:
    operator, axes = OPERATORS.get(point.operation.operator), point.operation.axes
    return max(operator.flops(axes) / rate, operator.bytes(axes, point.dtype) / _BYTES_PER_SECOND)
