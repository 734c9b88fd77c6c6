"""Rows and timings as columns of numbers, checked thousands at a time; what is wrong is named by its line."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from gac.arrays import Floats, Ints
from gac.errors import UNSAFE
from gac.profiling.lines import KERNEL, ROW, Lines, WrongError, decode_launches, malformed
from gac.profiling.records import DTYPE_NAMES

LARGEST = 2**50
SHOWN = 40
_MOST_AXES = 16
_SHORTEST_NS, _LONGEST_NS = 1e-3, 1e15
Launches = tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True)
class Place:
    """Where lines are in the file: how many lines are above the first, and how many rows and kernels above each."""

    source: str | Path
    before: int
    rows_above: Ints
    kernels_above: Ints

    @classmethod
    def of(cls, lines: Lines, source: str | Path, before: int, rows: int, kernels: int) -> "Place":
        """With so many lines, rows and kernels before these."""
        is_row, is_kernel = lines.kinds == ROW, lines.kinds == KERNEL
        return cls(source, before, rows + np.cumsum(is_row) - is_row, kernels + np.cumsum(is_kernel) - is_kernel)

    def refuse(self, places: Ints, wrong: Any, message: Callable[[int], str]) -> None:
        """Name the first line that is wrong.

        Args:
            places: which of the lines are looked at.
            wrong: one bool for each.
            message: by number among them, what is wrong.
        """
        found = np.flatnonzero(wrong)
        if len(found):
            at = int(found[0])
            raise malformed(f"{self.where(int(places[at]))}: {message(at)}")

    def where(self, place: int) -> str:
        return f"{self.source}:{self.before + place + 1}"


class _Numbering(dict[Any, int]):
    """Numbers what it is asked for, in the order in which it is first."""

    def __missing__(self, key: Any) -> int:
        self[key] = number = len(self)
        return number

    def of(self, keys: Iterable[Any], places: Ints) -> tuple[Ints, list[Any], Ints]:
        """The numbers of keys, which are in lines ``places``; those that are new, and the line where each is first."""
        known = len(self)
        numbers = np.fromiter(map(self.__getitem__, keys), np.int64, len(places))
        new = list(islice(self, known, None))
        if not new:
            return numbers, new, places[:0]
        return numbers, new, places[np.unique(numbers, return_index=True)[1][-len(new) :]]


@dataclass
class RowColumns:
    """Rows as they are read; the arrays of ``Rows``, and the line of each row, some thousand rows at a time.

    Launches of the same text are read once: ``meant`` has the number in ``launches`` of each of ``texts``.
    """

    axes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    kinds: _Numbering = field(default_factory=_Numbering)
    texts: _Numbering = field(default_factory=_Numbering)
    meant: list[Ints] = field(default_factory=lambda: [np.empty(0, dtype=np.int64)])
    launches: _Numbering = field(default_factory=_Numbering)
    errors: dict[int, str] = field(default_factory=dict)
    chunks: list[tuple[Any, ...]] = field(default_factory=list)
    count: int = 0

    def take(self, rows: Sequence[Any], places: Ints, place: Place) -> None:
        """Check rows, which are lines ``places``, and keep them."""
        ns, spread = _times(rows, places, place)
        failed = np.flatnonzero(np.isnan(ns)).tolist()
        self.chunks.append(
            (
                self._kind(rows, places, place),
                _sizes(rows, places, place),
                ns,
                spread,
                *_counts(rows, places, place),
                np.array([row.converged for row in rows]),
                self._launched(rows, places, place),
                place.before + places + 1,
            )
        )
        self.errors |= {self.count + at: rows[at].error for at in failed}
        self.count += len(rows)

    def joined(self) -> list[Any]:
        """The columns end to end; narrower sizes are filled up with 0."""
        whole, real = np.int64, np.float64
        most = max((chunk[1].shape[1] for chunk in self.chunks), default=0)
        none: tuple[Any, ...] = tuple(
            np.empty((0, most) if number == 1 else 0, dtype=dtype)
            for number, dtype in enumerate((whole, whole, real, real, whole, whole, np.bool_, whole, whole))
        )
        wide = [(one[0], _widened(one[1], most), *one[2:]) for one in self.chunks]
        columns = [np.concatenate(parts) for parts in zip(none, *wide, strict=True)]
        columns[7] = np.concatenate(self.meant)[columns[7]]
        return columns

    def _kind(self, rows: Sequence[Any], places: Ints, place: Place) -> Ints:
        groups = [(row.operator, row.dtype, row.cache, tuple(row.shape)) for row in rows]
        numbers, new, first = self.kinds.of(groups, places)
        for (operator, dtype, _, axes), line in zip(new, first.tolist(), strict=True):
            if len(axes) > _MOST_AXES:  # each makes every row of the file wider
                raise malformed(f"{place.where(line)}: shape: {len(axes):,} axes")
            known = self.axes.setdefault(operator, axes)
            if known != axes:
                given = f"shape: {operator} has axes {', '.join(axes)}, above {', '.join(known)}"
                raise malformed(f"{place.where(line)}: {given}")
            if dtype not in DTYPE_NAMES:
                raise malformed(f"{place.where(line)}: dtype: {dtype[:SHOWN]!r}")
            if any(map(UNSAFE.search, (operator, *axes))):
                raise WrongError
        return numbers

    def _launched(self, rows: Sequence[Any], places: Ints, place: Place) -> Ints:
        numbers, new, first = self.texts.of([bytes(row.launches) for row in rows], places)
        if new:
            launches = decode_launches(new)
            _check_launches(launches, first, place)
            self.meant.append(self.launches.of(launches, first)[0])
        return numbers


def _widened(sizes: Ints, most: int) -> Ints:
    missing = most - sizes.shape[1]
    return np.pad(sizes, ((0, 0), (0, missing))) if missing else sizes


def _check_launches(launches: Sequence[Launches], places: Ints, place: Place) -> None:
    counts = np.fromiter(map(len, launches), np.int64, len(launches))
    each = np.fromiter(chain.from_iterable(chain.from_iterable(launches)), np.int64).reshape(-1, 4)
    of = np.repeat(places, counts)
    kernel, grid, above = each[:, 0], each[:, 1:], place.kernels_above[of]
    place.refuse(
        of, (kernel < 0) | (kernel >= above), lambda at: f"launches: kernel {kernel[at]} of {above[at]} above it"
    )
    wrong = ((grid < 1) | (grid > LARGEST)).any(axis=1)
    place.refuse(of, wrong, lambda at: f"launches: a grid of {grid[at].tolist()}")


def _sizes(rows: Sequence[Any], places: Ints, place: Place) -> Ints:
    shapes = [row.shape for row in rows]
    counts = np.fromiter(map(len, shapes), np.int64, len(shapes))
    sizes = np.ones((len(shapes), counts.max()), dtype=np.int64)
    real = np.arange(sizes.shape[1]) < counts[:, None]
    sizes[real] = np.fromiter(chain.from_iterable(map(dict.values, shapes)), np.int64, counts.sum())
    wrong = ((sizes < 1) | (sizes > LARGEST)).any(axis=1)
    place.refuse(places, wrong, lambda at: f"shape: {shapes[at]} has a size below 1 or above 2**50")
    sizes[~real] = 0
    return sizes


def _times(rows: Sequence[Any], places: Ints, place: Place) -> tuple[Floats, Floats]:
    """Median and IQR in ns; NaN where there is an error instead."""
    ns = np.array([row.median_ns for row in rows], dtype=np.float64)
    spread = np.array([row.iqr_ns for row in rows], dtype=np.float64)
    failed = np.array([row.error is not None for row in rows])

    def given(at: int) -> str:
        row = rows[at]
        return f"median_ns: {row.median_ns} with iqr_ns {row.iqr_ns}"

    wrong = (np.isnan(ns) != failed) | (np.isnan(ns) != np.isnan(spread))
    place.refuse(places, wrong, lambda at: f"{given(at)} and error {rows[at].error!r}")
    place.refuse(places, ~failed & ~(_are_times(ns) & (spread >= 0) & (spread <= _LONGEST_NS)), given)
    return ns, spread


def _are_times(ns: Floats) -> Any:
    """From a picosecond to some days."""
    return (ns >= _SHORTEST_NS) & (ns <= _LONGEST_NS)


def _counts(rows: Sequence[Any], places: Ints, place: Place) -> tuple[Ints, Ints]:
    """Samples, and clocks in MHz; 0 where one is not known."""
    samples = np.array([row.samples for row in rows], dtype=np.float64)
    mhz = np.array([row.sm_clock_mhz for row in rows], dtype=np.float64)
    wrong = (samples < 0) | (samples > LARGEST) | (mhz < 1) | (mhz > LARGEST)
    place.refuse(places, wrong, lambda at: f"samples {rows[at].samples} at sm_clock_mhz {rows[at].sm_clock_mhz}")
    return samples.astype(np.int64), np.nan_to_num(mhz).astype(np.int64)


@dataclass
class Timings:
    """Rows that were timed again: passes, or timings of sentinels. Rows, ns and line numbers, a chunk at a time."""

    chunks: list[tuple[Ints, Floats, Ints]] = field(default_factory=list)

    def take(self, timings: Sequence[Any], places: Ints, place: Place) -> None:
        """Check timings, which are lines ``places``, and keep them."""
        rows = [one.row for one in timings]
        above = place.rows_above[places]
        numbers = np.array(rows, dtype=np.int64)
        place.refuse(places, (numbers < 0) | (numbers >= above), lambda at: no_row(rows[at], int(above[at])))
        ns = np.array([one.median_ns for one in timings], dtype=np.float64)
        place.refuse(places, ~_are_times(ns), lambda at: f"median_ns: {float(ns[at])}")
        self.chunks.append((numbers, ns, place.before + places + 1))

    def joined(self) -> tuple[Ints, Floats, Ints]:
        """Rows, ns and line numbers of all of them."""
        none = np.empty(0, dtype=np.int64)
        rows, ns, at = zip(*[(none, np.empty(0), none), *self.chunks], strict=True)
        return np.concatenate(rows), np.concatenate(ns), np.concatenate(at)


def no_row(row: int, above: int) -> str:
    return f"row: {row} is none of the {above} rows above it with a number"
