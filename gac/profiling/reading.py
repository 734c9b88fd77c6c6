"""The strict reader of profiles: every line, every number, and the references between lines.

A million lines are decoded some thousand at a time into columns. Where a chunk has anything unusual, its lines are
read one by one, so that an error names the line.
"""

import gc
import hashlib
import io
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
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

from gac.core.arrays import Bools, Floats, Ints
from gac.core.errors import ProfileError
from gac.core.untrusted import parse_strictly
from gac.profiling.records import (
    SCHEMA,
    AgainLine,
    Header,
    HeaderLine,
    HostLine,
    KernelLine,
    Line,
    LostLine,
    RowLine,
    SentinelLine,
    SharedLine,
)
from gac.profiling.rows import Kind, Rows

_CHUNK_BYTES = 2**19
_LONGEST_LINE = 2**20
_SHOWN = 40

_KINDS: tuple[Any, ...] = (RowLine, AgainLine, SentinelLine, KernelLine, LostLine, SharedLine, HostLine, HeaderLine)
_KIND_NUMBER: dict[Any, int] = {kind: number for number, kind in enumerate(_KINDS)}
_KEYS = {kind: 1 + len(kind.__struct_fields__) - (kind is RowLine) for kind in _KINDS}  # a row's error is left out
_UNUSUAL = (b"\\", b"\x7f", b"\t", b"\r", b" :")
_DECODER: Any = msgspec.json.Decoder(reduce(or_, _KINDS))


@dataclass(frozen=True)
class Contents:
    """A profile's header, its measurements in the order of their rows, and the SHA-256 of all bytes.

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
    """Read a profile, some lines at a time; anything after the last newline is ignored.

    Raises:
        ProfileError: something is wrong, with ``source``, line and field.
    """
    digest = hashlib.sha256()
    chunks = _chunks(file, digest)
    first, more, rest = next(chunks, b"").partition(b"\n")
    if not first:
        raise malformed(f"profile {source} has no complete line")
    reader = _Reader(source, _header(first, f"{source}:1"))
    collecting = gc.isenabled()
    gc.disable()  # decoded lines have no cycles; looking for them would take a third of the time
    try:
        for chunk in chain([rest] if more else [], chunks):
            reader.add(chunk)
        return Contents(reader.header, *reader.rows_and_sentinels(), digest.hexdigest())
    finally:
        if collecting:
            gc.enable()


def malformed(problem: str) -> ProfileError:
    return ProfileError(
        problem,
        "JSON Lines as gac profile writes them: a header, then kernel names and rows",
        "Restore the file, or measure again with gac profile.",
    )


def _chunks(file: BinaryIO, digest: Any) -> Iterator[bytes]:
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
        ProfileError: the line is wrong, with ``where`` and the field.
    """
    _check_length(line, where)
    try:
        record: Line = _DECODER.decode(line)
    except (ValueError, RecursionError) as failure:
        raise malformed(f"{where}: {_complaint(failure)}") from failure
    try:
        parse_strictly(line)
    except ValueError as failure:
        raise malformed(f"{where}: {failure}") from failure
    return record


def _check_length(line: bytes, where: str) -> None:
    if len(line) > _LONGEST_LINE:
        raise malformed(f"{where}: a line of over {_LONGEST_LINE:,} bytes")


def _complaint(failure: Exception) -> str:
    if not isinstance(failure, msgspec.ValidationError):
        return f"the line: Invalid JSON: {failure}"
    message, _, path = str(failure).partition(" - at `$.")
    field = re.search(r"field `(.+)`$", message)
    path = ".".join(filter(None, (path.removesuffix("`"), field and field[1])))
    return f"{path or 'the line'}: {message}"


def _read_lines(text: bytes, source: str | Path, before: int) -> Sequence[Any]:
    if _is_usual(text):
        with suppress(ValueError, RecursionError):
            records: Sequence[Any] = _DECODER.decode_lines(text)
            if len(records) == text.count(b"\n") + 1 and _count_keys(records) == text.count(b'":'):
                return records
    return [read_line(line, f"{source}:{before + number}") for number, line in enumerate(text.split(b"\n"), 1)]


def _is_usual(text: bytes) -> bool:
    """Return True if each line is one object, no string holds an escape or a control character, and keys end in ``":``.

    More of these than keys mean that a key is there twice (or that a string begins with a colon).
    """
    breaks = text.count(b"}\n{") == text.count(b"\n") and text.startswith(b"{") and text.endswith(b"}")
    return breaks and len(text) <= _LONGEST_LINE and text.isascii() and not any(mark in text for mark in _UNUSUAL)


def _count_keys(records: Sequence[Any]) -> int:
    fixed = sum(_KEYS[kind] * lines for kind, lines in Counter(map(type, records)).items())
    return fixed + sum(len(line.shape) + (line.error is not None) for line in records if type(line) is RowLine)


def _header(line: bytes, where: str) -> Header:
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


# --- columns --------------------------------------------------------------------------------------------------------


class _Reader:
    """Collects the lines of a file as columns, chunk by chunk.

    Attributes:
        rows: by chunk the line numbers, kinds, launches, medians, IQRs, samples, clocks and convergence of rows.
        sizes: by chunk the sizes of the rows' shapes.
        kinds, launches: the distinct ones, numbered in the order in which they first occur.
        references: by chunk whether lines say that a row is lost, those rows, and the lines' numbers.
        again: by chunk the rows of later passes, and the times.
        errors, lost: by row, why it has no number, from the first or any more.
    """

    def __init__(self, source: str | Path, header: Header) -> None:
        self.source, self.header = source, header
        self.lines, self.count = 1, 0
        self.kernels: list[KernelLine] = []
        self.kernel_lines: list[int] = []
        self.kinds: dict[Any, int] = defaultdict(count().__next__)
        self.launches: dict[Any, int] = defaultdict(count().__next__)
        self.rows = [_empty(int, int, int, float, float, int, float, bool)]
        self.sizes = [*_empty(int)]
        self.references = [_empty(bool, int, int)]
        self.again = [_empty(int, float)]
        self.sentinels: dict[int, list[float]] = defaultdict(list)
        self.errors: dict[int, str] = {}
        self.lost: dict[int, str] = {}

    def add(self, chunk: bytes) -> None:
        records = _read_lines(chunk, self.source, self.lines)
        kinds = np.fromiter(map(_KIND_NUMBER.__getitem__, map(type, records)), np.int64, len(records))
        for number in np.unique(kinds).tolist():
            chosen = np.flatnonzero(kinds == number)
            self._add(_KINDS[number], [records[index] for index in chosen.tolist()], self.lines + 1 + chosen)
        self.lines += len(records)

    def _add(self, kind: Any, records: Sequence[Any], lines: Ints) -> None:
        if kind is RowLine:
            self._add_rows(records, lines)
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
            self.references.append((np.full(len(rows), kind is LostLine), np.array(rows), lines))

    def _add_rows(self, rows: Sequence[RowLine], lines: Ints) -> None:
        fields = zip(*map(astuple, rows), strict=True)
        operators, shapes, dtypes, caches, medians, iqrs, samples, clocks, converged, launches, errors = fields
        ns, iqr, clock = (np.array(values, float) for values in (medians, iqrs, clocks))  # NaN where there is none
        failed = np.array([error is not None for error in errors])
        wrong = (np.isnan(ns) != failed) | (np.isnan(iqr) != failed)
        contradiction = "median_ns: {0.median_ns} with iqr_ns {0.iqr_ns} and error {0.error!r}"
        self._refuse(lines, wrong, lambda index: contradiction.format(rows[index]))
        self.errors |= {self.count + index: errors[index] for index in np.flatnonzero(failed).tolist()}
        kinds = map(self.kinds.__getitem__, zip(operators, dtypes, caches, map(tuple, shapes), strict=True))
        kind, launched = np.array(list(kinds)), np.array(list(map(self.launches.__getitem__, launches)))
        self.rows.append((lines, kind, launched, ns, iqr, np.array(samples), clock, np.array(converged)))
        self.sizes.append(np.array(list(chain.from_iterable(map(dict.values, shapes)))))
        self.count += len(rows)

    def _refuse(self, lines: Ints, wrong: Bools, message: Callable[[int], str]) -> None:
        """Raise for the first of the lines that is wrong; ``message`` describes it by its index."""
        if wrong.any():
            index = int(np.argmax(wrong))
            raise malformed(f"{self.source}:{lines[index]}: {message(index)}")

    def rows_and_sentinels(self) -> tuple[Rows, Mapping[int, tuple[float, ...]]]:
        line, kind, launched, ns, iqr, samples, clock, converged = map(np.concatenate, zip(*self.rows, strict=True))
        again, again_ns = map(np.concatenate, zip(*self.again, strict=True))
        self._check_axes(kind, line)
        self._check_launches(launched, line)
        self._check_references(line, *map(np.concatenate, zip(*self.references, strict=True)))
        lost = list(self.lost)
        ns[lost], iqr[lost], converged[lost] = np.nan, np.nan, False
        valid = ~np.isin(again, lost)
        passes = _passes(ns, again[valid], again_ns[valid])
        clock = np.nan_to_num(clock).astype(np.int64)
        columns = kind, self._shapes(kind), iqr, samples, clock, converged, launched
        kinds, errors = tuple(Kind(*key) for key in self.kinds), self.errors | self.lost
        rows = Rows(kinds, *columns, tuple(self.launches), tuple(self.kernels), errors, *passes)
        if (twice := rows.first_duplicate()) is not None:
            point = rows[twice]
            raise malformed(f"{self.source}:{line[twice]}: {point.operator} {point.shape} is there twice")
        return rows, {row: tuple(times) for row, times in self.sentinels.items()}

    def _check_axes(self, kind: Ints, lines: Ints) -> None:
        known: dict[str, tuple[str, ...]] = {}
        for (operator, _, _, axes), number in self.kinds.items():
            if (expected := known.setdefault(operator, axes)) != axes:
                problem = f"shape: {operator} has axes {', '.join(axes)}, above {', '.join(expected)}"
                raise malformed(f"{self.source}:{lines[np.argmax(kind == number)]}: {problem}")

    def _check_launches(self, launched: Ints, lines: Ints) -> None:
        """Refuse rows whose kernels are not above them."""
        first = lines[np.diff(np.maximum.accumulate(launched), prepend=-1) > 0]  # each number where it is new
        highest = np.array([max(launches, default=(-1,))[0] for launches in self.launches], dtype=np.int64)
        above = np.searchsorted(self.kernel_lines, first)
        self._refuse(first, highest >= above, lambda i: f"launches: kernel {highest[i]} of {above[i]} above it")

    def _check_references(self, row_lines: Ints, lost: Bools, rows: Ints, lines: Ints) -> None:
        """Refuse references to rows that are not above, or that have no number (any more)."""
        above, targets = np.searchsorted(row_lines, lines), np.minimum(rows, self.count)
        last = np.full(self.count + 1, self.lines)
        last[[*self.errors, self.count]] = 0
        np.minimum.at(last, targets[lost], lines[lost])
        wrong = (rows >= above) | (lines > last[targets])
        self._refuse(lines, wrong, lambda i: f"row: {rows[i]} is none of the {above[i]} rows above it with a number")

    def _shapes(self, kind: Ints) -> Ints:
        counts = np.array([len(axes) for *_, axes in self.kinds], dtype=np.int64)[kind]
        sizes = np.zeros((len(kind), counts.max(initial=0)), dtype=np.int64)
        sizes[np.arange(sizes.shape[1]) < counts[:, None]] = np.concatenate(self.sizes)
        return sizes


def _empty(*dtypes: type) -> tuple[Any, ...]:
    return tuple(np.empty(0, dtype) for dtype in dtypes)


def _passes(ns: Floats, again: Ints, again_ns: Floats) -> tuple[Floats, Ints]:
    """Return the times of all passes, row by row, and where each row's begin; a row without a number has none."""
    first = np.flatnonzero(~np.isnan(ns))
    rows = np.concatenate([first, again])
    starts = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(ns)))])
    return np.concatenate([ns[first], again_ns])[np.argsort(rows, kind="stable")], starts
