"""The sweep that measures points into a file: shuffled, in interleaved passes, resumable, with checks for drift."""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import InitVar, dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Protocol

from gac.core.errors import ProfileError
from gac.profiling.operators import work_of
from gac.profiling.records import DeviceLostError, Header, Launch, Measurement, Point
from gac.profiling.sweeps.journal import Journal

PASSES = 3

SENTINEL_SECONDS = 15.0
_SENTINELS = 3
_BATCH = 256
_BATCHES_EACH = 8  # batches of each of several measurers, at least: none waits long for the others


class Measurer(Protocol):
    """The device of a sweep; ``gac.profiling.timing.measure.GpuMeasurer`` is the real one."""

    def measure(self, point: Point, checked: bool = False) -> Measurement:
        """Time one point; a failing one is a row with an error. DeviceLostError: nothing more can be measured.

        ``checked``: its result has been compared before, maybe on another GPU of the run.
        """

    def launches(self, points: Sequence[Point]) -> Sequence[tuple[Launch, ...]]:
        """Return the kernels that each point launches; raises as ``measure``."""


def run_sweep(
    points: Sequence[Point],
    path: Path,
    measurers: Measurer | Sequence[Measurer],
    header: Header,
    passes: int = PASSES,
    seconds: float | None = None,
    progress: bool = True,
) -> int:
    """Time every point as often as the file does not hold it yet, and append each timing at once.

    Each pass goes through all points in another order, shuffled with a fixed seed: drift does not look like a cliff,
    and a burst of noise hits different neighbours each time. Every 15 seconds, and at the end, three of the points are
    timed once more: they are the sentinels. An interrupt leaves a file that the next run resumes.

    Of several ``measurers`` the next free one times a point. ``seconds``: stop after about this long. Returns the
    number of timings taken.

    Raises:
        ProfileError: the file is malformed, locked, not writable, or of another machine or other software; or the GPU
            failed (the file marks the point, and the next run leaves it out).
    """
    from gac.core.progress import progress_bar

    until = inf if seconds is None else time.monotonic() + seconds
    devices = measurers if isinstance(measurers, Sequence) else [measurers]
    with Journal(path, header) as journal:
        todo = [missing(points, journal.find, number) for number in range(passes)]
        with progress_bar("profile", "timing", sum(map(len, todo)), shown=progress) as bar:
            run = _Run(points, journal, devices, until, bar.update)
            try:
                for number, ahead in enumerate(todo):
                    run.measure(ahead, traced=number == 0)
                if run.timed:
                    run.time_sentinels(range(len(devices)))
            except DeviceLostError as lost:
                journal.add_failure(lost.row)
                raise ProfileError(
                    f"the GPU failed at {lost}",
                    "a GPU that works",
                    f"Run the same command again: {path} keeps every timing, and this shape is marked and left out.",
                ) from lost
    return run.timed


def missing(points: Sequence[Point], find: Callable[[Point], Measurement | None], number: int) -> list[Point]:
    """List the points that lack the pass of this number (from 0), in the pass's order; a failed point lacks none."""
    order = list(points)
    random.Random(number).shuffle(order)
    return [point for point in order if (row := find(point)) is None or (not row.error and len(row.passes) <= number)]


def sentinels_of(points: Sequence[Point]) -> list[Point]:
    ordered = sorted(points, key=lambda point: work_of(point.operation, point.dtype))
    chosen = {(2 * number + 1) * len(ordered) // (2 * _SENTINELS) for number in range(_SENTINELS)}
    return [ordered[index] for index in sorted(chosen)] if ordered else []


@dataclass
class _Run:
    """One run of a sweep, with a thread for each of several measurers; ``until`` is on the monotonic clock."""

    points: InitVar[Sequence[Point]]
    journal: Journal
    measurers: Sequence[Measurer]
    until: float
    tick: Callable[[], object]
    timed: int = 0
    stopped: bool = False
    checked: set[Point] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self, points: Sequence[Point]) -> None:
        self.sentinels = sentinels_of(points)
        self.last_sentinels = [time.monotonic()] * len(self.measurers)

    def measure(self, points: Sequence[Point], traced: bool) -> None:
        """Time each of the points once; ``traced``: also look up their kernels, some hundreds at a time."""
        count = len(self.measurers)
        largest = _BATCH if count == 1 else min(_BATCH, -(-len(points) // (_BATCHES_EACH * count)))
        size = max(largest, 1) if traced else 1
        batches = iter([points[start : start + size] for start in range(0, len(points), size)])
        if count == 1:
            self._measure_batches(batches, traced, 0)
            return
        with ThreadPoolExecutor(count) as threads:
            futures = [threads.submit(self._measure_batches, batches, traced, gpu) for gpu in range(count)]
            try:
                for future in as_completed(futures):
                    future.result()
            finally:
                self.stopped = not all(future.done() for future in futures)

    def _measure_batches(self, batches: Iterator[Sequence[Point]], traced: bool, gpu: int) -> None:
        while batch := next(batches, ()):  # next() of a list's iterator is atomic
            launches = self.measurers[gpu].launches(batch) if traced else [()] * len(batch)
            for point, launched in zip(batch, launches, strict=True):
                if self.stopped or time.monotonic() >= self.until:
                    return
                self._time(point, launched, gpu)
                if time.monotonic() - self.last_sentinels[gpu] >= SENTINEL_SECONDS:
                    self.time_sentinels([gpu])

    def _time(self, point: Point, launches: tuple[Launch, ...], gpu: int) -> None:
        known = self.journal.find(point)
        row = self._measured(point, gpu) if known is None or known.error is None else None  # failed in the first pass
        with self.lock:
            if row is not None and known is None:
                self.journal.add(replace(row, launches=launches))
            elif row is not None and row.median_ns is not None:
                self.journal.add_again(point, row.median_ns)
            self.timed += 1
            self.tick()

    def _measured(self, point: Point, gpu: int) -> Measurement:
        row = self.measurers[gpu].measure(point, point in self.checked)
        if row.error is None:
            self.checked.add(point)
        return row

    def time_sentinels(self, gpus: Sequence[int]) -> None:
        for gpu in gpus:
            for point in self.sentinels:
                known = self.journal.find(point)
                if known is not None and known.error is None:
                    median = self._measured(point, gpu).median_ns
                    if median is not None:
                        with self.lock:
                            self.journal.add_sentinel(point, median)
            self.last_sentinels[gpu] = time.monotonic()
