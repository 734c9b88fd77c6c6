"""The strict reader of profiles: every line, every number, and what lines say about one another.

A million lines are decoded some thousand at a time into columns of numbers. Where a chunk of lines is odd in any way,
its lines are read one by one, which names the wrong one.
"""

import gc
import hashlib
import io
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from itertools import chain, count
from operator import or_
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
from msgspec.structs import astuple, replace

from gac.core.arrays import Floats, Ints
from gac.core.errors import ProfileError
from gac.core.untrusted import parse_strictly
from gac.profiling.lines import (
    AgainLine,
    HeaderLine,
    HostLine,
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

_KINDS: tuple[Any, ...] = (RowLine, AgainLine, SentinelLine, KernelLine, LostLine, SharedLine, HostLine, HeaderLine)
_PLACE: dict[Any, int] = {kind: place for place, kind in enumerate(_KINDS)}
_KEYS = {kind: 1 + len(kind.__struct_fields__) - (kind is RowLine) for kind in _KINDS}  # a row's error is left out
_ODD = (b"\\", b"\x7f", b"\t", b"\r", b" :")
_LINE: Any = reduce(or_, _KINDS)
_DECODER: Any = msgspec.json.Decoder(_LINE)


@dataclass(frozen=True)
class Contents:
    """A profile's lines, put together: measurements in the order of their rows, and the SHA-256 of all bytes.

    ``sentinels`` has, for the number of each row that was a sentinel, its timings in ns in order.
    """

    header: Header
    measurements: Rows
    sentinels: Mapping[int, tuple[float, ...]]
    digest: str


def parse(content: bytes, source: str | Path) -> Contents:
    """``read`` a profile's bytes."""
    return read(io.BytesIO(content), source)


def read(file: BinaryIO, source: str | Path) -> Contents:
    """Read a profile, some lines at a time; what follows the last newline is ignored.

    Raises:
        ProfileError: with ``source``, line and field, where something is wrong.
    """
    digest = hashlib.sha256()
    chunks = _chunks(file, digest)
    first, more, rest = next(chunks, b"").partition(b"\n")
    if not first:
        raise malformed(f"profile {source} has no complete line")
    reader = _Reader(source, _header(first, f"{source}:1"))
    collecting = gc.isenabled()
    gc.disable()  # what is read has no cycles; looking for them would take a third of the time
    try:
        for chunk in chain([rest] if more else [], chunks):
            reader.take(chunk)
        return Contents(reader.header, *reader.rows_and_sentinels(), digest.hexdigest())
    finally:
        if collecting:
            gc.enable()


def malformed(given: str) -> ProfileError:
    return ProfileError(
        given,
        "JSON Lines as gac profile writes them: a header, then kernel names and rows",
        "Restore the file, or measure again with gac profile.",
    )


def _chunks(file: BinaryIO, digest: Any) -> Iterator[bytes]:
    """Whole lines, few enough that their objects stay near a core, without the last newline.

    What follows the last newline is dropped, unless it is too long to be a line.
    """
    rest = b""
    while block := file.read(_CHUNK_BYTES):
        digest.update(block)
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
    try:
        parse_strictly(line)
    except ValueError as failure:
        raise malformed(f"{where}: {failure}") from failure
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


def _read_lines(text: bytes, source: str | Path, before: int) -> Sequence[Any]:
    """Some lines, decoded together; where any of them may be odd, they are read one by one.

    Args:
        before: how many lines are above the first.
    """
    if _is_orderly(text):
        with suppress(ValueError, RecursionError):
            records = _DECODER.decode_lines(text)
            if len(records) == text.count(b"\n") + 1 and _keys(records) == text.count(b'":'):
                return records  # type: ignore[no-any-return]
    return [read_line(line, f"{source}:{before + at}") for at, line in enumerate(text.split(b"\n"), 1)]


def _is_orderly(text: bytes) -> bool:
    """Whether each line is one object, no string holds an escape or a control character, and each key ends in ``":``.

    Where there are more of these than keys, a key is there twice (or a string begins with a colon).
    """
    breaks = text.count(b"}\n{") == text.count(b"\n") and text.startswith(b"{") and text.endswith(b"}")
    return breaks and len(text) <= _LONGEST_LINE and text.isascii() and not any(odd in text for odd in _ODD)


def _keys(records: Sequence[Any]) -> int:
    """How many keys some lines have."""
    fixed = sum(_KEYS[kind] * lines for kind, lines in Counter(map(type, records)).items())
    return fixed + sum(len(one.shape) + (one.error is not None) for one in records if type(one) is RowLine)


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
    if not record.header.gpu.isprintable() or not record.header.gpu:
        raise malformed(f"{where}: header.gpu: {record.header.gpu[:_SHOWN]!r}")
    return record.header


# --- what they say together -----------------------------------------------------------------------------------------


class _Reader:
    """The lines of a file as columns, some thousand at a time.

    Attributes:
        rows: of each chunk the line numbers, kinds, launches, medians, IQRs, samples, clocks and convergence of rows.
        sizes: of each chunk the sizes of its shapes, row by row.
        kinds, launches: what those of rows are, numbered in the order in which they first occur.
        said: of each chunk what is said of rows: whether they are lost, the rows, and the line numbers.
        again: of each chunk the rows of later passes, and the times.
        sentinels: by row, its timings.
        errors, lost: by row, why it has no number, from the first or any more.
    """

    def __init__(self, source: str | Path, header: Header) -> None:
        self.source, self.header = source, header
        self.lines, self.count = 1, 0
        self.kernels: list[KernelLine] = []
        self.kernel_lines: list[int] = []
        self.kinds: dict[Any, int] = defaultdict(count().__next__)
        self.launches: dict[Any, int] = defaultdict(count().__next__)
        self.rows = [_no_lines(int, int, int, float, float, int, float, bool)]
        self.sizes = [*_no_lines(int)]
        self.said = [_no_lines(bool, int, int)]
        self.again = [_no_lines(int, float)]
        self.sentinels: dict[int, list[float]] = defaultdict(list)
        self.errors: dict[int, str] = {}
        self.lost: dict[int, str] = {}

    def take(self, chunk: bytes) -> None:
        """Check some lines and keep what they say."""
        records = _read_lines(chunk, self.source, self.lines)
        kinds = np.fromiter(map(_PLACE.__getitem__, map(type, records)), np.int64, len(records))
        for place in np.unique(kinds).tolist():
            ours = np.flatnonzero(kinds == place)
            self._take(place, [records[at] for at in ours.tolist()], self.lines + 1 + ours)
        self.lines += len(records)

    def _take(self, place: int, records: Sequence[Any], lines: Ints) -> None:
        kind = _KINDS[place]
        if kind is RowLine:
            self._take_rows(records, lines)
        elif kind is KernelLine:
            self.kernels += records
            self.kernel_lines += lines.tolist()
        elif kind is SharedLine:
            self.header = replace(self.header, shared_with=records[-1].shared_with)
        elif kind is HostLine:
            self.header = replace(self.header, link=records[-1].link, others=records[-1].others)
        elif kind is HeaderLine:
            raise malformed(f"{self.source}:{lines[0]}: a header line")
        else:
            rows, values = zip(*map(astuple, records), strict=True)
            if kind is LostLine:
                self.lost |= zip(rows, values, strict=True)
            elif kind is SentinelLine:
                for row, ns in zip(rows, values, strict=True):
                    self.sentinels[row].append(ns)
            else:
                self.again.append((np.array(rows), np.array(values)))
            self.said.append((np.full(len(rows), kind is LostLine), np.array(rows), lines))

    def _take_rows(self, rows: Sequence[RowLine], lines: Ints) -> None:
        fields = zip(*map(astuple, rows), strict=True)
        operators, shapes, dtypes, caches, medians, iqrs, samples, clocks, converged, launches, errors = fields
        ns, iqr, clock = (np.array(values, float) for values in (medians, iqrs, clocks))  # NaN where there is none
        failed = np.array([error is not None for error in errors])
        wrong = (np.isnan(ns) != failed) | (np.isnan(iqr) != failed)
        contradiction = "median_ns: {0.median_ns} with iqr_ns {0.iqr_ns} and error {0.error!r}"
        self._refuse(lines, wrong, lambda at: contradiction.format(rows[at]))
        self.errors |= {self.count + at: errors[at] for at in np.flatnonzero(failed).tolist()}
        kinds = map(self.kinds.__getitem__, zip(operators, dtypes, caches, map(tuple, shapes), strict=True))
        kind, launched = np.array(list(kinds)), np.array(list(map(self.launches.__getitem__, launches)))
        self.rows.append((lines, kind, launched, ns, iqr, np.array(samples), clock, np.array(converged)))
        self.sizes.append(np.array(list(chain.from_iterable(map(dict.values, shapes)))))
        self.count += len(rows)

    def _refuse(self, lines: Ints, wrong: Any, message: Any) -> None:
        """Name the first of the lines that is wrong; ``message`` says what, by its number among them."""
        found = np.flatnonzero(wrong)
        if len(found):
            raise malformed(f"{self.source}:{lines[found[0]]}: {message(int(found[0]))}")

    def rows_and_sentinels(self) -> tuple[Rows, Mapping[int, tuple[float, ...]]]:
        """What the lines say together."""
        line, kind, launched, ns, iqr, samples, clock, converged = map(np.concatenate, zip(*self.rows, strict=True))
        again, again_ns = map(np.concatenate, zip(*self.again, strict=True))
        self._check_axes(kind, line)
        self._check_launches(launched, line)
        self._check_said(line, *map(np.concatenate, zip(*self.said, strict=True)))
        lost = list(self.lost)
        ns[lost], iqr[lost], converged[lost] = np.nan, np.nan, False
        kept = ~np.isin(again, lost)
        passes = _passes(ns, again[kept], again_ns[kept])
        clock = np.nan_to_num(clock).astype(np.int64)
        columns = kind, self._shapes(kind), iqr, samples, clock, converged, launched
        kinds, errors = tuple(Kind(*one) for one in self.kinds), self.errors | self.lost
        rows = Rows(kinds, *columns, tuple(self.launches), tuple(self.kernels), errors, *passes)
        if (twice := rows.repeated()) is not None:
            point = rows[twice]
            raise malformed(f"{self.source}:{line[twice]}: {point.operator} {point.shape} is there twice")
        return rows, {row: tuple(times) for row, times in self.sentinels.items()}

    def _check_axes(self, kind: Ints, lines: Ints) -> None:
        """All rows of an operator have the same axes."""
        known: dict[str, tuple[str, ...]] = {}
        for (operator, _, _, axes), number in self.kinds.items():
            if (expected := known.setdefault(operator, axes)) != axes:
                given = f"shape: {operator} has axes {', '.join(axes)}, above {', '.join(expected)}"
                raise malformed(f"{self.source}:{lines[np.argmax(kind == number)]}: {given}")

    def _check_launches(self, launched: Ints, lines: Ints) -> None:
        """The kernels of a row are above it."""
        first = lines[np.diff(np.maximum.accumulate(launched), prepend=-1) > 0]  # each number where it is new
        most = np.array([max(one, default=(-1,))[0] for one in self.launches], dtype=np.int64)
        above = np.searchsorted(self.kernel_lines, first)
        self._refuse(first, most >= above, lambda at: f"launches: kernel {most[at]} of {above[at]} above it")

    def _check_said(self, lines: Ints, lost: Any, rows: Ints, at: Ints) -> None:
        """What is said of a row, also that it is lost, is said below it and while it has a number."""
        above, places = np.searchsorted(lines, at), np.minimum(rows, self.count)
        last = np.full(self.count + 1, self.lines)
        last[[*self.errors, self.count]] = 0
        np.minimum.at(last, places[lost], at[lost])
        wrong = (rows >= above) | (at > last[places])
        self._refuse(at, wrong, lambda one: f"row: {rows[one]} is none of the {above[one]} rows above it with a number")

    def _shapes(self, kind: Ints) -> Ints:
        """Shape ``(rows, most axes)``, 0 beyond a row's own axes."""
        counts = np.array([len(axes) for *_, axes in self.kinds], dtype=np.int64)[kind]
        sizes = np.zeros((len(kind), counts.max(initial=0)), dtype=np.int64)
        sizes[np.arange(sizes.shape[1]) < counts[:, None]] = np.concatenate(self.sizes)
        return sizes


def _no_lines(*dtypes: type) -> tuple[Any, ...]:
    """Empty columns, so that there is something to join where a file has no such line."""
    return tuple(np.empty(0, dtype) for dtype in dtypes)


def _passes(ns: Floats, again: Ints, again_ns: Floats) -> tuple[Floats, Ints]:
    """The times of all passes, row by row, and where each row's begin; a row without a number has none."""
    first = np.flatnonzero(~np.isnan(ns))
    rows = np.concatenate([first, again])
    starts = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(ns)))])
    return np.concatenate([ns[first], again_ns])[np.argsort(rows, kind="stable")], starts
