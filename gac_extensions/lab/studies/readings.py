"""The measurements of a study by point, figures in words, and the kernels that served a group of points."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from gac.core.errors import ProfileError
from gac.profiling.operators import work_of
from gac.profiling.records import Launch, Measurement, Point
from gac_extensions.lab.kernel_names import Kernel, describe

CLOSE = 0.05
"""A figure this near to its threshold, as a fraction of it, may fall on the other side when it is measured again."""


class RefusedError(Exception):
    """The verdict rests on points that the GPU or its libraries refused; names them and the reasons."""


@dataclass(frozen=True)
class Readings:
    """Every point of a study with its measurement; of a refused point, figures are None."""

    study: str
    rows: Mapping[Point, Measurement]

    @classmethod
    def of(cls, study: str, points: Sequence[Point], find: Callable[[Point], Measurement | None]) -> "Readings":
        """Look every point up; ProfileError where some were not measured."""
        rows = {point: row for point in points if (row := find(point)) is not None}
        if missing := len(points) - len(rows):
            raise ProfileError(
                f"{missing} of the {len(points)} points of study {study} are not measured",
                "every one of them",
                f"Measure them with gac study {study}.",
            )
        return cls(study, rows)

    def ns(self, point: Point) -> float | None:
        return self.rows[point].median_ns

    def ms(self, point: Point) -> float | None:
        return quotient(self.ns(point), 1e6)

    def us(self, point: Point) -> float | None:
        return quotient(self.ns(point), 1e3)

    def tflops(self, *points: Point) -> float | None:
        """Return the throughput of points that run one after the other; None where one was refused."""
        flops = sum(work_of(point.operation, point.dtype)[0] for point in points)
        latencies = known(map(self.ns, points))
        return flops / sum(latencies) / 1e3 if len(latencies) == len(points) else None

    def gb_s(self, point: Point) -> float | None:
        """Return the effective bandwidth: the fewest bytes to move over the latency."""
        return quotient(work_of(point.operation, point.dtype)[1], self.ns(point))

    def ratio(self, slow: Point, fast: Point) -> float | None:
        return quotient(self.ns(slow), self.ns(fast))

    def launches(self, point: Point) -> tuple[Launch, ...]:
        return self.rows[point].launches

    def require_kernels(self, points: Iterable[Point]) -> None:
        """Raise ProfileError where a point was timed and its kernels were not recorded."""
        unknown = sum(self.ns(point) is not None and not self.launches(point) for point in points)
        if unknown:
            raise ProfileError(
                f"{unknown} points of study {self.study} were timed without recording their kernels",
                "the kernels that ran at each point",
                f"Measure them where CUPTI can be used, with gac study {self.study}.",
            )

    def median(self, values: Iterable[float | None], name: str) -> float:
        """Return the median of the values that were not refused; RefusedError where all were."""
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
            f"refused: {refused[0]}{f' and {len(refused) - 1} more' if len(refused) > 1 else ''}: {error}"
            for error, refused in points.items()
        )


def quotient(numerator: float | None, denominator: float | None) -> float | None:
    return None if numerator is None or denominator is None else numerator / denominator


def known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


# --- figures in words ---


def times(factor: float, *edges: float) -> str:
    """Write a factor, ``2.42x``, with enough digits to differ from every edge that it differs from."""
    return _distinct(factor, edges, lambda value, digits: f"{value:.{2 + digits}f}x")


def percent(share: float, *edges: float) -> str:
    """Write a share, ``58 %``, with enough digits to differ from every edge; never ``-0 %``."""
    return _distinct(share, edges, lambda value, digits: f"{round(100 * value, digits) + 0.0:.{digits}f} %")


def _distinct(value: float, edges: tuple[float, ...], write: Callable[[float, int], str]) -> str:
    others = [edge for edge in edges if edge != value]
    enough = (digits for digits in range(4) if write(value, digits) not in {write(edge, digits) for edge in others})
    return write(value, next(enough, 4))


def close(name: str, value: float, *edges: float, write: Callable[..., str] = times) -> tuple[str, ...]:
    """Note every edge that a deciding figure lies within 5 % of; ``name`` is empty where it is the only one."""
    return tuple(
        f"close to the edge: {name}{' ' if name else ''}{write(value, edge)}, edge {write(edge)}"
        for edge in edges
        if abs(value - edge) <= CLOSE * edge
    )


# --- kernels ---


def main_kernel(launches: Sequence[Launch]) -> Kernel | None:
    """Return the kernel that does the arithmetic; the first one where no name tells, None where none was recorded."""
    kernels = [describe(launch.name) for launch in launches]
    return next((kernel for kernel in kernels if kernel.main), kernels[0] if kernels else None)


def kind(kernel: Kernel) -> tuple[str, int | None, int | None]:
    """Return the properties that tell kernels of different design apart."""
    return kernel.family, kernel.architecture, kernel.tier


def design(kernel: Kernel) -> str:
    """Write family, architecture and tier, ``cutlass sm75 align1``; a short name where the family is not known."""
    if kernel.family == "other":
        return kernel.label
    architecture = "" if kernel.architecture is None else f" sm{kernel.architecture}"
    return f"{kernel.family}{architecture}" + ("" if kernel.tier is None else f" align{kernel.tier}")


def most_common_kernel(readings: Readings, points: Iterable[Point]) -> tuple[Kernel, float] | None:
    """Return a kernel of the design that serves most of the points, and its share; None where none was recorded."""
    every = (main_kernel(readings.launches(point)) for point in points)
    kernels = [kernel for kernel in every if kernel is not None]
    if not kernels:
        return None
    (most, count), *_ = Counter(map(kind, kernels)).most_common(1)
    return next(kernel for kernel in kernels if kind(kernel) == most), count / len(kernels)


def kernels_note(readings: Readings, groups: Mapping[str, Iterable[Point]]) -> tuple[str, ...]:
    """Note the kernels that served each named group of points; empty where none was recorded."""
    serving = {name: most_common_kernel(readings, points) for name, points in groups.items()}
    parts = [
        f"{name} by {design(served[0])}" + (f" ({percent(served[1])} of them)" if served[1] < 1 else "")
        for name, served in serving.items()
        if served is not None
    ]
    return (f"served: {', '.join(parts)}",) if parts else ()
