"""The strict reading of a profile's lines, thousands at a time.

Python's share of a row is what a million of them cost, so lines are read as one JSON array and checked in columns.
Where anything is wrong with them they are read again one by one, which names the line and the field.
"""

import gc
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from operator import itemgetter, methodcaller
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from gac.errors import UNSAFE, ProfileError
from gac.files import suspicion
from gac.profiling.records import (
    DTYPE_NAMES,
    SCHEMA,
    AgainLine,
    Header,
    HeaderLine,
    KernelLine,
    Line,
    LostLine,
    RowLine,
    SharedLine,
)
from gac.profiling.rows import Kind, Rows
from gac.sites import Floats, Ints

_CHUNK_BYTES = 2**18
_LARGEST = 2**50
_LONGEST_LINE = 2**20
_SHOWN = 40
_MOST_AXES = 16
_SHORTEST_NS, _LONGEST_NS = 1e-3, 1e15

Record = dict[str, Any]
_COLUMNS = tuple(name for name in RowLine.__dataclass_fields__ if name not in ("record", "error"))
_ROW_FIELDS = frozenset(("record", *_COLUMNS))
_TIMED_FIELDS = frozenset(AgainLine.__dataclass_fields__)
_NONE = type(None)
_NUMBER: set[type] = {int, float, _NONE}
_ROW_TYPES: tuple[set[type], ...] = ({dict}, _NUMBER, _NUMBER, {int}, {int, _NONE}, {bool}, {list})
_columns_of = itemgetter(*_COLUMNS)
_shape_of = methodcaller("get", "shape")


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
    """Read a profile's bytes; what follows the last newline is ignored.

    Raises:
        ProfileError: with ``source``, line and field, where something is wrong.
    """
    end = content.find(b"\n") + 1
    if not end:
        raise _malformed(f"profile {source} has no complete line")
    _check_length(content[:end], f"{source}:1")
    _check_version(content[: end - 1], f"{source}:1")
    record = _read_line(content[: end - 1], f"{source}:1")
    if not isinstance(record, HeaderLine):
        raise _malformed(f"{source}:1: a {record.record} line")
    _check_header(record.header, f"{source}:1")
    table = _Table(source, record.header)
    with _no_collecting():
        for chunk in _chunks(content, end):
            table.take(chunk)
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


def _chunks(content: bytes, start: int) -> Iterator[bytes]:
    """Whole lines, few enough that their objects stay in a core's cache, without the last newline."""
    last = content.rfind(b"\n")
    while start <= last:
        end = last if last - start <= _CHUNK_BYTES else content.find(b"\n", start + _CHUNK_BYTES)
        yield content[start:end]
        start = end + 1


class _WrongError(Exception):
    """Something is wrong with these lines; reading them one by one says what."""


def _records(chunk: bytes) -> list[Record]:
    """Each line's object. A line that begins with a brace is at least one whole element of the array they make."""
    from pydantic_core import from_json

    text = np.frombuffer(chunk, dtype=np.uint8)
    ends = np.flatnonzero(text == ord("\n"))
    if chunk[:1] == b"{" and chunk[-1:] != b"\n" and (text[ends + 1] == ord("{")).all():
        records: list[Record] = from_json(b"[" + chunk.replace(b"\n", b",\n") + b"]", allow_inf_nan=False)
        keys = sum(map(len, records)) + sum(map(len, filter(None, map(_shape_of, records))))
        # Else some key is there twice, or a string looks like a key, or a line holds two objects.
        if len(records) == len(ends) + 1 and keys in _keys(chunk, text):
            return records
    split = chunk.split(b"\n")
    if any(map(suspicion, split)):
        raise _WrongError
    return [from_json(line, allow_inf_nan=False) for line in split]


def _keys(chunk: bytes, text: Any) -> Iterator[int]:
    """At most how many keys a text has: its colons, or those of them that follow a quote."""
    yield int(np.count_nonzero(text == ord(":")))
    yield chunk.count(b'":')


def _check_types(columns: Sequence[Sequence[Any]], allowed: Sequence[set[type]]) -> None:
    for column, types in zip(columns, allowed, strict=True):
        if not set(map(type, column)) <= types:
            raise _WrongError


@dataclass
class _Lines:
    """What comes before a chunk's lines: how many rows and kernels there are above each."""

    source: str | Path
    before: int
    rows_above: Ints
    kernels_above: Ints

    def refuse(self, places: Ints, wrong: Any, message: Callable[[int], str]) -> None:
        """Name the first line that is wrong.

        Args:
            places: which of the chunk's lines are looked at.
            wrong: one bool for each.
            message: by number among them, what is wrong.
        """
        found = np.flatnonzero(wrong)
        if len(found):
            at = int(found[0])
            raise _malformed(f"{self.where(int(places[at]))}: {message(at)}")

    def where(self, place: int) -> str:
        return f"{self.source}:{self.before + place + 1}"


@dataclass
class _Columns:
    """Rows as they are read; the arrays of ``Rows``, a chunk at a time."""

    axes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    kinds: dict[tuple[str, str, str, tuple[str, ...]], int] = field(default_factory=dict)
    launches: dict[tuple[Any, ...], int] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    chunks: list[tuple[Any, ...]] = field(default_factory=list)
    count: int = 0

    def take(self, rows: list[Record], places: Ints, lines: _Lines) -> None:
        operator, shape, dtype, cached, median, iqr, samples, clock, converged, launches = zip(
            *map(_columns_of, rows), strict=True
        )
        errors = _errors(rows)
        _check_types((shape, median, iqr, samples, clock, converged, launches), _ROW_TYPES)
        kind = self._kind(list(zip(operator, dtype, cached, map(tuple, shape), strict=True)), places, lines)
        sizes = _sizes(shape, places, lines)
        ns, spread = _times(median, iqr, errors, places, lines)
        _check_counts(samples, clock, places, lines)
        launched = self._launched(launches, places, lines)
        self.errors |= {self.count + at: error for at, error in enumerate(errors) if error is not None}
        clocks = np.array([mhz or 0 for mhz in clock], dtype=np.int64)
        number = np.array(samples, dtype=np.int64)
        self.chunks.append(
            (kind, sizes, ns, spread, number, clocks, np.array(converged), launched, lines.before + places + 1)
        )
        self.count += len(rows)

    def _kind(self, groups: list[tuple[str, str, str, tuple[str, ...]]], places: Ints, lines: _Lines) -> Ints:
        for group, place in _first(groups, self.kinds, places):
            operator, dtype, cached, axes = group
            _check_types([group[:3]], [{str}])
            where = lines.where(place)
            if len(axes) > _MOST_AXES:  # each makes every row of the file wider
                raise _malformed(f"{where}: shape: {len(axes):,} axes")
            known = self.axes.setdefault(operator, axes)
            if known != axes:
                raise _malformed(f"{where}: shape: {operator} has axes {', '.join(axes)}, above {', '.join(known)}")
            if dtype not in DTYPE_NAMES:
                raise _malformed(f"{where}: dtype: {dtype[:_SHOWN]!r}")
            if cached not in ("cold", "hot") or any(map(UNSAFE.search, (operator, *axes))):
                raise _WrongError
            self.kinds[group] = len(self.kinds)
        return _numbers(groups, self.kinds)

    def _launched(self, launches: Sequence[Any], places: Ints, lines: _Lines) -> Ints:
        """A number for each sequence of kernels and grids."""
        each = list(chain.from_iterable(launches))
        _check_types((each, list(chain.from_iterable(each))), ({list}, {int}))
        keys = [tuple(map(tuple, one)) for one in launches]
        for key, place in _first(keys, self.launches, places):
            for one in key:
                _check_launch(one, lines.where(place), int(lines.kernels_above[place]))
            self.launches[key] = len(self.launches)
        return _numbers(keys, self.launches)


def _errors(rows: Sequence[Record]) -> list[Any]:
    """Why each row has no number, None where it has one; all other fields were there."""
    fields = len(_ROW_FIELDS)
    if set(map(len, rows)) == {fields}:
        return [None] * len(rows)
    if any(len(row) > fields and ("error" not in row or len(row) > fields + 1) for row in rows):
        raise _WrongError
    errors = [row.get("error") for row in rows]
    _check_types([errors], [{str, _NONE}])
    return errors


def _first(keys: Sequence[Any], known: Mapping[Any, int], places: Ints) -> list[tuple[Any, int]]:
    """Keys that are not known yet, in order, each with the line where it is first."""
    found = set(keys).difference(known)
    if not found:
        return []
    first = {key: place for key, place in zip(reversed(keys), places[::-1].tolist(), strict=True) if key in found}
    return sorted(first.items(), key=itemgetter(1))


def _numbers(keys: Sequence[Any], known: Mapping[Any, int]) -> Ints:
    return np.fromiter(map(known.__getitem__, keys), np.int64, len(keys))


def _check_launch(one: tuple[int, ...], where: str, kernels: int) -> None:
    if len(one) != 4:
        raise _WrongError
    number, *grid = one
    if not 0 <= number < kernels:
        raise _malformed(f"{where}: launches: kernel {number} of {kernels} above it")
    if not 1 <= min(grid) <= max(grid) <= _LARGEST:
        raise _malformed(f"{where}: launches: a grid of {grid}")


def _sizes(shapes: Sequence[dict[str, int]], places: Ints, lines: _Lines) -> Ints:
    flat = list(chain.from_iterable(map(dict.values, shapes)))
    _check_types([flat], [{int}])
    if flat and not (min(flat) >= 1 and max(flat) <= _LARGEST):
        wrong = [not all(1 <= size <= _LARGEST for size in shape.values()) for shape in shapes]
        lines.refuse(places, wrong, lambda at: f"shape: {shapes[at]} has a size below 1 or above 2**50")
    counts = np.fromiter(map(len, shapes), np.int64, len(shapes))
    sizes = np.zeros((len(shapes), counts.max()), dtype=np.int64)
    sizes[np.arange(sizes.shape[1]) < counts[:, None]] = flat
    return sizes


def _times(
    median: Sequence[float | None],
    iqr: Sequence[float | None],
    errors: Sequence[str | None],
    places: Ints,
    lines: _Lines,
) -> tuple[Floats, Floats]:
    """Median and IQR in ns; NaN where there is an error instead."""
    ns, spread = np.array(median, dtype=np.float64), np.array(iqr, dtype=np.float64)
    failed = np.array([error is not None for error in errors])
    lines.refuse(
        places,
        (np.isnan(ns) != failed) | (np.isnan(ns) != np.isnan(spread)),
        lambda at: f"median_ns: {median[at]} with iqr_ns {iqr[at]} and error {errors[at]!r}",
    )
    lines.refuse(
        places,
        ~failed & ~(_are_times(ns) & (spread >= 0) & np.isfinite(spread)),
        lambda at: f"median_ns: {float(ns[at])} with iqr_ns {float(spread[at])}",
    )
    return ns, spread


def _check_counts(samples: Sequence[int], clock: Sequence[int | None], places: Ints, lines: _Lines) -> None:
    known = [mhz for mhz in clock if mhz is not None] or [1]
    if min(samples) < 0 or max(samples) > _LARGEST or min(known) < 1 or max(known) > _LARGEST:
        wrong = [
            not 0 <= count <= _LARGEST or not 1 <= (1 if mhz is None else mhz) <= _LARGEST
            for count, mhz in zip(samples, clock, strict=True)
        ]
        lines.refuse(places, wrong, lambda at: f"samples {samples[at]} at sm_clock_mhz {clock[at]}")


@dataclass
class _Timings:
    """Rows that were timed again: passes, or timings of sentinels. Rows, ns and line numbers, a chunk at a time."""

    chunks: list[tuple[Ints, Floats, Ints]] = field(default_factory=list)

    def take(self, records: list[Record], places: Ints, lines: _Lines) -> None:
        if any(frozenset(names) != _TIMED_FIELDS for names in set(map(tuple, records))):
            raise _WrongError
        rows, median = [one["row"] for one in records], [one["median_ns"] for one in records]
        _check_types((rows, median), ({int}, {int, float}))
        above = lines.rows_above[places]
        wrong = [not 0 <= row < most for row, most in zip(rows, above.tolist(), strict=True)]
        lines.refuse(places, wrong, lambda at: _no_row(rows[at], int(above[at])))
        ns = np.array(median, dtype=np.float64)
        lines.refuse(places, ~_are_times(ns), lambda at: f"median_ns: {float(ns[at])}")
        self.chunks.append((np.array(rows, dtype=np.int64), ns, lines.before + places + 1))

    def all(self) -> tuple[Ints, Floats, Ints]:
        """Rows, ns and line numbers of all of them."""
        none = np.empty(0, dtype=np.int64)
        rows, ns, at = zip(*[(none, np.empty(0), none), *self.chunks], strict=True)
        return np.concatenate(rows), np.concatenate(ns), np.concatenate(at)


def _no_row(row: int, above: int) -> str:
    return f"row: {row} is none of the {above} rows above it with a number"


@dataclass
class _Table:
    """The lines of a file while it is read; ``lost`` has by row the error and the line that says so."""

    source: str | Path
    header: Header
    lines: int = 1
    kernels: list[KernelLine] = field(default_factory=list)
    rows: _Columns = field(default_factory=_Columns)
    again: _Timings = field(default_factory=_Timings)
    sentinels: _Timings = field(default_factory=_Timings)
    lost: dict[int, tuple[str, int]] = field(default_factory=dict)

    def take(self, chunk: bytes) -> None:
        """Check some lines and keep what they say."""
        if len(chunk) > _CHUNK_BYTES:
            for place, line in enumerate(chunk.split(b"\n")):
                _check_length(line, f"{self.source}:{self.lines + place + 1}")
        try:
            records = _records(chunk)
            self._take(records, list(map(itemgetter("record"), records)), chunk)
        except (_WrongError, LookupError, TypeError, ValueError, AttributeError, OverflowError):
            self._find_fault(chunk)
        self.lines += len(records)

    def _take(self, records: list[Record], names: list[str], chunk: bytes) -> None:
        _check_types([names], [{str}])
        kind = np.array(names)
        row, kernel = kind == "row", kind == "kernel"
        lines = _Lines(
            self.source,
            self.lines,
            self.rows.count + np.cumsum(row) - row,
            len(self.kernels) + np.cumsum(kernel) - kernel,
        )
        common = row.copy()
        for name, timings in (("again", self.again), ("sentinel", self.sentinels)):
            if (places := np.flatnonzero(kind == name)).size:
                timings.take([records[place] for place in places.tolist()], places, lines)
            common |= kind == name
        if not common.all():
            split = chunk.split(b"\n")
            for place in np.flatnonzero(~common).tolist():
                self._take_other(_read_line(split[place], lines.where(place)), place, lines)
        if (places := np.flatnonzero(row)).size:
            rows = records if len(places) == len(records) else [records[place] for place in places.tolist()]
            self.rows.take(rows, places, lines)

    def _take_other(self, record: Line, place: int, lines: _Lines) -> None:
        if isinstance(record, KernelLine):
            self.kernels.append(record)
        elif isinstance(record, SharedLine):
            self.header = replace(self.header, shared_with=record.shared_with)
        elif isinstance(record, LostLine):
            if record.row in self.lost or not 0 <= record.row < lines.rows_above[place]:
                raise _malformed(f"{lines.where(place)}: {_no_row(record.row, int(lines.rows_above[place]))}")
            self.lost[record.row] = record.error, lines.before + place + 1
        else:
            raise _malformed(f"{lines.where(place)}: a {record.record} line")

    def _find_fault(self, chunk: bytes) -> NoReturn:
        for place, line in enumerate(chunk.split(b"\n")):
            record = _read_line(line, where := f"{self.source}:{self.lines + place + 1}")
            if record.record == "header":
                raise _malformed(f"{where}: a header line")
        raise _malformed(f"{self.source}: lines {self.lines + 1} to {self.lines + place + 1}")

    def contents(self) -> Contents:
        """What the lines say together."""
        again, sentinels = self.again.all(), self.sentinels.all()
        for timed_rows, _, at in (again, sentinels):
            self._check_have_numbers(timed_rows, at)
        for row, (_, line) in self.lost.items():
            if row in self.rows.errors:
                raise _malformed(f"{self.source}:{line}: {_no_row(row, self.rows.count)}")
        rows, at = self._rows(again[0], again[1])
        if (twice := rows.repeated()) is not None:
            kind, sizes = rows.kinds[rows.kind[twice]], rows.sizes[twice].tolist()
            shape = dict(zip(kind.axes, sizes, strict=False))
            raise _malformed(f"{self.source}:{at[twice]}: {kind.operator} {shape} is there twice")
        timed: dict[int, list[float]] = {}
        for row, ns in zip(sentinels[0].tolist(), sentinels[1].tolist(), strict=True):
            timed.setdefault(row, []).append(ns)
        return Contents(self.header, rows, tuple(self.kernels), {row: tuple(ns) for row, ns in timed.items()})

    def _check_have_numbers(self, rows: Ints, at: Ints) -> None:
        """No row was timed again that had failed, or that was lost above."""
        failed_at = np.full(self.rows.count, np.iinfo(np.int64).max)
        for row, (_, line) in self.lost.items():
            failed_at[row] = line
        failed_at[np.fromiter(self.rows.errors, np.int64, len(self.rows.errors))] = 0
        wrong = at > failed_at[rows]
        if wrong.any():
            first = int(np.argmax(wrong))
            raise _malformed(f"{self.source}:{at[first]}: {_no_row(int(rows[first]), self.rows.count)}")

    def _rows(self, again: Ints, again_ns: Floats) -> tuple[Rows, Ints]:
        """The measurements, and the line of each."""
        kind, sizes, ns, iqr, samples, clock, converged, launched, at = _joined(self.rows.chunks)
        lost = np.fromiter(self.lost, np.int64, len(self.lost))
        ns[lost], iqr[lost], converged[lost] = np.nan, np.nan, False
        errors = self.rows.errors | {row: error for row, (error, _) in self.lost.items()}
        first = np.flatnonzero(~np.isnan(ns))
        of = np.concatenate([first, again])
        order = np.argsort(of, kind="stable")
        order = order[~np.isin(of[order], lost)] if len(lost) else order
        starts = np.concatenate([[0], np.cumsum(np.bincount(of[order], minlength=len(ns)))])
        passes = np.concatenate([ns[first], again_ns])[order]
        kinds = tuple(Kind(operator, dtype, cached, axes) for operator, dtype, cached, axes in self.rows.kinds)  # type: ignore[arg-type]
        launches, kernels = tuple(self.rows.launches), tuple(self.kernels)
        columns = kind, sizes, iqr, samples, clock, converged, launched
        return Rows(kinds, *columns, launches, kernels, errors, passes, starts), at


def _joined(chunks: Sequence[tuple[Any, ...]]) -> list[Any]:
    """The chunks' columns end to end; narrower sizes are filled up with 0."""
    whole, real = np.int64, np.float64
    most = max((chunk[1].shape[1] for chunk in chunks), default=0)
    none: tuple[Any, ...] = tuple(
        np.empty((0, most) if number == 1 else 0, dtype=dtype)
        for number, dtype in enumerate((whole, whole, real, real, whole, whole, np.bool_, whole, whole))
    )
    wide = [(one[0], _widened(one[1], most), *one[2:]) for one in chunks]
    return [np.concatenate(parts) for parts in zip(none, *wide, strict=True)]


def _widened(sizes: Ints, most: int) -> Ints:
    return np.pad(sizes, ((0, 0), (0, most - sizes.shape[1])))


def _are_times(ns: Floats) -> Any:
    """From a picosecond to some days."""
    return (ns >= _SHORTEST_NS) & (ns <= _LONGEST_NS)


@cache
def _reader() -> Any:
    from typing import Annotated

    from pydantic import Field, TypeAdapter

    return TypeAdapter(Annotated[Line, Field(discriminator="record")])


def _malformed(given: str) -> ProfileError:
    return ProfileError(
        given,
        "JSON Lines as gac profile writes them: a header, then kernel names and rows",
        "Restore the file, or measure again with gac profile.",
    )


def _check_length(line: bytes, where: str) -> None:
    if len(line) > _LONGEST_LINE:
        raise _malformed(f"{where}: a line of {len(line):,} bytes")


def _check_version(line: bytes, where: str) -> None:
    """Say 'another version' before complaining about that version's fields."""
    try:
        version = json.loads(line)["header"]["schema_version"]
    except (ValueError, KeyError, TypeError, RecursionError) as failure:
        raise _malformed(f"{where}: no header with a schema_version") from failure
    if version != SCHEMA:
        raise ProfileError(
            f"{where}: header.schema_version is {repr(version)[:_SHOWN]}",
            f"version {SCHEMA}",
            "Measure again with gac profile, or open it with the version of GAC that wrote it.",
        )


def _read_line(line: bytes, where: str) -> Line:
    from pydantic import ValidationError

    try:
        record: Line = _reader().validate_json(line, strict=True)
    except ValidationError as failure:
        first = failure.errors()[0]
        field = ".".join(str(part) for part in first["loc"][1:]) or "the line"
        raise _malformed(f"{where}: {field}: {first['msg']}") from failure
    if reason := suspicion(line):
        raise _malformed(f"{where}: {reason}")
    return record


def _check_header(header: Header, where: str) -> None:
    counts = ("sm_count", "l2_bytes", "memory_bytes", "shared_memory_bytes", "sm_clock_max_mhz", "memory_clock_mhz")
    for name in counts:
        if not 1 <= getattr(header, name) <= _LARGEST:
            raise _malformed(f"{where}: header.{name}: {getattr(header, name)}")
    if not re.fullmatch(r"\d{1,3}\.\d{1,3}", header.compute_capability):
        raise _malformed(f"{where}: header.compute_capability: {header.compute_capability[:_SHOWN]!r}")
    if not header.gpu.isprintable() or not header.gpu:
        raise _malformed(f"{where}: header.gpu: {header.gpu[:_SHOWN]!r}")
