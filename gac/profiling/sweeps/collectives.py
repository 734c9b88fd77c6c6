"""Collectives: which to time, and how the processes that torchrun has started time them together.

Rank 0 runs the sweep and writes. Whatever it times it tells the others first, and they time it too.
"""

import logging
import platform
from collections.abc import Sequence
from itertools import count, takewhile
from pathlib import Path

from msgspec.structs import replace

from gac.core.distributed.ranks import Ranks
from gac.core.distributed.run import on_every_rank, this_run
from gac.core.errors import ProfileError
from gac.core.workloads import Workload
from gac.profiling.operators import operation
from gac.profiling.records import DeviceLostError, Header, Launch, Measurement, Point
from gac.profiling.sweeps.coverage import WORKLOADS, check_dtype
from gac.profiling.sweeps.profiler import Estimate, estimate, say_shared
from gac.profiling.sweeps.several import one_header
from gac.profiling.sweeps.sweep import PASSES, Measurer, run_sweep
from gac.profiling.timing.device import fingerprint, link_between, uuid
from gac.profiling.timing.measure import GpuMeasurer

logger = logging.getLogger("gac")

WIDEST = 32768
"""The most columns: what pairs of the largest models' layers gather together."""

_NARROWEST = 8


def collective_points(gpus: int, workloads: Sequence[Workload] = WORKLOADS, dtype: str = "bf16") -> tuple[Point, ...]:
    """All-reduces, all-gathers and reduce-scatters of as many rows as each workload has.

    Columns go from 8 (of each GPU, where they are divided) to 32,768, in steps of a third to a half.

    Raises:
        ProfileError: the dtype is neither ``bf16`` nor ``fp16``.
    """
    check_dtype(dtype)
    rows = sorted({workload.rows for workload in workloads})
    shapes = [
        operation(name, gpus=gpus, m=m, n=n)
        for m in rows
        for name, least in (("all_reduce", 1), ("all_gather", gpus), ("reduce_scatter", gpus))
        for n in _columns(least)
    ]
    return tuple(Point(one, dtype) for one in shapes)


def _columns(least: int) -> list[int]:
    """Multiples of so many, the last at or above the widest."""
    steps = (step * 2**doubled for doubled in count() for step in (2, 3))
    found = [*takewhile(lambda n: n < WIDEST, (step * least * _NARROWEST // 2 for step in steps))]
    return [*found, -(-WIDEST // least) * least]


@on_every_rank
def estimate_collectives(points: Sequence[Point], path: str | Path | None = None, passes: int = PASSES) -> Estimate:
    """What ``profile_collectives`` with the same arguments would have to do; raises as that."""
    ranks = this_run()
    header = _header(ranks)
    return ranks.once(lambda: estimate(points, path, passes, header))


@on_every_rank
def profile_collectives(
    points: Sequence[Point], path: str | Path | None = None, passes: int = PASSES, seconds: float | None = None
) -> Path:
    """Measure collectives of the GPUs of these processes, or go on where an earlier run stopped.

    Args:
        points: of ``collective_points`` for as many GPUs as there are processes.
        path: the file, of these GPUs' first; it may hold other operators. By default that GPU's own.
        passes: how often to time every point.
        seconds: stop after about this long; the next call goes on.

    Raises:
        ProfileError: there is one process, or they are not on GPUs of one kind and host; or as ``profile_gpu``.
    """
    ranks = this_run()
    header = _header(ranks)
    ahead = ranks.once(lambda: estimate(points, path, passes, header))
    if ahead.remaining:
        logger.info("%s", ahead)
        say_shared(header)
        time_together(points, ahead.path, GpuMeasurer(header, ranks), header, ranks, passes, seconds)
    return ahead.path


def time_together(
    points: Sequence[Point],
    path: Path,
    own: Measurer,
    header: Header,
    ranks: Ranks,
    passes: int = PASSES,
    seconds: float | None = None,
) -> None:
    """Rank 0 sweeps over the points, and the others measure what it does, until it has come to its end.

    Raises:
        ProfileError: a GPU has failed; or, on rank 0, as ``run_sweep``.
    """
    everybody = Lockstep(own, ranks)
    if ranks.leads:
        run_sweep(points, path, everybody, header, passes, seconds)
        everybody.release()
    else:
        everybody.follow()


class Lockstep:
    """The measurer of a sweep on rank 0, which all processes measure with.

    Args:
        own: of this process.
    """

    def __init__(self, own: Measurer, ranks: Ranks) -> None:
        self._own, self._ranks = own, ranks

    def measure(self, point: Point, checked: bool = False) -> Measurement:
        """Let all time a point."""
        self._ranks.once(lambda: (point, checked))
        return self._own.measure(point, checked)

    def launches(self, points: Sequence[Point]) -> Sequence[tuple[Launch, ...]]:
        """None are looked up: that runs a collective outside of what all agree on."""
        return [()] * len(points)

    def follow(self) -> None:
        """Measure what rank 0 says, until it says no more.

        Raises:
            ProfileError: this GPU has failed.
        """
        while (asked := self._ranks.once(_nothing)) is not None:
            try:
                self._own.measure(*asked)
            except DeviceLostError as lost:
                raise ProfileError(
                    f"GPU {self._ranks.own} failed at {lost.at}",
                    "GPUs that go on",
                    "Run the same command again: the file keeps every timing.",
                ) from lost

    def release(self) -> None:
        """Let the others go."""
        self._ranks.once(_nothing)


def _nothing() -> tuple[Point, bool] | None:
    return None


def _header(ranks: Ranks) -> Header:
    """Of all GPUs, with the link between them.

    Raises:
        ProfileError: there is one, or they are of several hosts or kinds.
    """
    hosts = ranks.gathered(platform.node())
    if ranks.count == 1 or len({*hosts}) > 1:
        raise ProfileError(
            f"collectives of {ranks.count} process{'es' if ranks.count > 1 else ''} on {len({*hosts})} host"
            f"{'s' if len({*hosts}) > 1 else ''}",
            "several processes on one host, each with a GPU",
            "Run torchrun --nproc-per-node 2 -m gac profile --collectives, with as many processes as GPUs.",
        )
    found = one_header(ranks.gathered(fingerprint()))
    uuids = ranks.gathered(uuid())
    return replace(found, link=ranks.once(lambda: link_between(uuids)))
