"""The strict reading of a profile: every line, every number, and what lines say of one another."""

import gc
import io
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import NoReturn

import numpy as np

from gac.arrays import Floats, Ints
from gac.errors import ProfileError
from gac.profiling.columns import LARGEST, SHOWN, Place, RowColumns, Timings, no_row
from gac.profiling.lines import (
    AGAIN,
    ROW,
    SENTINEL,
    Lines,
    Readable,
    WrongError,
    check_length,
    chunks,
    decode,
    malformed,
    read_line,
)
from gac.profiling.records import SCHEMA, Header, HeaderLine, KernelLine, Line, LostLine, SharedLine
from gac.profiling.rows import Kind, Rows


@dataclass(frozen=True)
class Contents:
    """A profile's lines, put together: measurements in the order of their rows, kernels in the order of theirs.

    ``sentinels`` has, for the number of each row that was a sentinel, its timings in ns in order.
    """

    header: Header
    measurements: Rows
    kernels: tuple[KernelLine, ...]
    sentinels: Mapping[int, tuple[float, ...]]


def parse(content: bytes, source: str | Path) -> Contents:
    """``read`` a profile's bytes."""
    return read(io.BytesIO(content), source)


def read(file: Readable, source: str | Path) -> Contents:
    """Read a profile, some lines at a time; what follows the last newline is ignored.

    Raises:
        ProfileError: with ``source``, line and field, where something is wrong.
    """
    texts = chunks(file)
    first, more, rest = next(texts, b"").partition(b"\n")
    if not first:
        raise malformed(f"profile {source} has no complete line")
    check_length(first, f"{source}:1")
    _check_version(first, f"{source}:1")
    record = read_line(first, f"{source}:1")
    if not isinstance(record, HeaderLine):
        raise malformed(f"{source}:1: a {record.record} line")
    _check_header(record.header, f"{source}:1")
    table = _Table(source, record.header)
    with _no_collecting():
        for text in chain([rest] if more else [], texts):
            table.take(text)
        return table.contents()


@contextmanager
def _no_collecting() -> Iterator[None]:
    """What is read has no cycles; looking for them would take a third of the time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@dataclass
class _Table:
    """The lines of a file while it is read; ``lost`` has by row the error and the line that says so."""

    source: str | Path
    header: Header
    lines: int = 1
    kernels: list[KernelLine] = field(default_factory=list)
    rows: RowColumns = field(default_factory=RowColumns)
    again: Timings = field(default_factory=Timings)
    sentinels: Timings = field(default_factory=Timings)
    lost: dict[int, tuple[str, int]] = field(default_factory=dict)

    def take(self, chunk: bytes) -> None:
        """Check some lines and keep what they say."""
        try:
            self._take(decode(chunk))
        except (WrongError, OverflowError):
            self._find_fault(chunk)

    def _take(self, lines: Lines) -> None:
        place = Place.of(lines, self.source, self.lines, self.rows.count, len(self.kernels))
        for at in lines.alone:
            self._take_other(read_line(lines[at], place.where(at)), at, place)
        for kind, columns in ((AGAIN, self.again), (SENTINEL, self.sentinels), (ROW, self.rows)):
            records, places = lines.select(kind)
            if records:
                columns.take(records, places, place)
        self.lines += len(lines.records)

    def _take_other(self, record: Line, at: int, place: Place) -> None:
        if isinstance(record, KernelLine):
            self.kernels.append(record)
        elif isinstance(record, SharedLine):
            self.header = replace(self.header, shared_with=record.shared_with)
        elif isinstance(record, LostLine):
            if record.row in self.lost or not 0 <= record.row < place.rows_above[at]:
                raise malformed(f"{place.where(at)}: {no_row(record.row, int(place.rows_above[at]))}")
            self.lost[record.row] = record.error, place.before + at + 1
        elif isinstance(record, HeaderLine):
            raise malformed(f"{place.where(at)}: a header line")

    def _find_fault(self, chunk: bytes) -> NoReturn:
        for place, line in enumerate(chunk.split(b"\n")):
            record = read_line(line, where := f"{self.source}:{self.lines + place + 1}")
            if record.record == "header":
                raise malformed(f"{where}: a header line")
        raise malformed(f"{self.source}: lines {self.lines + 1} to {self.lines + place + 1}")

    def contents(self) -> Contents:
        """What the lines say together."""
        again, sentinels = self.again.joined(), self.sentinels.joined()
        for timed_rows, _, at in (again, sentinels):
            self._check_have_numbers(timed_rows, at)
        for row, (_, line) in self.lost.items():
            if row in self.rows.errors:
                raise malformed(f"{self.source}:{line}: {no_row(row, self.rows.count)}")
        rows, at = self._rows(again[0], again[1])
        if (twice := rows.repeated()) is not None:
            kind, sizes = rows.kinds[rows.kind[twice]], rows.sizes[twice].tolist()
            shape = dict(zip(kind.axes, sizes, strict=False))
            raise malformed(f"{self.source}:{at[twice]}: {kind.operator} {shape} is there twice")
        timed: dict[int, list[float]] = {}
        for row, ns in zip(sentinels[0].tolist(), sentinels[1].tolist(), strict=True):
            timed.setdefault(row, []).append(ns)
        return Contents(self.header, rows, tuple(self.kernels), {row: tuple(ns) for row, ns in timed.items()})

    def _check_have_numbers(self, rows: Ints, at: Ints) -> None:
        """No row was timed again that had failed, or that was lost above."""
        last = np.full(self.rows.count, np.iinfo(np.int64).max)  # line after which a row has no number
        last[list(self.lost)] = [line for _, line in self.lost.values()]
        last[list(self.rows.errors)] = 0
        wrong = at > last[rows]
        if wrong.any():
            first = int(np.argmax(wrong))
            raise malformed(f"{self.source}:{at[first]}: {no_row(int(rows[first]), self.rows.count)}")

    def _rows(self, again: Ints, again_ns: Floats) -> tuple[Rows, Ints]:
        """The measurements, and the line of each."""
        kind, sizes, ns, iqr, samples, clock, converged, launched, at = self.rows.joined()
        lost = np.fromiter(self.lost, np.int64, len(self.lost))
        ns[lost], iqr[lost], converged[lost] = np.nan, np.nan, False
        errors = self.rows.errors | {row: error for row, (error, _) in self.lost.items()}
        first = np.flatnonzero(~np.isnan(ns))
        of = np.concatenate([first, again])
        order = np.argsort(of, kind="stable")
        order = order[~np.isin(of[order], lost)] if len(lost) else order
        starts = np.concatenate([[0], np.cumsum(np.bincount(of[order], minlength=len(ns)))])
        passes = np.concatenate([ns[first], again_ns])[order]
        kinds = tuple(Kind(operator, dtype, cached, axes) for operator, dtype, cached, axes in self.rows.kinds)
        launches, kernels = tuple(self.rows.launches), tuple(self.kernels)
        columns = kind, sizes, iqr, samples, clock, converged, launched
        return Rows(kinds, *columns, launches, kernels, errors, passes, starts), at


def _check_version(line: bytes, where: str) -> None:
    """Say 'another version' before complaining about that version's fields."""
    try:
        version = json.loads(line)["header"]["schema_version"]
    except (ValueError, KeyError, TypeError, RecursionError) as failure:
        raise malformed(f"{where}: no header with a schema_version") from failure
    if version != SCHEMA:
        raise ProfileError(
            f"{where}: header.schema_version is {repr(version)[:SHOWN]}",
            f"version {SCHEMA}",
            "Measure again with gac profile, or open it with the version of GAC that wrote it.",
        )


def _check_header(header: Header, where: str) -> None:
    counts = ("sm_count", "l2_bytes", "memory_bytes", "shared_memory_bytes", "sm_clock_max_mhz", "memory_clock_mhz")
    for name in counts:
        if not 1 <= getattr(header, name) <= LARGEST:
            raise malformed(f"{where}: header.{name}: {getattr(header, name)}")
    if not re.fullmatch(r"\d{1,3}\.\d{1,3}", header.compute_capability):
        raise malformed(f"{where}: header.compute_capability: {header.compute_capability[:SHOWN]!r}")
    if not header.gpu.isprintable() or not header.gpu:
        raise malformed(f"{where}: header.gpu: {header.gpu[:SHOWN]!r}")
