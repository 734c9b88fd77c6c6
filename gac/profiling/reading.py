"""The strict reader of profiles: every line, every number, and what lines say about one another.

A million lines are decoded some thousand at a time into columns of numbers. Where a chunk of lines is odd in any way,
its lines are read one by one, which names the wrong one.
"""

import gc
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain
from operator import attrgetter, or_
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from gac.arrays import Floats, Ints
from gac.errors import ProfileError
from gac.io import suspicion
from gac.profiling.lines import (
    AgainLine,
    HeaderLine,
    KernelLine,
    Line,
    LostLine,
    RowLine,
    SentinelLine,
    SharedLine,
)
from gac.profiling.records import SCHEMA, Header
from gac.profiling.rows import Kind, Rows

_CHUNK_BYTES = 2**19
_LONGEST_LINE = 2**20
_SHOWN = 40

_KINDS: tuple[Any, ...] = (RowLine, AgainLine, SentinelLine, KernelLine, LostLine, SharedLine, HeaderLine)
_PLACE: dict[Any, int] = {kind: place for place, kind in enumerate(_KINDS)}
_KEYS = np.array([1 + len(kind.__struct_fields__) - (kind is RowLine) for kind in _KINDS])
_LINE: Any = reduce(or_, _KINDS)
_DECODER: Any = msgspec.json.Decoder(_LINE)


class Readable(Protocol):
    """What bytes come from, up to ``size`` at a time; none at the end."""

    def read(self, size: int, /) -> bytes: ...


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
    chunks = _chunks(file)
    first, more, rest = next(chunks, b"").partition(b"\n")
    if not first:
        raise malformed(f"profile {source} has no complete line")
    reader = _Reader(source, _header(first, f"{source}:1"))
    with _no_collecting():
        for chunk in chain([rest] if more else [], chunks):
            reader.take(chunk)
        return reader.contents()


def malformed(given: str) -> ProfileError:
    return ProfileError(
        given,
        "JSON Lines as gac profile writes them: a header, then kernel names and rows",
        "Restore the file, or measure again with gac profile.",
    )


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


def _chunks(file: Readable) -> Iterator[bytes]:
    """Whole lines, few enough that their objects stay near a core, without the last newline.

    What follows the last newline is dropped, unless it is too long to be a line.
    """
    rest = b""
    while block := file.read(_CHUNK_BYTES):
        lines, newline, last = block.rpartition(b"\n")
        if newline:
            yield rest + lines
            rest = last
        else:
            rest += last
        if len(rest) > _LONGEST_LINE:
            yield rest


# --- lines ----------------------------------------------------------------------------------------------------------


def read_line(line: bytes, where: str) -> Line:
    """Read one line by itself.

    Raises:
        ProfileError: with ``where`` and the field that is wrong.
    """
    _check_length(line, where)
    try:
        record: Line = _DECODER.decode(line)
    except (ValueError, RecursionError) as failure:
        raise malformed(f"{where}: {_complaint(line, failure)}") from failure
    if reason := suspicion(line):
        raise malformed(f"{where}: {reason}")
    return record


def _check_length(line: bytes, where: str) -> None:
    if len(line) > _LONGEST_LINE:
        raise malformed(f"{where}: a line of over {_LONGEST_LINE:,} bytes")


def _complaint(line: bytes, failure: Exception) -> str:
    """The field that is wrong, and what is wrong with it."""
    if not isinstance(failure, msgspec.ValidationError):
        try:  # NaN and Infinity, which are no JSON, as text: then their field is named
            msgspec.convert(json.loads(line, parse_constant=str), _LINE)
        except msgspec.ValidationError as found:
            failure = found
        except (ValueError, RecursionError):
            return f"the line: Invalid JSON: {failure}"
    said, _, path = str(failure).partition(" - at `$.")
    field = re.search(r"field `(.+)`$", said)
    path = ".".join(filter(None, (path.removesuffix("`"), field and field[1])))
    return f"{path or 'the line'}: {said}"


def _read_lines(text: bytes, source: str | Path, before: int) -> tuple[Sequence[Line], Ints]:
    """Some lines, decoded together, and the place of each one's class in ``_KINDS``; odd lines are read one by one.

    Args:
        before: how many lines are above the first.
    """
    lines = text.split(b"\n")
    letters = np.frombuffer(b"\n" + text + b"\n", dtype=np.uint8)
    ends = np.flatnonzero(letters == ord("\n"))
    records: Sequence[Line] = ()
    with suppress(ValueError, RecursionError):
        records = _DECODER.decode_lines(text) if _are_objects(letters, ends) else ()
    if len(records) == len(lines):
        kinds = _kinds(records)
        colons = np.diff(np.searchsorted(np.flatnonzero(letters == ord(":")), ends))
        odd = colons != _keys(records, kinds)
        if not _is_plain(text):
            odd |= ~np.array([_is_plain(line) for line in lines])
        for at in np.flatnonzero(odd).tolist():
            read_line(lines[at], f"{source}:{before + at + 1}")
        return records, kinds
    records = [read_line(line, f"{source}:{before + at}") for at, line in enumerate(lines, 1)]
    return records, _kinds(records)


def _are_objects(letters: Any, ends: Ints) -> bool:
    """Each line begins and ends with a brace: then none ends within an object. None of them is too long."""
    begin, end = letters[ends[:-1] + 1], letters[ends[1:] - 1]
    return bool(((begin == ord("{")) & (end == ord("}"))).all() and np.diff(ends).max() <= _LONGEST_LINE)


def _is_plain(text: bytes) -> bool:
    """No string in it can hold an escape or a control character."""
    return text.isascii() and b"\\" not in text and b"\x7f" not in text


def _kinds(records: Sequence[Line]) -> Ints:
    return np.fromiter(map(_PLACE.__getitem__, map(type, records)), np.int64, len(records))


def _keys(records: Sequence[Any], kinds: Ints) -> Ints:
    """How many keys each line has; with more colons a key is there twice, or the line has an error or ``::``."""
    keys = _KEYS[kinds]
    rows = np.flatnonzero(kinds == _PLACE[RowLine])
    keys[rows] += np.array([len(records[at].shape) for at in rows.tolist()], dtype=np.int64)
    return keys


def _header(line: bytes, where: str) -> Header:
    """The header; another version is said before that version's fields are complained about."""
    _check_length(line, where)
    try:
        version = msgspec.json.decode(line)["header"]["schema_version"]
    except (ValueError, KeyError, TypeError, RecursionError) as failure:
        raise malformed(f"{where}: no header with a schema_version") from failure
    if version != SCHEMA:
        raise ProfileError(
            f"{where}: header.schema_version is {repr(version)[:_SHOWN]}",
            f"version {SCHEMA}",
            "Measure again with gac profile, or open it with the version of GAC that wrote it.",
        )
    record = read_line(line, where)
    if not isinstance(record, HeaderLine):
        raise malformed(f"{where}: a {type(record).__struct_config__.tag} line")
    header = Header(**msgspec.structs.asdict(record.header))
    if not header.gpu.isprintable() or not header.gpu:
        raise malformed(f"{where}: header.gpu: {header.gpu[:_SHOWN]!r}")
    return header


# --- what they say together -----------------------------------------------------------------------------------------


class _Numbering(dict[Any, int]):
    """Numbers its keys in the order in which they are first asked for."""

    def __missing__(self, key: Any) -> int:
        self[key] = number = len(self)
        return number

    def of(self, keys: Sequence[Any]) -> Ints:
        return np.fromiter(map(self.__getitem__, keys), np.int64, len(keys))


class _Reader:
    """The lines of a file as columns, some thousand at a time.

    Attributes:
        rows: of each chunk the kinds, sizes, medians, IQRs, samples, clocks, convergence, launches and line numbers.
        timed: of ``AgainLine`` and of ``SentinelLine``, of each chunk the rows, the times and the line numbers.
        failed: by row, why it has no number from the first.
        lost: by row, why it has no number any more, and the line that says so.
    """

    def __init__(self, source: str | Path, header: Header) -> None:
        self.source, self.header = source, header
        self.lines, self.count = 1, 0
        self.kernels: list[KernelLine] = []
        self.kinds, self.launches = _Numbering(), _Numbering()
        self.axes: dict[str, tuple[str, ...]] = {}
        self.rows: list[tuple[Any, ...]] = []
        self.timed: dict[type[Line], list[tuple[Any, ...]]] = {AgainLine: [], SentinelLine: []}
        self.failed: dict[int, str] = {}
        self.lost: dict[int, tuple[str, int]] = {}

    def take(self, chunk: bytes) -> None:
        """Check some lines and keep what they say."""
        records, kinds = _read_lines(chunk, self.source, self.lines)
        above = self.count + np.cumsum(kinds == _PLACE[RowLine])
        for at in np.flatnonzero(kinds >= _PLACE[KernelLine]).tolist():
            self._take_other(records[at], self.lines + at + 1, int(above[at]))
        for kind in (AgainLine, SentinelLine):
            if len(places := np.flatnonzero(kinds == _PLACE[kind])):
                self._take_times(kind, [records[at] for at in places.tolist()], places, above[places])
        if len(places := np.flatnonzero(kinds == _PLACE[RowLine])):
            kernels = len(self.kernels) - np.cumsum((kinds == _PLACE[KernelLine])[::-1])[::-1]
            self._take_rows([records[at] for at in places.tolist()], self.lines + places + 1, kernels[places])
        self.lines += len(records)

    def _refuse(self, lines: Ints, wrong: Any, message: Any) -> None:
        """Name the first of the lines that is wrong; ``message`` says what, by its number among them."""
        found = np.flatnonzero(wrong)
        if len(found):
            raise malformed(f"{self.source}:{lines[found[0]]}: {message(int(found[0]))}")

    def _take_other(self, record: Line, line: int, above: int) -> None:
        if isinstance(record, KernelLine):
            self.kernels.append(record)
        elif isinstance(record, SharedLine):
            self.header = replace(self.header, shared_with=record.shared_with)
        elif isinstance(record, LostLine):
            if record.row in self.lost or record.row >= above:
                raise malformed(f"{self.source}:{line}: {_no_row(record.row, above)}")
            self.lost[record.row] = record.error, line
        else:
            raise malformed(f"{self.source}:{line}: a header line")

    def _take_times(self, kind: type[Line], records: Sequence[Any], places: Ints, above: Ints) -> None:
        lines = self.lines + places + 1
        rows = np.array([record.row for record in records])
        self._refuse(lines, rows >= above, lambda at: _no_row(int(rows[at]), int(above[at])))
        self.timed[kind].append((rows, np.array([record.median_ns for record in records]), lines))

    def _take_rows(self, rows: Sequence[Any], lines: Ints, kernels: Ints) -> None:
        ns, spread, clock = (
            np.array(list(map(attrgetter(name), rows)), dtype=np.float64)
            for name in ("median_ns", "iqr_ns", "sm_clock_mhz")
        )
        failed = np.array([row.error is not None for row in rows])
        wrong = (np.isnan(ns) != failed) | (np.isnan(spread) != failed)
        self._refuse(lines, wrong, lambda at: _contradiction(rows[at]))
        samples, converged = np.array([row.samples for row in rows]), np.array([row.converged for row in rows])
        clock = np.nan_to_num(clock).astype(np.int64)
        columns = self._kinds(rows, lines), _sizes(rows), ns, spread, samples, clock, converged
        self.rows.append((*columns, self._launches(rows, lines, kernels), lines))
        self.failed |= {self.count + at: rows[at].error for at in np.flatnonzero(failed).tolist()}
        self.count += len(rows)

    def _kinds(self, rows: Sequence[Any], lines: Ints) -> Ints:
        known = len(self.kinds)
        found = self.kinds.of([(row.operator, row.dtype, row.cache, tuple(row.shape)) for row in rows])
        for operator, _, _, axes in list(self.kinds)[known:]:
            self.axes.setdefault(operator, axes)
        for at in (int(np.argmax(found == number)) for number in range(known, len(self.kinds))):
            operator, axes = rows[at].operator, tuple(rows[at].shape)
            if (expected := self.axes[operator]) != axes:
                given = f"shape: {operator} has axes {', '.join(axes)}, above {', '.join(expected)}"
                raise malformed(f"{self.source}:{lines[at]}: {given}")
        return found

    def _launches(self, rows: Sequence[Any], lines: Ints, kernels: Ints) -> Ints:
        known = len(self.launches)
        found = self.launches.of([row.launches for row in rows])
        new = np.flatnonzero(found >= known)
        most = np.array([max(rows[at].launches, default=(-1,))[0] for at in new.tolist()], dtype=np.int64)
        above = kernels[new]
        self._refuse(lines[new], most >= above, lambda at: f"launches: kernel {most[at]} of {above[at]} above it")
        return found

    def contents(self) -> Contents:
        """What the lines say together."""
        (again, ns, at), sentinels = (_joined(self.timed[kind]) for kind in (AgainLine, SentinelLine))
        self._check_have_numbers(np.concatenate([again, sentinels[0]]), np.concatenate([at, sentinels[2]]))
        for row in self.lost.keys() & self.failed.keys():
            raise malformed(f"{self.source}:{self.lost[row][1]}: {_no_row(row, self.count)}")
        rows, lines = self._rows(again, ns)
        if (twice := rows.repeated()) is not None:
            point = rows[twice]
            raise malformed(f"{self.source}:{lines[twice]}: {point.operator} {point.shape} is there twice")
        timed: dict[int, list[float]] = {}
        for row, time in zip(sentinels[0].tolist(), sentinels[1].tolist(), strict=True):
            timed.setdefault(row, []).append(time)
        return Contents(self.header, rows, tuple(self.kernels), {row: tuple(times) for row, times in timed.items()})

    def _check_have_numbers(self, rows: Ints, lines: Ints) -> None:
        """No row was timed again that had failed, or that was lost above."""
        last = np.full(self.count, np.iinfo(np.int64).max)  # line after which a row has no number
        last[list(self.lost)] = [line for _, line in self.lost.values()]
        last[list(self.failed)] = 0
        self._refuse(lines, lines > last[rows], lambda at: _no_row(int(rows[at]), self.count))

    def _rows(self, again: Ints, again_ns: Floats) -> tuple[Rows, Ints]:
        """The measurements, and the line of each."""
        most = max((chunk[1].shape[1] for chunk in self.rows), default=0)
        wide = ((kind, np.pad(sizes, ((0, 0), (0, most - sizes.shape[1]))), *rest) for kind, sizes, *rest in self.rows)
        none = np.empty(0, dtype=np.int64)
        empty = (none, none.reshape(0, most), *(none.astype(float),) * 2, none, none, none.astype(bool), none, none)
        kind, sizes, ns, iqr, samples, clock, converged, launched, lines = map(
            np.concatenate, zip(empty, *wide, strict=True)
        )
        lost = np.fromiter(self.lost, np.int64, len(self.lost))
        ns[lost], iqr[lost], converged[lost] = np.nan, np.nan, False
        errors = self.failed | {row: error for row, (error, _) in self.lost.items()}
        first = np.flatnonzero(~np.isnan(ns))
        of = np.concatenate([first, again])
        order = np.argsort(of, kind="stable")
        order = order[~np.isin(of[order], lost)] if len(lost) else order
        starts = np.concatenate([[0], np.cumsum(np.bincount(of[order], minlength=len(ns)))])
        passes = np.concatenate([ns[first], again_ns])[order]
        columns = kind, sizes, iqr, samples, clock, converged, launched
        kinds = tuple(Kind(*one) for one in self.kinds)
        return Rows(kinds, *columns, tuple(self.launches), tuple(self.kernels), errors, passes, starts), lines


def _no_row(row: int, above: int) -> str:
    return f"row: {row} is none of the {above} rows above it with a number"


def _contradiction(row: RowLine) -> str:
    return f"median_ns: {row.median_ns} with iqr_ns {row.iqr_ns} and error {row.error!r}"


def _sizes(rows: Sequence[Any]) -> Ints:
    """Shape ``(rows, most axes)``, 0 beyond a row's own axes."""
    shapes = [row.shape for row in rows]
    counts = np.fromiter(map(len, shapes), np.int64, len(shapes))
    sizes = np.zeros((len(shapes), counts.max()), dtype=np.int64)
    values = np.fromiter(chain.from_iterable(map(dict.values, shapes)), np.int64, counts.sum())
    sizes[np.arange(sizes.shape[1]) < counts[:, None]] = values
    return sizes


def _joined(chunks: Sequence[tuple[Any, ...]]) -> tuple[Ints, Floats, Ints]:
    """Rows, ns and line numbers, end to end."""
    none = np.empty(0, dtype=np.int64)
    rows, ns, lines = map(np.concatenate, zip((none, none.astype(float), none), *chunks, strict=True))
    return rows, ns, lines
