"""The measurements of a study, looked up by point, and the kernels that served a group of points."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from gac.core.errors import ProfileError
from gac.lab.studies.words import percent
from gac.profiling.kernel_names import Kernel, describe
from gac.profiling.operators import OPERATORS
from gac.profiling.records import Launch, Measurement, Point


class RefusedError(Exception):
    """The verdict rests on points that the GPU or its libraries refused; names them and the reasons."""


@dataclass(frozen=True)
class Readings:
    """Every point of a study with its measurement; of a refused point, figures are None."""

    study: str
    rows: Mapping[Point, Measurement]

    @classmethod
    def of(cls, study: str, points: Sequence[Point], find: Callable[[Point], Measurement | None]) -> "Readings":
        """Look every point up.

        Raises:
            ProfileError: some were not measured.
        """
        rows = {point: row for point in points if (row := find(point)) is not None}
        if missing := len(points) - len(rows):
            raise ProfileError(
                f"{missing} of the {len(points)} points of study {study} are not measured",
                "every one of them",
                f"Measure them with gac study {study}.",
            )
        return cls(study, rows)

    def ns(self, point: Point) -> float | None:
        """Median latency."""
        return self.rows[point].median_ns

    def ms(self, point: Point) -> float | None:
        return quotient(self.ns(point), 1e6)

    def us(self, point: Point) -> float | None:
        return quotient(self.ns(point), 1e3)

    def tflops(self, point: Point) -> float | None:
        """Throughput in TFLOP/s."""
        return quotient(quotient(flops(point), self.ns(point)), 1e3)

    def gb_s(self, point: Point) -> float | None:
        """Effective bandwidth in GB/s: the fewest bytes to move over the latency."""
        operation = point.operation
        return quotient(OPERATORS.get(operation.operator).bytes(operation.axes, point.dtype), self.ns(point))

    def ratio(self, slow: Point, fast: Point) -> float | None:
        """Latency of ``slow`` over that of ``fast``."""
        return quotient(self.ns(slow), self.ns(fast))

    def launches(self, point: Point) -> tuple[Launch, ...]:
        return self.rows[point].launches

    def require_kernels(self, points: Iterable[Point]) -> None:
        """Refuse to judge by kernels that were not recorded.

        Raises:
            ProfileError: a point that was timed has no kernels.
        """
        unknown = sum(self.ns(point) is not None and not self.launches(point) for point in points)
        if unknown:
            raise ProfileError(
                f"{unknown} points of study {self.study} were timed without recording their kernels",
                "the kernels that ran at each point",
                f"Measure them where CUPTI can be used, with gac study {self.study}.",
            )

    def median(self, values: Iterable[float | None], name: str) -> float:
        """The median of the values that were not refused.

        Raises:
            RefusedError: all were.
        """
        measured = known(values)
        if not measured:
            reasons = dict.fromkeys(row.error for row in self.rows.values() if row.error is not None)
            raise RefusedError(f"{name}: {'; '.join(reasons)}")
        return median(measured)

    @property
    def refusals(self) -> tuple[str, ...]:
        """One line a reason: the number of points refused for it, and the first of them."""
        points: dict[str, list[Point]] = {}
        for point, row in self.rows.items():
            if row.error is not None:
                points.setdefault(row.error, []).append(point)
        return tuple(
            f"refused: {label(refused[0])}{f' and {len(refused) - 1} more' if len(refused) > 1 else ''}: {error}"
            for error, refused in points.items()
        )


def flops(point: Point) -> int:
    return OPERATORS.get(point.operation.operator).flops(point.operation.axes)


def quotient(numerator: float | None, denominator: float | None) -> float | None:
    return None if numerator is None or denominator is None else numerator / denominator


def known(values: Iterable[float | None]) -> list[float]:
    """The values that are not None."""
    return [value for value in values if value is not None]


def label(point: Point) -> str:
    """For example ``linear fp16 m=1 k=4096 n=4096``."""
    kind = point.dtype if point.cache == "cold" else f"{point.dtype} {point.cache}"
    return " ".join([point.operation.operator, kind, *(f"{axis}={size}" for axis, size in point.operation.shape)])


# --- kernels ---


def main_kernel(launches: Sequence[Launch]) -> Kernel | None:
    """The kernel that does the arithmetic; the first one where no name tells, None where none was recorded."""
    kernels = [describe(launch.name) for launch in launches]
    return next((kernel for kernel in kernels if kernel.main), kernels[0] if kernels else None)


def kind(kernel: Kernel) -> tuple[str, int | None, int | None]:
    """The properties that tell kernels of different design apart."""
    return kernel.family, kernel.architecture, kernel.tier


def design(kernel: Kernel) -> str:
    """Family, architecture and tier, ``cutlass sm75 align1``; a short name where the family is not known."""
    if kernel.family == "other":
        return kernel.label
    architecture = "" if kernel.architecture is None else f" sm{kernel.architecture}"
    return f"{kernel.family}{architecture}" + ("" if kernel.tier is None else f" align{kernel.tier}")


def most_common_kernel(readings: Readings, points: Iterable[Point]) -> tuple[Kernel, float] | None:
    """A kernel of the design that serves most of the points, and its share; None where none was recorded."""
    every = (main_kernel(readings.launches(point)) for point in points)
    kernels = [kernel for kernel in every if kernel is not None]
    if not kernels:
        return None
    (most, count), *_ = Counter(map(kind, kernels)).most_common(1)
    return next(kernel for kernel in kernels if kind(kernel) == most), count / len(kernels)


def kernels_note(readings: Readings, groups: Mapping[str, Iterable[Point]]) -> tuple[str, ...]:
    """The kernels that served each named group of points; empty where none was recorded."""
    serving = {name: most_common_kernel(readings, points) for name, points in groups.items()}
    parts = [
        f"{name} by {design(served[0])}" + (f" ({percent(served[1])} of them)" if served[1] < 1 else "")
        for name, served in serving.items()
        if served is not None
    ]
    return (f"served: {', '.join(parts)}",) if parts else ()
