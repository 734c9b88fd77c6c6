"""A measurer in a process of its own, on another GPU of this host."""

import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any, TypeVar

import torch

from gac.core.errors import ProfileError
from gac.profiling.records import DeviceLostError, Header, Launch, Measurement, Point
from gac.profiling.timing.device import fingerprint
from gac.profiling.timing.measure import GpuMeasurer

T = TypeVar("T")

_own: list[GpuMeasurer] = []
"""The measurer of such a process."""
_lost: list[DeviceLostError] = []
"""What has failed there; whatever is asked after that fails at the same point."""


class RemoteMeasurer:
    """Measures on the CUDA device of this number, in a process that lives until ``close``."""

    def __init__(self, gpu: int) -> None:
        self._gpu = gpu
        self._process = ProcessPoolExecutor(1, get_context("spawn"), _begin, (gpu,))

    def header(self) -> Header:
        """The fingerprint of the device; asked for before anything is measured.

        Raises:
            ProfileError: the driver does not answer, or the process has ended.
        """
        return self._ask(fingerprint)

    def prepare(self, header: Header) -> None:
        """Make ready to measure.

        Raises:
            ProfileError: the device has no room, does not run, or the process has ended.
        """
        self._ask(_prepare, header)

    def measure(self, point: Point, checked: bool = False) -> Measurement:
        """As ``GpuMeasurer`` does; raises ProfileError too, where the process has ended."""
        return self._ask(_measure, point, checked)

    def launches(self, points: Sequence[Point]) -> Sequence[tuple[Launch, ...]]:
        """As ``GpuMeasurer`` does; raises ProfileError too, where the process has ended."""
        return self._ask(_launches, points)

    def close(self) -> None:
        """End the process."""
        self._process.shutdown(cancel_futures=True)

    def _ask(self, work: Callable[..., T], *given: Any) -> T:
        try:
            return self._process.submit(work, *given).result()
        except BrokenProcessPool as failure:
            raise ProfileError(
                f"the process that measures GPU {self._gpu} has ended",
                "a process that goes on",
                "Run the same command again: the file keeps every timing.",
            ) from failure


def _begin(gpu: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the process that writes
    torch.cuda.set_device(gpu)


def _prepare(header: Header) -> None:
    _own.append(GpuMeasurer(header))
    _launches(())  # the first look at kernels loads what looks at them


def _measure(point: Point, checked: bool) -> Measurement:
    return _unless_lost(_own[0].measure, point, checked)


def _launches(points: Sequence[Point]) -> Sequence[tuple[Launch, ...]]:
    return _unless_lost(_own[0].launches, points)


def _unless_lost(act: Callable[..., T], *given: Any) -> T:
    if _lost:
        raise _lost[0]
    try:
        return act(*given)
    except DeviceLostError as lost:
        _lost.append(lost)
        raise
