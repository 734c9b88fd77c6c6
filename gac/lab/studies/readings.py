"""The measurements a study was given, looked up by point."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from gac.core.errors import ProfileError
from gac.profiling.operators import OPERATORS
from gac.profiling.records import Launch, Measurement, Point


class RefusedError(Exception):
    """What a verdict rests on was refused by the GPU or its libraries; says what, and for which reasons."""


@dataclass(frozen=True)
class Readings:
    """Every point of a study with its measurement; some may have been refused by the GPU or its libraries."""

    study: str
    rows: Mapping[Point, Measurement]

    @classmethod
    def of(cls, study: str, points: Sequence[Point], find: Callable[[Point], Measurement | None]) -> "Readings":
        """Look every point up.

        Raises:
            ProfileError: some were not measured.
        """
        found = {point: find(point) for point in points}
        missing = sum(row is None for row in found.values())
        if missing:
            raise ProfileError(
                f"{missing} of the {len(points)} points of study {study} are not measured",
                "every one of them",
                f"Measure them with gac study {study}.",
            )
        return cls(study, {point: row for point, row in found.items() if row is not None})

    def ns(self, point: Point) -> float | None:
        """Median latency; None where the point was refused."""
        return self.rows[point].median_ns

    def ms(self, point: Point) -> float | None:
        """Median latency in milliseconds; None where the point was refused."""
        return quotient(self.ns(point), 1e6)

    def us(self, point: Point) -> float | None:
        """Median latency in microseconds; None where the point was refused."""
        return quotient(self.ns(point), 1e3)

    def tflops(self, point: Point) -> float | None:
        """Throughput in TFLOP/s; None where the point was refused."""
        ns = self.ns(point)
        return None if ns is None else OPERATORS.get(point.operation.operator).flops(point.operation.axes) / ns / 1e3

    def gb_s(self, point: Point) -> float | None:
        """Effective bandwidth: the fewest bytes to move, a second, in GB/s; None where the point was refused."""
        ns, operation = self.ns(point), point.operation
        return None if ns is None else OPERATORS.get(operation.operator).bytes(operation.axes, point.dtype) / ns

    def ratio(self, slow: Point, fast: Point) -> float | None:
        """How many times longer ``slow`` takes; None where either was refused."""
        return quotient(self.ns(slow), self.ns(fast))

    def launches(self, point: Point) -> tuple[Launch, ...]:
        """The kernels that ran, in order."""
        return self.rows[point].launches

    def require_kernels(self, points: Iterable[Point]) -> None:
        """Refuse to judge by kernels where none were recorded.

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

    def middle(self, values: Iterable[float | None], what: str) -> float:
        """The median of what was not refused.

        Raises:
            RefusedError: nothing is left.
        """
        left = known(values)
        if not left:
            reasons = dict.fromkeys(row.error for row in self.rows.values() if row.error is not None)
            raise RefusedError(f"{what}: {'; '.join(reasons)}")
        return median(left)

    @property
    def refusals(self) -> tuple[str, ...]:
        """One line a reason: how many points were refused for it, and the first of them."""
        points: dict[str, list[Point]] = {}
        for point, row in self.rows.items():
            if row.error is not None:
                points.setdefault(row.error, []).append(point)
        return tuple(f"refused: {label(found[0])}{_more(found)}: {error}" for error, found in points.items())


def quotient(above: float | None, below: float | None) -> float | None:
    """None where either was refused."""
    return None if above is None or below is None else above / below


def known(values: Iterable[float | None]) -> list[float]:
    """What was not refused."""
    return [value for value in values if value is not None]


def label(point: Point) -> str:
    """For example ``linear fp16 m=1 k=4096 n=4096``."""
    kind = point.dtype if point.cache == "cold" else f"{point.dtype} {point.cache}"
    return " ".join([point.operation.operator, kind, *(f"{axis}={size}" for axis, size in point.operation.shape)])


def _more(found: Sequence[Point]) -> str:
    return f" and {len(found) - 1} more" if len(found) > 1 else ""
