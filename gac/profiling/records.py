"""Records of a profile: its header, a measurement for every timed point, and the lines of its file.

The file is JSON Lines: the header first; then, as they are measured, kernels, a row for every point, and short lines
for later passes, sentinels, failures, and what changed in the header when the file was resumed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median, quantiles
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from gac.core.operations import Operation

SCHEMA = 2
LARGEST = 2**50
Count = Annotated[int, Meta(ge=1, le=LARGEST)]
CountOrZero = Annotated[int, Meta(ge=0, le=LARGEST)]
Text = Annotated[str, Meta(max_length=2**16)]
Nanoseconds = Annotated[float, Meta(ge=1e-3, le=1e15)]  # from a picosecond to some days

Cache = Literal["cold", "hot"]
Extent = tuple[int, int, int]


class Header(Struct, frozen=True, forbid_unknown_fields=True):
    """Machine and software of a profile; clocks in MHz, power in W, memory in bytes."""

    schema_version: int
    gpu: str
    device: str  # a digest of the GPU's serial UUID: two GPUs of one model never share a file
    compute_capability: Annotated[str, Meta(pattern=r"^\d{1,3}\.\d{1,3}$")]
    sm_count: Count
    l2_bytes: Count
    memory_bytes: Count
    shared_memory_bytes: Count  # the most that a CTA can have
    sm_clock_max_mhz: Count
    memory_clock_mhz: Count
    power_limit_w: float | None
    driver: str
    cuda: str
    cublas: str
    cudnn: str
    torch: str
    gac_version: str
    dtype_policy: str  # how GEMMs may accumulate
    timing: str  # how each number was obtained
    date: str
    shared_with: str  # other users of the GPU when the file was begun or resumed; empty if there were none
    triton: str | None = None  # whose kernels multiply weights in the storage of a scheme; None if not recorded
    link: str | None = None  # ``NVLink`` or ``PCIe`` between the GPUs of the host; None if no collective was measured
    others: tuple[str, ...] = ()  # digests as ``device`` of the equal GPUs that measured at the same time

    @property
    def libraries(self) -> str:
        triton = "" if self.triton is None else f", Triton {self.triton}"
        return f"CUDA {self.cuda}, cuBLAS {self.cublas}, cuDNN {self.cudnn}, PyTorch {self.torch}{triton}"


@dataclass(frozen=True)
class Point:
    """An operation to time in a dtype, its operands in memory (``cold``) or in L2 (``hot``)."""

    operation: Operation
    dtype: str = "bf16"
    cache: Cache = "cold"

    def __str__(self) -> str:
        kind = self.dtype if self.cache == "cold" else f"{self.dtype} {self.cache}"
        return " ".join([self.operation.operator, kind, *(f"{axis}={size}" for axis, size in self.operation.shape)])


@dataclass(frozen=True)
class Launch:
    """A kernel that ran: its grid and block (CTAs and threads along x, y, z) and the shared memory of a CTA."""

    name: str
    grid: Extent
    block: Extent
    shared_bytes: int


@dataclass(frozen=True)
class Measurement:
    """One timed point. A sweep times it in several passes, minutes apart, so that no burst of noise hits them all."""

    operator: str
    shape: dict[str, int]
    dtype: str
    cache: Cache
    median_ns: float | None  # of ``passes``
    iqr_ns: float | None  # interquartile range of the samples of the first pass
    samples: int  # of the first pass, as the next two
    sm_clock_mhz: int | None
    converged: bool  # the median was known to within 1 %
    launches: tuple[Launch, ...] = ()  # the kernels that ran, in order; empty where they are not known
    error: str | None = None  # why the point has no number (``median_ns`` and ``iqr_ns`` are then None)
    passes: tuple[float, ...] = ()  # the median in ns of each pass, in order

    @classmethod
    def of(cls, point: Point, *numbers: Any, **more: Any) -> "Measurement":
        return cls(point.operation.operator, point.operation.axes, point.dtype, point.cache, *numbers, **more)

    @classmethod
    def failed(cls, point: Point, error: str) -> "Measurement":
        return cls.of(point, None, None, 0, None, False, error=error)

    @property
    def point(self) -> Point:
        return Point(Operation(self.operator, tuple(self.shape.items())), self.dtype, self.cache)

    @property
    def spread_ns(self) -> float:
        """Noise of the number in ns: the IQR of the samples, or of the passes if that is more."""
        if len(self.passes) < 2:
            return self.iqr_ns or 0.0
        low, _, high = quantiles(self.passes, n=4, method="inclusive")
        return max(self.iqr_ns or 0.0, high - low)

    def with_passes(self, passes: Sequence[float]) -> "Measurement":
        return replace(self, median_ns=float(median(passes)), passes=tuple(passes))


class DeviceLostError(Exception):
    """The GPU itself has failed: nothing more can be measured in this process. ``row`` says where and why."""

    def __init__(self, row: Measurement) -> None:
        super().__init__(row.error)
        self.row = row

    def __reduce__(self) -> tuple[Any, ...]:
        return DeviceLostError, (self.row,)

    def __str__(self) -> str:
        return f"{self.row.point}: {self.row.error}"


class Line(Struct, frozen=True, gc=False, tag_field="record", forbid_unknown_fields=True, omit_defaults=True): ...


class HeaderLine(Line, frozen=True, tag="header"):
    header: Header


class KernelLine(Line, frozen=True, tag="kernel"):
    """A kernel; rows refer to kernels by their order in the file."""

    name: Text
    block: tuple[CountOrZero, CountOrZero, CountOrZero]
    shared_bytes: CountOrZero


class RowLine(Line, frozen=True, tag="row"):
    """The first pass over a point. A launch is a kernel's number in the file and its grid along x, y and z."""

    operator: Text
    shape: Annotated[dict[str, Count], Meta(max_length=16)]  # each axis makes every row of the file wider
    dtype: Text  # of numbers, or of a scheme, which need not be registered here
    cache: Cache
    median_ns: Nanoseconds | None
    iqr_ns: Annotated[float, Meta(ge=0, le=1e15)] | None
    samples: CountOrZero
    sm_clock_mhz: Count | None
    converged: bool
    launches: tuple[tuple[CountOrZero, Count, Count, Count], ...]
    error: Text | None = None


class AgainLine(Line, frozen=True, tag="again"):
    """A later pass over the row of this number, counted from 0."""

    row: CountOrZero
    median_ns: Nanoseconds


class SentinelLine(AgainLine, frozen=True, tag="sentinel"):
    """A timing of the row of this number apart from the passes, to see whether the machine drifts."""


class LostLine(Line, frozen=True, tag="lost"):
    """The GPU failed when it timed the row of this number again: from then on the row has no number."""

    row: CountOrZero
    error: Text


class SharedLine(Line, frozen=True, tag="shared"):
    """Other users of the GPU when the file was resumed."""

    shared_with: Text


class HostLine(Line, frozen=True, tag="host"):
    """New values of the header's fields about other GPUs of the host."""

    link: Text | None
    others: tuple[Text, ...]


AnyLine = HeaderLine | KernelLine | RowLine | AgainLine | SentinelLine | LostLine | SharedLine | HostLine
