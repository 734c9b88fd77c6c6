"""What a profile holds: a header, and a measurement for every point that was timed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median, quantiles
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from gac.core.operations import Operation

SCHEMA = 2
LARGEST = 2**50
Count = Annotated[int, Meta(ge=1, le=LARGEST)]

Cache = Literal["cold", "hot"]
Extent = tuple[int, int, int]


class Header(Struct, frozen=True, forbid_unknown_fields=True):
    """Which machine and software a profile was measured on; clocks in MHz, power in W, memory in bytes.

    Attributes:
        device: a digest of the GPU's serial UUID: two GPUs of one model never share a file.
        shared_memory_bytes: the most shared memory that a CTA can have.
        power_limit_w: None where the driver does not tell.
        dtype_policy: how GEMMs may accumulate.
        timing: how each number was obtained.
        shared_with: who else used the GPU when the file was begun or resumed; empty where nobody did.
        triton: the version of Triton, whose kernels multiply weights in the storage of a scheme; None where there was
            none, or where the file is from before it was kept.
        link: how the GPUs of the host reach each other, ``NVLink`` or ``PCIe``; None where no collective was measured.
        others: digests as ``device`` of the GPUs that measured beside it, and were found to be like it.
    """

    schema_version: int
    gpu: str
    device: str
    compute_capability: Annotated[str, Meta(pattern=r"^\d{1,3}\.\d{1,3}$")]
    sm_count: Count
    l2_bytes: Count
    memory_bytes: Count
    shared_memory_bytes: Count
    sm_clock_max_mhz: Count
    memory_clock_mhz: Count
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
    triton: str | None = None
    link: str | None = None
    others: tuple[str, ...] = ()

    @property
    def libraries(self) -> str:
        """CUDA and what multiplies, with their versions; Triton where it is known."""
        triton = "" if self.triton is None else f", Triton {self.triton}"
        return f"CUDA {self.cuda}, cuBLAS {self.cublas}, cuDNN {self.cudnn}, PyTorch {self.torch}{triton}"


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
    """One timed point. A sweep times it in several passes, minutes apart, so that no burst of noise hits them all.

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

    @classmethod
    def of(cls, point: Point, *numbers: Any, **more: Any) -> "Measurement":
        """The measurement of a point; the rest are the fields from ``median_ns`` on."""
        return cls(point.operation.operator, point.operation.axes, point.dtype, point.cache, *numbers, **more)

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
        """The noise of the number in ns: the IQR of the samples, or of the passes if that is more."""
        if len(self.passes) < 2:
            return self.iqr_ns or 0.0
        low, _, high = quantiles(self.passes, n=4, method="inclusive")
        return max(self.iqr_ns or 0.0, high - low)

    def with_passes(self, passes: Sequence[float]) -> "Measurement":
        """This measurement with the medians of all its passes, the first one included."""
        return replace(self, median_ns=float(median(passes)), passes=tuple(passes))


class DeviceLostError(Exception):
    """The GPU itself has failed: nothing more can be measured in this process. ``row`` says at which point, and why."""

    def __init__(self, row: Measurement) -> None:
        super().__init__(row.error)
        self.row = row

    def __reduce__(self) -> tuple[Any, ...]:
        return DeviceLostError, (self.row,)

    @property
    def at(self) -> str:
        """The point and why, in words."""
        axes = " ".join(f"{axis}={size}" for axis, size in self.row.shape.items())
        return f"{self.row.operator} {self.row.dtype} {axes}: {self.row.error}"
