"""The sweep that measures points into a file: shuffled, in interleaved passes, resumable, with checks for drift."""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Protocol, TypeVar

from gac.core.errors import ProfileError
from gac.profiling.operators import OPERATORS
from gac.profiling.records import DeviceLostError, Header, Launch, Measurement, Point
from gac.profiling.sweeps.journal import Journal

PASSES = 3

SENTINEL_SECONDS = 15.0
_SENTINELS = 3
_BATCH = 256
_BATCHES = 4
"""How many batches there are at least for each that asks one of several measurers: none waits long for the others."""
_ASKING = 2
"""Threads that ask each of several measurers: what one of them asks waits there while the other's is measured."""


class Measurer(Protocol):
    """What a sweep measures with; ``gac.profiling.timing.measure.GpuMeasurer`` is the real one."""

    def measure(self, point: Point, checked: bool = False) -> Measurement:
        """Time one point; a failing one is a row with an error.

        Args:
            checked: its result has been compared before, maybe on another GPU of the run.

        Raises:
            DeviceLostError: nothing more can be measured.
        """

    def launches(self, points: Sequence[Point]) -> Sequence[tuple[Launch, ...]]:
        """The kernels that each point launches.

        Raises:
            DeviceLostError: nothing more can be measured.
        """


Find = Callable[[Point], Measurement | None]
T = TypeVar("T")


def run_sweep(
    points: Sequence[Point],
    path: Path,
    measurer: Measurer,
    header: Header,
    passes: int = PASSES,
    seconds: float | None = None,
    progress: bool = True,
    beside: Sequence[Measurer] = (),
) -> int:
    """Time every point as often as the file does not hold it yet, and append each timing at once.

    Each pass goes through all points in an order of its own, shuffled with a fixed seed: drift does not look like a
    cliff, and a burst of noise hits different neighbours each time. Every 15 seconds, and at the end, three of the
    points are timed once more: they are the sentinels. An interrupt leaves a file that the next run resumes.

    Args:
        seconds: stop after about this long; the next run goes on.
        beside: measure at the same time, on GPUs of their own: each point is timed by whoever is free. Two threads then
            ask each measurer.

    Returns:
        how many timings were taken.

    Raises:
        ProfileError: the file is malformed, locked, not writable, or of another machine or other software; or the GPU
            failed (what it failed at is in the file, and left out by the next run).
    """
    from gac.core.progress import progress_bar

    until = inf if seconds is None else time.monotonic() + seconds
    with Journal(path, header) as journal:
        todo = [missing(points, journal.find, number) for number in range(passes)]
        with progress_bar("profile", "timing", sum(map(len, todo)), shown=progress) as bar:
            run = _Run(points, journal, (measurer, *beside), until, bar.update)
            try:
                for number, ahead in enumerate(todo):
                    run.through(ahead, traced=number == 0)
                if run.timed:
                    run.time_sentinels()
            except DeviceLostError as lost:
                journal.add_failure(lost.row)
                raise ProfileError(
                    f"the GPU failed at {lost.at}",
                    "a GPU that goes on",
                    f"Run the same command again: {path} keeps every timing, and this shape is marked and left out.",
                ) from lost
    return run.timed


def missing(points: Sequence[Point], find: Find, number: int) -> list[Point]:
    """The points that lack the pass of this number (from 0), in the pass's order; a failed point lacks none."""
    order = list(points)
    random.Random(number).shuffle(order)
    return [one for one in order if (row := find(one)) is None or (not row.error and len(row.passes) <= number)]


def sentinels_of(points: Sequence[Point]) -> list[Point]:
    """Three of the points, evenly spread when they are sorted from cheap to expensive."""

    def work(point: Point) -> tuple[int, int]:
        operator, axes = OPERATORS.get(point.operation.operator), point.operation.axes
        return operator.flops(axes), operator.bytes(axes, point.dtype)

    ordered = sorted(points, key=work)
    places = {(2 * number + 1) * len(ordered) // (2 * _SENTINELS) for number in range(_SENTINELS)}
    return [ordered[place] for place in sorted(places)] if ordered else []


class _Run:
    """One run of a sweep, which counts what it timed.

    Args:
        until: when to stop, on the monotonic clock.
        told: called after every timing.
    """

    def __init__(
        self,
        points: Sequence[Point],
        journal: Journal,
        measurers: Sequence[Measurer],
        until: float,
        told: Callable[[], object],
    ) -> None:
        self.timed = 0
        self._journal, self._measurers = journal, measurers
        self._until, self._told = until, told
        self._sentinels = sentinels_of(points)
        self._last = [time.monotonic()] * len(measurers)
        self._checked: set[Point] = set()
        self._alone = threading.Lock()
        self._stopped = False

    def through(self, points: Sequence[Point], traced: bool) -> None:
        """Time each of the points once.

        Args:
            traced: also look up their kernels, some hundreds at a time.
        """
        lanes = len(self._measurers)
        most = _BATCH if lanes == 1 else min(_BATCH, -(-len(points) // (_BATCHES * _ASKING * lanes)))
        size = max(most, 1) if traced else 1
        batches = iter([points[start : start + size] for start in range(0, len(points), size)])
        if lanes == 1:
            self._lane(batches, traced, 0)
            return
        with ThreadPoolExecutor(_ASKING * lanes) as threads:
            futures = [threads.submit(self._lane, batches, traced, lane) for lane in [*range(lanes)] * _ASKING]
            try:
                for future in as_completed(futures):
                    future.result()
            finally:
                self._stopped = not all(future.done() for future in futures)

    def time_sentinels(self) -> None:
        """Time those that the file holds a number of, with each measurer."""
        for lane in range(len(self._measurers)):
            self._time_sentinels(lane)

    def _lane(self, batches: Iterator[Sequence[Point]], traced: bool, lane: int) -> None:
        """Time batch after batch with one of the measurers, as long as there are any."""
        take = partial(next, batches, ())
        while batch := self._by_itself(take):
            launches = self._measurers[lane].launches(batch) if traced else [()] * len(batch)
            for point, launched in zip(batch, launches, strict=True):
                if self._stopped or time.monotonic() >= self._until:
                    return
                self._time_once(point, launched, lane)

    def _time_once(self, point: Point, launches: tuple[Launch, ...], lane: int) -> None:
        """Append one timing, and time the sentinels if 15 seconds have passed."""
        known = self._by_itself(partial(self._journal.find, point))
        if known is None or known.error is None:  # it may have failed in this run's first pass
            self._by_itself(partial(self._keep, self._measured(point, lane), launches))
        self._by_itself(self._count)
        if self._by_itself(partial(self._sentinels_due, lane)):
            self._time_sentinels(lane)

    def _measured(self, point: Point, lane: int) -> Measurement:
        row = self._measurers[lane].measure(point, point in self._checked)
        if row.error is None:
            self._checked.add(point)
        return row

    def _count(self) -> None:
        self.timed += 1
        self._told()

    def _keep(self, row: Measurement, launches: tuple[Launch, ...]) -> None:
        if self._journal.find(row.point) is None:
            self._journal.add(replace(row, launches=launches))
        elif row.median_ns is not None:
            self._journal.add_again(row.point, row.median_ns)

    def _sentinels_due(self, lane: int) -> bool:
        """Whether they are to be timed now; the others that ask this measurer are told that they are."""
        now = time.monotonic()
        due = now - self._last[lane] >= SENTINEL_SECONDS
        if due:
            self._last[lane] = now
        return due

    def _time_sentinels(self, lane: int) -> None:
        for point in self._sentinels:
            known = self._journal.find(point)
            if known is not None and known.error is None:
                median = self._measured(point, lane).median_ns
                if median is not None:
                    self._by_itself(partial(self._journal.add_sentinel, point, median))

    def _by_itself(self, act: Callable[[], T]) -> T:
        """One thread at a time."""
        with self._alone:
            return act()
