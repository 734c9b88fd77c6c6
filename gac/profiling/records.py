"""What a profile file holds: a header, measurements, and the strict reading of the lines they are written as.

The file is JSON Lines: the header first; then, as they are measured, the kernels, a row for every point, and a short
line for every later pass over a row, for every time a sentinel was timed, for a row at which the GPU failed later, and
for others who used the GPU when the file was resumed.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from gac.errors import ProfileError
from gac.forms import Operation

SCHEMA = 2
DTYPE_NAMES = ("bf16", "fp16", "fp8")
_STRICT = {"extra": "forbid", "allow_inf_nan": False}
_INCIDENTAL = frozenset({"date", "gac_version", "shared_with"})

_LARGEST = 2**50
_SHOWN = 40
_SHORTEST_NS, _LONGEST_NS = 1e-3, 1e15

Cache = Literal["cold", "hot"]
Extent = tuple[int, int, int]


@dataclass(frozen=True)
class Header:
    """Which machine and software a profile was measured on; clocks in MHz, power in W, memory in bytes.

    Attributes:
        device: a digest of the GPU's serial UUID: two GPUs of one model never share a file.
        shared_memory_bytes: the most shared memory that a CTA can have.
        power_limit_w: None where the driver does not tell.
        dtype_policy: how GEMMs may accumulate.
        timing: how a number was come by.
        shared_with: who else used the GPU when the file was begun or resumed; empty where nobody did.
    """

    schema_version: int
    gpu: str
    device: str
    compute_capability: str
    sm_count: int
    l2_bytes: int
    memory_bytes: int
    shared_memory_bytes: int
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
    shared_with: str
    __pydantic_config__ = _STRICT

    def differences(self, other: "Header") -> tuple[str, ...]:
        """Names of the fields that say another machine or other software (the date, say, does not)."""
        ours, theirs = vars(self), vars(other)
        return tuple(name for name in ours if name not in _INCIDENTAL and ours[name] != theirs[name])


@dataclass(frozen=True)
class Point:
    """What is timed: an operation in a dtype, its operands in memory (``cold``) or in L2 (``hot``)."""

    operation: Operation
    dtype: str = "bf16"
    cache: Cache = "cold"


@dataclass(frozen=True)
class Launch:
    """One kernel that ran: its grid and block (CTAs and threads along x, y, z) and the shared memory of a CTA."""

    name: str
    grid: Extent
    block: Extent
    shared_bytes: int


@dataclass(frozen=True)
class Measurement:
    """One timed point. A sweep comes by several times, minutes apart, for what a burst of noise hides from one pass.

    Attributes:
        shape: size of each axis, as in ``gac.forms.Operation``.
        median_ns: the median of ``passes``.
        iqr_ns: interquartile range in ns of the first pass's samples.
        samples: how many replays the first pass timed.
        cache: whether the operands came from memory (``cold``) or lay in L2 (``hot``).
        sm_clock_mhz: SM clock in the first pass.
        converged: the first pass knew its median to within 1 %.
        launches: the kernels that ran, in order; empty where they are not known.
        error: why the point has no number (``median_ns`` and ``iqr_ns`` are then None).
        passes: the median in ns of each pass, in order.
    """

    operator: str
    shape: dict[str, int]
    dtype: str
    cache: Cache
    median_ns: float | None
    iqr_ns: float | None
    samples: int
    sm_clock_mhz: int | None
    converged: bool
    launches: tuple[Launch, ...] = ()
    error: str | None = None
    passes: tuple[float, ...] = ()

    @property
    def operation(self) -> Operation:
        return Operation(self.operator, tuple(self.shape.items()))

    @property
    def point(self) -> Point:
        return Point(self.operation, self.dtype, self.cache)

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels that ran, in order."""
        return tuple(launch.name for launch in self.launches)

    @property
    def spread_ns(self) -> float:
        """How far the number is to be trusted, in ns: the IQR of the samples, or of the passes if that is more."""
        ordered = sorted(self.passes)
        between = _quantile(ordered, 0.75) - _quantile(ordered, 0.25) if ordered else 0.0
        return max(self.iqr_ns or 0.0, between)

    def with_passes(self, passes: Sequence[float]) -> "Measurement":
        """This measurement with the medians of all its passes, the first one included."""
        return replace(self, median_ns=_quantile(sorted(passes), 0.5), passes=tuple(passes))

    def without_number(self, error: str) -> "Measurement":
        """This measurement with the reason why it does not count."""
        return replace(self, median_ns=None, iqr_ns=None, converged=False, error=error, passes=())


class DeviceLostError(Exception):
    """The GPU itself has failed: nothing more can be measured in this process. ``row`` says at which point, and why."""

    def __init__(self, row: Measurement) -> None:
        super().__init__(row.error)
        self.row = row


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
    """A kernel; rows refer to kernels by their order in the file."""

    record: Literal["kernel"]
    name: str
    block: Extent
    shared_bytes: int
    __pydantic_config__ = _STRICT


@dataclass(frozen=True)
class RowLine:
    """The first pass over a point. A launch is a kernel's place in the file and its grid along x, y and z."""

    record: Literal["row"]
    operator: str
    shape: dict[str, int]
    dtype: str
    cache: Cache
    median_ns: float | None
    iqr_ns: float | None
    samples: int
    sm_clock_mhz: int | None
    converged: bool
    launches: tuple[tuple[int, int, int, int], ...]
    error: str | None = None
    __pydantic_config__ = _STRICT


@dataclass(frozen=True)
class AgainLine:
    """A later pass over the row of this number, counted from 0."""

    record: Literal["again"]
    row: int
    median_ns: float
    __pydantic_config__ = _STRICT


@dataclass(frozen=True)
class SentinelLine:
    """The row of this number timed once more, beside the passes: it shows whether the machine drifts."""

    record: Literal["sentinel"]
    row: int
    median_ns: float
    __pydantic_config__ = _STRICT


@dataclass(frozen=True)
class LostLine:
    """The GPU failed when it came by the row of this number once more: from then on the row has no number."""

    record: Literal["lost"]
    row: int
    error: str
    __pydantic_config__ = _STRICT


@dataclass(frozen=True)
class SharedLine:
    """Who else used the GPU when the file was resumed."""

    record: Literal["shared"]
    shared_with: str
    __pydantic_config__ = _STRICT


Line = HeaderLine | KernelLine | RowLine | AgainLine | SentinelLine | LostLine | SharedLine


@cache
def _reader() -> Any:
    from typing import Annotated

    from pydantic import Field, TypeAdapter

    return TypeAdapter(Annotated[Line, Field(discriminator="record")])


@dataclass(frozen=True)
class Contents:
    """A profile's lines, put together: measurements in the order of their rows, kernels in the order of theirs.

    ``sentinels`` has, for the number of each row that was a sentinel, its timings in ns in order.
    """

    header: Header
    measurements: tuple[Measurement, ...]
    kernels: tuple[KernelLine, ...]
    sentinels: Mapping[int, tuple[float, ...]]


def parse(content: bytes, source: str | Path) -> Contents:
    """Read a profile's bytes.

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
            _check_header(header, f"{source}:{number}")
        elif isinstance(record, SharedLine):
            assert header is not None
            header = replace(header, shared_with=record.shared_with)
        else:
            table.take(record, f"{source}:{number}")
    assert header is not None
    sentinels = {row: tuple(timings) for row, timings in table.sentinels.items()}
    return Contents(header, table.measurements(), tuple(table.kernels), sentinels)


class _Rows:
    """The rows of a file while it is read."""

    def __init__(self) -> None:
        self.kernels: list[KernelLine] = []
        self.sentinels: dict[int, list[float]] = {}
        self._rows: list[Measurement] = []
        self._passes: list[list[float]] = []
        self._seen: set[tuple[str, tuple[int, ...], str, str]] = set()
        self._axes: dict[str, tuple[str, ...]] = {}
        self._launches: dict[tuple[int, int, int, int], Launch] = {}

    def measurements(self) -> tuple[Measurement, ...]:
        both = zip(self._rows, self._passes, strict=True)
        return tuple(row.with_passes(passes) if len(passes) > 1 else row for row, passes in both)

    def take(self, record: Line, where: str) -> None:
        if isinstance(record, KernelLine):
            self.kernels.append(record)
        elif isinstance(record, AgainLine):
            self._check_timing(record, where)
            self._passes[record.row].append(record.median_ns)
        elif isinstance(record, SentinelLine):
            self._check_timing(record, where)
            self.sentinels.setdefault(record.row, []).append(record.median_ns)
        elif isinstance(record, LostLine):
            self._check_known(record.row, where)
            self._rows[record.row] = self._rows[record.row].without_number(record.error)
            self._passes[record.row] = []
        elif isinstance(record, RowLine):
            self._row(record, where)

    def _check_timing(self, record: AgainLine | SentinelLine, where: str) -> None:
        self._check_known(record.row, where)
        if not _is_time(record.median_ns):
            raise _malformed(f"{where}: median_ns: {record.median_ns}")

    def _check_known(self, row: int, where: str) -> None:
        if not 0 <= row < len(self._rows) or not self._passes[row]:
            raise _malformed(f"{where}: row: {row} is none of the {len(self._rows)} rows above it with a number")

    def _row(self, record: RowLine, where: str) -> None:
        axes = tuple(record.shape)
        known = self._axes.setdefault(record.operator, axes)
        if known != axes:
            raise _malformed(f"{where}: shape: {record.operator} has axes {', '.join(axes)}, above {', '.join(known)}")
        _check_numbers(record, where)
        key = (record.operator, tuple(record.shape.values()), record.dtype, record.cache)
        if key in self._seen:
            raise _malformed(f"{where}: {record.operator} {record.shape} is there twice")
        self._seen.add(key)
        launches = tuple(self._launch(place, where) for place in record.launches)
        fields = {name: value for name, value in vars(record).items() if name not in {"record", "launches"}}
        passes = () if record.median_ns is None else (record.median_ns,)
        self._rows.append(Measurement(**fields, launches=launches, passes=passes))
        self._passes.append(list(passes))

    def _launch(self, place: tuple[int, int, int, int], where: str) -> Launch:
        """One object for each kernel and grid, however many rows launch it."""
        if place not in self._launches:
            number, *grid = place
            if not 0 <= number < len(self.kernels):
                raise _malformed(f"{where}: launches: kernel {number} of {len(self.kernels)} above it")
            if min(grid) < 1:
                raise _malformed(f"{where}: launches: a grid of {grid}")
            kernel = self.kernels[number]
            self._launches[place] = Launch(kernel.name, (grid[0], grid[1], grid[2]), kernel.block, kernel.shared_bytes)
        return self._launches[place]


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


def _check_numbers(row: RowLine, where: str) -> None:
    if not all(1 <= size <= _LARGEST for size in row.shape.values()):
        raise _malformed(f"{where}: shape: {row.shape} has a size below 1 or above 2**50")
    if row.dtype not in DTYPE_NAMES:
        raise _malformed(f"{where}: dtype: {row.dtype[:_SHOWN]!r}")
    if row.samples < 0 or (row.sm_clock_mhz is not None and row.sm_clock_mhz < 1):
        raise _malformed(f"{where}: samples {row.samples} at sm_clock_mhz {row.sm_clock_mhz}")
    if (row.median_ns is None) == (row.error is None) or (row.median_ns is None) != (row.iqr_ns is None):
        raise _malformed(f"{where}: median_ns: {row.median_ns} with iqr_ns {row.iqr_ns} and error {row.error!r}")
    if row.median_ns is not None and row.iqr_ns is not None and not (_is_time(row.median_ns) and row.iqr_ns >= 0):
        raise _malformed(f"{where}: median_ns: {row.median_ns} with iqr_ns {row.iqr_ns}")


def _is_time(ns: float) -> bool:
    """From a picosecond to some days."""
    return _SHORTEST_NS <= ns <= _LONGEST_NS
