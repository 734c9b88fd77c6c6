"""Several equal GPUs of one host that measure one table, each from a process of its own."""

import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from math import inf
from multiprocessing import get_context
from typing import Any, TypeVar

import torch
from msgspec.structs import replace

from gac.core.errors import ProfileError
from gac.profiling.records import DeviceLostError, Header, Launch, Measurement, Point
from gac.profiling.sweeps.sweep import Measurer, sentinels_of
from gac.profiling.timing.device import fingerprint
from gac.profiling.timing.measure import GpuMeasurer

T = TypeVar("T")

TOLERANCE = 0.03  # largest relative slowdown of one GPU against another, beyond the noise of its own timings
TIMINGS = 5

_MAY_DIFFER = frozenset({"device", "shared_with", "date", "others", "memory_bytes"})

_measurer: list[GpuMeasurer] = []  # the measurer of a process that measures for another one


class RemoteMeasurer:
    """Measure on the CUDA device of this number, in a process of its own; ProfileError where that has ended."""

    def __init__(self, gpu: int) -> None:
        self._gpu = gpu
        self.process = ProcessPoolExecutor(1, get_context("spawn"), _begin, (gpu,))

    def measure(self, point: Point, checked: bool = False) -> Measurement:
        return self.call(_measure, point, checked)

    def launches(self, points: Sequence[Point]) -> Sequence[tuple[Launch, ...]]:
        return self.call(_launches, points)

    def call(self, work: Callable[..., T], *args: Any) -> T:
        try:
            return self.process.submit(work, *args).result()
        except BrokenProcessPool as failure:
            problem, remedy = f"the process that measures GPU {self._gpu} has ended", "Run the same command again"
            raise ProfileError(problem, "a running process", f"{remedy}: the file keeps every timing.") from failure


def _begin(gpu: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the process that writes
    torch.cuda.set_device(gpu)


def _prepare(header: Header) -> None:
    _measurer.append(GpuMeasurer(header))
    _launches(())  # loads the tracer


def _measure(point: Point, checked: bool) -> Measurement:
    return _measurer[0].measure(point, checked)


def _launches(points: Sequence[Point]) -> Sequence[tuple[Launch, ...]]:
    return _measurer[0].launches(points)


@contextmanager
def measurers_on(gpus: int, points: Sequence[Point]) -> Iterator[tuple[Header, Callable[[], Sequence[Measurer]]]]:
    """Yield the header of the first GPUs of this host, and a function that makes their measurers ready.

    One GPU is measured in this process, several in a process each. ProfileError where there are fewer, they differ, one
    failed, or the driver does not answer.
    """
    if gpus == 1:
        header = fingerprint()
        yield header, lambda: [GpuMeasurer(header)]
        return
    if gpus > torch.cuda.device_count():
        problem, remedy = f"{gpus} GPUs where PyTorch sees {torch.cuda.device_count()}", "Give --gpus a smaller number"
        raise ProfileError(problem, "at most as many as there are", f"{remedy}, or look at CUDA_VISIBLE_DEVICES.")
    remote = [RemoteMeasurer(gpu) for gpu in range(gpus)]
    with ThreadPoolExecutor(gpus) as threads:
        try:
            common = common_header(list(threads.map(lambda measurer: measurer.call(fingerprint), remote)))

            def ready() -> Sequence[Measurer]:
                list(threads.map(lambda measurer: measurer.call(_prepare, common), remote))
                check_agree(points, remote)
                return remote

            yield common, ready
        finally:
            for measurer in remote:
                measurer.process.shutdown(cancel_futures=True)


def common_header(headers: Sequence[Header]) -> Header:
    first, *others = headers
    for number, other in enumerate(others, 1):
        for name in sorted({*Header.__struct_fields__} - _MAY_DIFFER):
            if (expected := getattr(first, name)) != (actual := getattr(other, name)):
                raise ProfileError(
                    f"GPU {number} has {name} {actual!r}, where GPU 0 has {expected!r}",
                    "GPUs of one kind with equal settings",
                    "Choose GPUs with CUDA_VISIBLE_DEVICES, or measure each into a file of its own.",
                )
    users = [f"GPU {number}: {header.shared_with}" for number, header in enumerate(headers) if header.shared_with]
    return replace(first, others=tuple(sorted(header.device for header in others)), shared_with="; ".join(users))


def check_agree(points: Sequence[Point], measurers: Sequence[Measurer]) -> None:
    """Time the sentinels of these points on every GPU at once, five times each.

    ProfileError where a GPU has failed, or its fastest timing is over 3 % slower than the slowest of another.
    """
    with ThreadPoolExecutor(len(measurers)) as threads:
        for point in sentinels_of(points):
            timings = list(threads.map(partial(_timings, point), measurers))
            slow = max(range(len(timings)), key=lambda gpu: min(timings[gpu], default=0.0))
            fast = min(range(len(timings)), key=lambda gpu: max(timings[gpu], default=inf))
            if all(timings) and (slowdown := min(timings[slow]) / max(timings[fast]) - 1) > TOLERANCE:
                raise ProfileError(
                    f"GPU {slow} takes {slowdown:.1%} longer than GPU {fast} for {point}",
                    f"GPUs that differ by at most {TOLERANCE:.0%} and the noise of their timings",
                    "Look at nvidia-smi: clocks, power limits, other users. CUDA_VISIBLE_DEVICES leaves a GPU out.",
                )


def _timings(point: Point, measurer: Measurer) -> list[float]:
    """Return medians in ns; none where the point fails, as it will in the sweep."""
    try:
        rows = [measurer.measure(point)]
        if rows[0].error is None:
            rows += [measurer.measure(point, checked=True) for _ in range(1, TIMINGS)]
    except DeviceLostError as lost:
        raise ProfileError(f"a GPU failed at {lost}", "GPUs that work", "Look at nvidia-smi.") from lost
    return [row.median_ns for row in rows if row.median_ns is not None]
