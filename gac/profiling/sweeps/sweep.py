"""The sweep that measures points into a file: shuffled, in interleaved passes, resumable, with checks for drift."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from gac.errors import ProfileError
from gac.profiling.operators import OPERATORS
from gac.profiling.records import DeviceLostError, Header, Launch, Measurement, Point
from gac.profiling.sweeps.journal import Journal

PASSES = 3

SENTINEL_SECONDS = 15.0
_SENTINELS = 3
_BATCH = 256


class Measurer(Protocol):
    """What a sweep measures with; ``gac.profiling.timing.measure.GpuMeasurer`` is the real one."""

    def measure(self, point: Point) -> Measurement:
        """Time one point; a failing one is a row with an error.

        Raises:
            DeviceLostError: nothing more can be measured.
        """

    def launches(self, points: Sequence[Point]) -> Sequence[tuple[Launch, ...]]:
        """The kernels that each point launches.

        Raises:
            DeviceLostError: nothing more can be measured.
        """


Find = Callable[[Point], Measurement | None]


def run_sweep(
    points: Sequence[Point],
    path: Path,
    measurer: Measurer,
    header: Header,
    passes: int = PASSES,
    seconds: float | None = None,
    progress: bool = True,
) -> int:
    """Time every point as often as the file does not hold it yet, and append each timing at once.

    Each pass goes through all points in an order of its own, shuffled with a fixed seed: drift does not look like a
    cliff, and a burst of noise hits different neighbours each time. Every 15 seconds, and at the end, three of the
    points are timed once more: they are the sentinels. An interrupt leaves a file that the next run resumes.

    Args:
        seconds: stop after about this long; the next run goes on.

    Returns:
        how many timings were taken.

    Raises:
        ProfileError: the file is malformed, locked, not writable, or of another machine or other software; or the GPU
            failed (what it failed at is in the file, and left out by the next run).
    """
    from gac.progress import progress_bar

    begun = time.monotonic()
    with Journal(path, header) as journal:
        todo = [missing(points, journal.find, number) for number in range(passes)]
        with progress_bar("profile", "timing", sum(map(len, todo)), shown=progress) as bar:
            run = _Run(points, journal, measurer)
            try:
                for point, launches in _in_order(todo, measurer):
                    if seconds is not None and time.monotonic() - begun >= seconds:
                        break
                    run.time_once(point, launches)
                    bar.update()
                if run.timed:
                    run.time_sentinels()
            except DeviceLostError as lost:
                journal.add_failure(lost.row)
                axes = " ".join(f"{axis}={size}" for axis, size in lost.row.shape.items())
                raise ProfileError(
                    f"the GPU failed at {lost.row.operator} {lost.row.dtype} {axes}: {lost.row.error}",
                    "a GPU that goes on",
                    f"Run the same command again: {path} keeps every timing, and this shape is marked and left out.",
                ) from lost
    return run.timed


def missing(points: Sequence[Point], find: Find, number: int) -> list[Point]:
    """The points that lack the pass of this number (from 0), in the pass's order; a failed point lacks none."""
    order = list(points)
    random.Random(number).shuffle(order)
    return [one for one in order if (row := find(one)) is None or (not row.error and len(row.passes) <= number)]


def _in_order(todo: Sequence[list[Point]], measurer: Measurer) -> Iterator[tuple[Point, tuple[Launch, ...]]]:
    """Every point of every pass; in the first one with its kernels, which are looked up some hundreds at a time."""
    for start in range(0, len(todo[0]), _BATCH):
        batch = todo[0][start : start + _BATCH]
        yield from zip(batch, measurer.launches(batch), strict=True)
    for later in todo[1:]:
        yield from ((point, ()) for point in later)


class _Run:
    """One run of a sweep, which counts what it timed.

    Three points, from cheap to expensive, are its sentinels: they are timed again and again.
    """

    def __init__(self, points: Sequence[Point], journal: Journal, measurer: Measurer) -> None:
        self.timed = 0
        self._journal = journal
        self._measurer = measurer
        self._sentinels = _spread(points)
        self._last = time.monotonic()

    def time_once(self, point: Point, launches: tuple[Launch, ...]) -> None:
        """Append one timing, and time the sentinels if 15 seconds have passed."""
        self.timed += 1
        known = self._journal.find(point)
        if known is not None and known.error:
            return  # it failed in this run's first pass
        row = self._measurer.measure(point)
        if known is None:
            self._journal.add(replace(row, launches=launches))
        elif row.median_ns is not None:
            self._journal.add_again(point, row.median_ns)
        if time.monotonic() - self._last >= SENTINEL_SECONDS:
            self.time_sentinels()

    def time_sentinels(self) -> None:
        """Time those that the file holds a number of."""
        for point in self._sentinels:
            known = self._journal.find(point)
            if known is not None and known.error is None:
                median = self._measurer.measure(point).median_ns
                if median is not None:
                    self._journal.add_sentinel(point, median)
        self._last = time.monotonic()


def _spread(points: Sequence[Point]) -> list[Point]:
    """Some of the points, evenly spread when they are sorted by their operations."""
    ordered = sorted(points, key=lambda one: OPERATORS.get(one.operation.operator).flops(one.operation.axes))
    places = {(2 * number + 1) * len(ordered) // (2 * _SENTINELS) for number in range(_SENTINELS)}
    return [ordered[place] for place in sorted(places)] if ordered else []
