"""What a profile file holds: a header, measurements, and the lines they are written as.

The file is JSON Lines: the header first; then, as they are measured, the kernels, a row for every point, and a short
line for every later pass over a row, for every time a sentinel was timed, for a row at which the GPU failed later, and
for others who used the GPU when the file was resumed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gac.operations import Operation

SCHEMA = 2
DTYPE_NAMES = ("bf16", "fp16", "fp8")
_STRICT = {"extra": "forbid", "allow_inf_nan": False}
_INCIDENTAL = frozenset({"date", "gac_version", "shared_with"})

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
