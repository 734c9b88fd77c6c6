"""Collectives: which to time, and how the processes that torchrun has started time them at once.

Rank 0 drives the sweep and broadcasts each point before timing it.
"""

import logging
import platform
from collections.abc import Sequence
from itertools import count, takewhile
from pathlib import Path

from msgspec.structs import replace

from gac.core.distributed.ranks import Ranks
from gac.core.distributed.run import this_run
from gac.core.errors import ProfileError
from gac.core.workloads import Workload
from gac.models.threads import entry_point
from gac.profiling.operators import operation
from gac.profiling.records import DeviceLostError, Header, Launch, Measurement, Point
from gac.profiling.sweeps.coverage import WORKLOADS, check_dtype
from gac.profiling.sweeps.multi_gpu import common_header
from gac.profiling.sweeps.profiler import Estimate, estimate, warn_if_shared
from gac.profiling.sweeps.sweep import PASSES, Measurer, run_sweep
from gac.profiling.timing.device import fingerprint, link_between, uuid
from gac.profiling.timing.measure import GpuMeasurer

logger = logging.getLogger("gac")

WIDEST = 32768  # the most columns: those that pairs of the largest models' layers gather in one go

_NARROWEST = 8


def collective_points(gpus: int, workloads: Sequence[Workload] = WORKLOADS, dtype: str = "bf16") -> tuple[Point, ...]:
    """List all-reduces, all-gathers and reduce-scatters with the rows of each workload.

    Columns go from 8 (of each GPU, where they are divided) to 32,768, in steps of a third to a half.
    """
    check_dtype(dtype)
    return tuple(
        Point(operation(name, gpus=gpus, m=m, n=n), dtype)
        for m in sorted({workload.rows for workload in workloads})
        for name, step in (("all_reduce", 1), ("all_gather", gpus), ("reduce_scatter", gpus))
        for n in _columns(step)
    )


def _columns(step: int) -> list[int]:
    halves = (factor * 2**doubled for doubled in count() for factor in (2, 3))
    narrower = takewhile(lambda n: n < WIDEST, (factor * step * _NARROWEST // 2 for factor in halves))
    return [*narrower, -(-WIDEST // step) * step]


@entry_point(every_rank=True)
def estimate_collectives(points: Sequence[Point], path: str | Path | None = None, passes: int = PASSES) -> Estimate:
    """Estimate the work of ``profile_collectives`` with the same arguments; raises the same errors."""
    return _estimate(points, path, passes)


@entry_point(every_rank=True)
def profile_collectives(
    points: Sequence[Point], path: str | Path | None = None, passes: int = PASSES, seconds: float | None = None
) -> Path:
    """Measure collectives of the GPUs of these processes, or go on where an earlier run stopped, as ``profile_gpu``.

    Points are those of ``collective_points`` for as many GPUs as there are processes. The file may hold other
    operators; by default it is that of the first GPU.

    Raises:
        ProfileError: there is one process, or they are not on GPUs of one kind and host; or as ``profile_gpu``.
    """
    ahead, ranks = _estimate(points, path, passes), this_run()
    if ahead.remaining:
        logger.info("%s", ahead)
        warn_if_shared(ahead.header)
        time_in_lockstep(points, ahead.path, GpuMeasurer(ahead.header, ranks), ahead.header, ranks, passes, seconds)
    return ahead.path


def time_in_lockstep(
    points: Sequence[Point],
    path: Path,
    measurer: Measurer,
    header: Header,
    ranks: Ranks,
    passes: int = PASSES,
    seconds: float | None = None,
) -> None:
    if ranks.leads:
        run_sweep(points, path, Lockstep(measurer, ranks), header, passes, seconds)
        ranks.once(lambda: None)  # the end
        return
    while (broadcast := ranks.once(lambda: None)) is not None:
        try:
            measurer.measure(*broadcast)
        except DeviceLostError as lost:
            remedy = "Run the same command again: the file keeps every timing."
            raise ProfileError(f"GPU {ranks.rank} failed at {lost}", "GPUs that work", remedy) from lost


class Lockstep:
    """The measurer of a sweep on rank 0, with which all processes measure."""

    def __init__(self, measurer: Measurer, ranks: Ranks) -> None:
        self._measurer, self._ranks = measurer, ranks

    def measure(self, point: Point, checked: bool = False) -> Measurement:
        self._ranks.once(lambda: (point, checked))
        return self._measurer.measure(point, checked)

    def launches(self, points: Sequence[Point]) -> Sequence[tuple[Launch, ...]]:
        """Look up none: that would run a collective on this rank alone."""
        return [()] * len(points)


def _estimate(points: Sequence[Point], path: str | Path | None, passes: int) -> Estimate:
    ranks = this_run()
    hosts = len({*ranks.gathered(platform.node())})
    if ranks.count == 1 or hosts > 1:
        processes, words = f"process{'es' if ranks.count > 1 else ''}", f"host{'s' if hosts > 1 else ''}"
        raise ProfileError(
            f"collectives of {ranks.count} {processes} on {hosts} {words}",
            "several processes on one host, each with a GPU",
            "Run torchrun --nproc-per-node 2 -m gac profile --collectives, with as many processes as GPUs.",
        )
    header = common_header(ranks.gathered(fingerprint()))
    uuids = ranks.gathered(uuid())
    header = replace(header, link=ranks.once(lambda: link_between(uuids)))
    return ranks.once(lambda: estimate(points, path, passes, header))
