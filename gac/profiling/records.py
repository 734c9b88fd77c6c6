"""What a profile file holds: a header, measurements, and the strict reading of the lines they are written as.

The file is JSON Lines: the header first; then, as they are measured, the names of kernels, a row for every shape, and
a short line for every later pass over a row.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from gac.errors import ProfileError
from gac.forms import Operation

SCHEMA = 1
_STRICT = {"extra": "forbid", "allow_inf_nan": False}


@dataclass(frozen=True)
class Header:
    """Which machine and software a profile was measured on; clocks in MHz, power in W, memory in bytes.

    ``power_limit_w`` is None where the driver does not tell. ``dtype_policy`` says how GEMMs may accumulate and
    ``timing`` how a number was come by.
    """

    schema_version: int
    gpu: str
    compute_capability: str
    sm_count: int
    l2_bytes: int
    sm_clock_max_mhz: int
    memory_clock_mhz: int
    power_limit_w: float | None
    driver: str
    cuda: str
    cublas: str
    cudnn: str
    torch: str
    gac_version: str
    dtype_policy: str
    timing: str
    date: str
    __pydantic_config__ = _STRICT

    def differences(self, other: "Header") -> tuple[str, ...]:
        """Names of the fields that say another machine or other software (date and GAC's own version do not)."""
        ours, theirs = vars(self), vars(other)
        return tuple(name for name in ours if name not in {"date", "gac_version"} and ours[name] != theirs[name])


@dataclass(frozen=True)
class Measurement:
    """One timed shape. A sweep comes by several times, minutes apart, for what a burst of noise hides from one pass.

    Attributes:
        shape: size of each axis, as in ``gac.forms.Operation``.
        median_ns: the median of ``passes``.
        iqr_ns: interquartile range in ns of the first pass's samples, or of the passes if that is more.
        samples: how many replays the first pass timed.
        cache: whether the operands came from memory (``cold``) or lay in L2 (``hot``).
        sm_clock_mhz: SM clock in the first pass.
        converged: the first pass knew its median to within 1 %.
        kernels: names of the kernels that ran, in order; empty where they are not known.
        error: why the shape has no number (``median_ns`` and ``iqr_ns`` are then None).
        passes: the median in ns of each pass, in order.
    """

    operator: str
    shape: dict[str, int]
    dtype: str
    cache: Literal["cold", "hot"]
    median_ns: float | None
    iqr_ns: float | None
    samples: int
    sm_clock_mhz: int | None
    converged: bool
    kernels: tuple[str, ...] = ()
    error: str | None = None
    passes: tuple[float, ...] = ()

    @property
    def operation(self) -> Operation:
        return Operation(self.operator, tuple(self.shape.items()))

    def with_passes(self, passes: Sequence[float]) -> "Measurement":
        """This measurement with the medians of all its passes, the first one included."""
        ordered = sorted(passes)
        between = _quantile(ordered, 0.75) - _quantile(ordered, 0.25)
        within = self.iqr_ns or 0.0
        return replace(self, median_ns=_quantile(ordered, 0.5), iqr_ns=max(within, between), passes=tuple(passes))


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Linear interpolation between order statistics, as numpy does it, without its overhead on three numbers."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


@dataclass(frozen=True)
class HeaderLine:
    record: Literal["header"]
    header: Header
    __pydantic_config__ = _STRICT


@dataclass(frozen=True)
class KernelLine:
    """A kernel's name; rows refer to the names by their order in the file."""

    record: Literal["kernel"]
    name: str
    __pydantic_config__ = _STRICT


@dataclass(frozen=True)
class RowLine:
    record: Literal["row"]
    operator: str
    shape: dict[str, int]
    dtype: str
    cache: Literal["cold", "hot"]
    median_ns: float | None
    iqr_ns: float | None
    samples: int
    sm_clock_mhz: int | None
    converged: bool
    kernels: tuple[int, ...]
    error: str | None = None
    __pydantic_config__ = _STRICT


@dataclass(frozen=True)
class AgainLine:
    """A later pass over the row of this number, counted from 0."""

    record: Literal["again"]
    row: int
    median_ns: float
    __pydantic_config__ = _STRICT


Line = HeaderLine | KernelLine | RowLine | AgainLine


@cache
def _reader() -> Any:
    from typing import Annotated

    from pydantic import Field, TypeAdapter

    return TypeAdapter(Annotated[Line, Field(discriminator="record")])


Contents = tuple[Header, tuple[Measurement, ...], tuple[str, ...]]


def parse(content: bytes, source: str | Path) -> Contents:
    """Read a profile's bytes: header, measurements in the order of their rows, and the kernels' names in order.

    Raises:
        ProfileError: with ``source``, line and field, at the first thing that is wrong.
    """
    lines = content.split(b"\n")[:-1]
    if not lines:
        raise _malformed(f"profile {source} has no complete line")
    _check_version(lines[0], f"{source}:1")
    header: Header | None = None
    table = _Rows()
    for number, line in enumerate(lines, start=1):
        record = _read_line(line, f"{source}:{number}")
        if (record.record == "header") != (number == 1):
            raise _malformed(f"{source}:{number}: a {record.record} line")
        if isinstance(record, HeaderLine):
            header = record.header
        else:
            table.take(record, f"{source}:{number}")
    assert header is not None
    return header, table.measurements(), tuple(table.names)


class _Rows:
    """The rows of a file while it is read."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._rows: list[Measurement] = []
        self._passes: list[list[float]] = []
        self._seen: set[tuple[str, tuple[int, ...], str, str]] = set()
        self._axes: dict[str, tuple[str, ...]] = {}

    def measurements(self) -> tuple[Measurement, ...]:
        both = zip(self._rows, self._passes, strict=True)
        return tuple(row.with_passes(passes) if len(passes) > 1 else row for row, passes in both)

    def take(self, record: Line, where: str) -> None:
        if isinstance(record, KernelLine):
            self.names.append(record.name)
        elif isinstance(record, AgainLine):
            self._again(record, where)
        elif isinstance(record, RowLine):
            self._row(record, where)

    def _again(self, record: AgainLine, where: str) -> None:
        if not 0 <= record.row < len(self._rows) or not self._passes[record.row]:
            raise _malformed(f"{where}: row: {record.row} is none of the {len(self._rows)} rows above it with a number")
        if record.median_ns <= 0:
            raise _malformed(f"{where}: median_ns: {record.median_ns}")
        self._passes[record.row].append(record.median_ns)

    def _row(self, record: RowLine, where: str) -> None:
        axes = tuple(record.shape)
        known = self._axes.setdefault(record.operator, axes)
        if known != axes:
            raise _malformed(f"{where}: shape: {record.operator} has axes {', '.join(axes)}, above {', '.join(known)}")
        row = _measurement(record, self.names, where)
        key = (row.operator, tuple(row.shape.values()), row.dtype, row.cache)
        if key in self._seen:
            raise _malformed(f"{where}: {row.operator} {row.shape} is there twice")
        self._seen.add(key)
        self._rows.append(row)
        self._passes.append([] if row.median_ns is None else [row.median_ns])


def _malformed(given: str) -> ProfileError:
    return ProfileError(
        given,
        "JSON Lines as gac profile writes them: a header, then kernel names and rows",
        "Restore the file, or measure again with gac profile.",
    )


def _check_version(line: bytes, where: str) -> None:
    """Say 'another version' before complaining about that version's fields."""
    try:
        version = json.loads(line)["header"]["schema_version"]
    except (ValueError, KeyError, TypeError) as failure:
        raise _malformed(f"{where}: no header with a schema_version") from failure
    if version != SCHEMA:
        raise ProfileError(
            f"{where}: header.schema_version is {version!r}",
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
    return record


def _measurement(row: RowLine, names: Sequence[str], where: str) -> Measurement:
    if any(size < 1 for size in row.shape.values()):
        raise _malformed(f"{where}: shape: {row.shape} has a size below 1")
    if (row.median_ns is None) == (row.error is None) or (row.median_ns is None) != (row.iqr_ns is None):
        raise _malformed(f"{where}: median_ns: {row.median_ns} with iqr_ns {row.iqr_ns} and error {row.error!r}")
    if row.median_ns is not None and row.iqr_ns is not None and (row.median_ns <= 0 or row.iqr_ns < 0):
        raise _malformed(f"{where}: median_ns: {row.median_ns} with iqr_ns {row.iqr_ns}")
    if any(not 0 <= index < len(names) for index in row.kernels):
        raise _malformed(f"{where}: kernels: {list(row.kernels)} of {len(names)} names above it")
    kernels = tuple(names[index] for index in row.kernels)
    return Measurement(
        row.operator,
        row.shape,
        row.dtype,
        row.cache,
        row.median_ns,
        row.iqr_ns,
        row.samples,
        row.sm_clock_mhz,
        row.converged,
        kernels,
        row.error,
        () if row.median_ns is None else (row.median_ns,),
    )
