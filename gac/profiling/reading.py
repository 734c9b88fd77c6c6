"""The strict reader of profiles: every line, every number, and the references between lines."""

import hashlib
import io
import re
from array import array
from collections import defaultdict
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from gac.core.arrays import Ints
from gac.core.errors import ProfileError
from gac.core.untrusted import parse_strictly
from gac.profiling import records
from gac.profiling.records import SCHEMA, AgainLine, Header, HostLine, KernelLine, Line, LostLine, RowLine
from gac.profiling.rows import Kind, Rows

_LONGEST_LINE = 2**20
_SHOWN = 40

_UNUSUAL = (b"\\", b"\x7f", b"\t", b"\r", b" :")
_DECODER: Any = msgspec.json.Decoder(records.AnyLine)


class Contents(NamedTuple):
    """A profile's header, its measurements, the SHA-256 of all bytes, and by row the timings in ns of sentinels."""

    header: Header
    measurements: Rows
    digest: str
    sentinels: Mapping[int, tuple[float, ...]]


def parse(content: bytes, source: str | Path) -> Contents:
    return read(io.BytesIO(content), source)


def read(file: BinaryIO, source: str | Path) -> Contents:
    """Read a profile line by line; anything after the last newline is ignored.

    Raises:
        ProfileError: something is wrong, with ``source``, line and field.
    """
    digest = hashlib.sha256()
    reader: _Reader | None = None
    while line := file.readline(_LONGEST_LINE + 2):
        digest.update(line)
        if line.endswith(b"\n"):
            line = line[:-1]
        elif len(line) <= _LONGEST_LINE:
            break
        if len(line) > _LONGEST_LINE:
            number = 1 if reader is None else reader.number + 1
            raise malformed(f"{source}:{number}: a line of over {_LONGEST_LINE:,} bytes")
        if reader is None:
            reader = _Reader(source, _header(line, f"{source}:1"))
        else:
            reader.add(line)
    if reader is None:
        raise malformed(f"profile {source} has no complete line")
    sentinels = {row: tuple(timings) for row, timings in reader.sentinels.items()}
    return Contents(reader.header, reader.measurements(), digest.hexdigest(), sentinels)


def malformed(problem: str) -> ProfileError:
    return ProfileError(
        problem,
        "JSON Lines as gac profile writes them: a header, then kernel names and rows",
        "Restore the file, or measure again with gac profile.",
    )


def read_line(line: bytes, where: str) -> Line:
    try:
        record: Line = _DECODER.decode(line)
    except (ValueError, RecursionError) as failure:
        raise malformed(f"{where}: {_complaint(failure)}") from failure
    if not _is_usual(line, record):
        try:
            parse_strictly(line)
        except ValueError as failure:
            raise malformed(f"{where}: {failure}") from failure
    return record


def _is_usual(line: bytes, record: Line) -> bool:
    """Return True for a row or a pass that no strict parser refuses: parsing every line twice takes too long.

    No string holds an escape or a control character, and there are as many ``":`` as keys, so that none is there twice.
    """
    if not isinstance(record, RowLine | AgainLine):
        return False
    keys = 1 + len(record.__struct_fields__)  # and the kind of the record
    if isinstance(record, RowLine):
        keys += len(record.shape) - (record.error is None)
    return line.isascii() and line.count(b'":') == keys and not any(mark in line for mark in _UNUSUAL)


def _complaint(failure: Exception) -> str:
    if not isinstance(failure, msgspec.ValidationError):
        return f"the line: Invalid JSON: {failure}"
    message, _, path = str(failure).partition(" - at `$.")
    field = re.search(r"field `(.+)`$", message)
    path = ".".join(filter(None, (path.removesuffix("`"), field and field[1])))
    return f"{path or 'the line'}: {message}"


def _header(line: bytes, where: str) -> Header:
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
    if not isinstance(record, records.HeaderLine):
        raise malformed(f"{where}: a {type(record).__struct_config__.tag} line")
    if not record.header.gpu.isprintable() or not record.header.gpu:
        raise malformed(f"{where}: header.gpu: {record.header.gpu[:_SHOWN]!r}")
    return record.header


class _Reader:
    """Collects the lines of a file in compact columns: a million rows fit in memory.

    Distinct ``kinds`` and ``launches`` are numbered in the order in which they first occur. ``sizes`` are those of the
    rows' shapes, one after the other.
    """

    def __init__(self, source: str | Path, header: Header) -> None:
        self.source, self.header, self.number = source, header, 1
        self.kernels: list[KernelLine] = []
        self.axes: dict[str, tuple[str, ...]] = {}
        self.kinds: dict[Kind, int] = defaultdict(count().__next__)
        self.launches: dict[Any, int] = defaultdict(count().__next__)
        self.lines, self.kind, self.launched, self.samples, self.clock = (array("q") for _ in range(5))
        self.iqr, self.converged, self.sizes = array("d"), array("b"), array("q")
        self.pass_rows, self.pass_ns = array("q"), array("d")
        self.sentinels: dict[int, list[float]] = defaultdict(list)
        self.errors: dict[int, str] = {}

    def add(self, line: bytes) -> None:
        self.number += 1
        record = read_line(line, f"{self.source}:{self.number}")
        if isinstance(record, RowLine):
            self._add_row(record)
        elif isinstance(record, AgainLine | LostLine):
            self._add_reference(record)
        elif isinstance(record, KernelLine):
            self.kernels.append(record)
        elif isinstance(record, records.SharedLine):
            self.header = replace(self.header, shared_with=record.shared_with)
        elif isinstance(record, HostLine):
            self.header = replace(self.header, link=record.link, others=record.others)
        else:
            self._refuse("a header line")

    def _refuse(self, problem: str) -> None:
        raise malformed(f"{self.source}:{self.number}: {problem}")

    def _add_row(self, row: RowLine) -> None:
        axes, above = tuple(row.shape), len(self.kernels)
        if len({row.median_ns is None, row.iqr_ns is None, row.error is not None}) > 1:
            self._refuse(f"median_ns: {row.median_ns} with iqr_ns {row.iqr_ns} and error {row.error!r}")
        if (expected := self.axes.setdefault(row.operator, axes)) != axes:
            self._refuse(f"shape: {row.operator} has axes {', '.join(axes)}, above {', '.join(expected)}")
        if (highest := max(row.launches, default=(-1,))[0]) >= above:
            self._refuse(f"launches: kernel {highest} of {above} above it")
        if row.error is not None:
            self.errors[len(self.lines)] = row.error
        if row.median_ns is not None:
            self.pass_rows.append(len(self.lines))
            self.pass_ns.append(row.median_ns)
        self.lines.append(self.number)
        self.kind.append(self.kinds[Kind(row.operator, row.dtype, row.cache, axes)])
        self.sizes.extend(row.shape.values())
        self.iqr.append(np.nan if row.iqr_ns is None else row.iqr_ns)
        self.samples.append(row.samples)
        self.clock.append(row.sm_clock_mhz or 0)
        self.converged.append(row.converged)
        self.launched.append(self.launches[row.launches])

    def _add_reference(self, record: AgainLine | LostLine) -> None:
        row, above = record.row, len(self.lines)
        if row >= above or row in self.errors:
            self._refuse(f"row: {row} is none of the {above} rows above it with a number")
        if isinstance(record, LostLine):
            self.errors[row] = record.error
        elif isinstance(record, records.SentinelLine):
            self.sentinels[row].append(record.median_ns)
        else:
            self.pass_rows.append(row)
            self.pass_ns.append(record.median_ns)

    def measurements(self) -> Rows:
        """Return the columns; the passes of a row without a number do not count."""
        lost = list(self.errors)
        kind, launched, samples, clock = map(np.array, (self.kind, self.launched, self.samples, self.clock))
        pass_rows, ns = np.array(self.pass_rows), np.array(self.pass_ns)
        iqr, converged = np.array(self.iqr), np.array(self.converged, dtype=np.bool_)
        iqr[lost], converged[lost] = np.nan, False
        valid = ~np.isin(pass_rows, lost)
        pass_rows, ns = pass_rows[valid], ns[valid]
        starts = np.concatenate([[0], np.cumsum(np.bincount(pass_rows, minlength=len(kind)))])
        passes = ns[np.argsort(pass_rows, kind="stable")]
        columns = kind, self._shapes(kind), iqr, samples, clock, converged, launched
        distinct = tuple(self.launches), tuple(self.kernels)
        rows = Rows(tuple(self.kinds), *columns, *distinct, self.errors, passes, starts)
        if (twice := rows.first_duplicate()) is not None:
            point = rows[twice]
            raise malformed(f"{self.source}:{self.lines[twice]}: {point.operator} {point.shape} is there twice")
        return rows

    def _shapes(self, kind: Ints) -> Ints:
        counts = np.array([len(known.axes) for known in self.kinds], dtype=np.int64)[kind]
        sizes = np.zeros((len(kind), counts.max(initial=0)), dtype=np.int64)
        sizes[np.arange(sizes.shape[1]) < counts[:, None]] = np.array(self.sizes)
        return sizes
