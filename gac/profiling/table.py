"""The profile: the latencies of one GPU, interpolated without a guess across a cliff."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from gac.core.arguments import Count, checked
from gac.core.arrays import COARSEST_CLASS, Bools, Floats, Ints, alignment_class
from gac.core.display import Row, Shown, Table, fields
from gac.core.errors import ProfileError
from gac.core.operations import Operation
from gac.profiling.folders import default_path, find_profile, shipped_profiles
from gac.profiling.modelled.model import GpuModel
from gac.profiling.modelled.roofline import Gpu
from gac.profiling.operators import OPERATORS
from gac.profiling.reading import read
from gac.profiling.records import Cache, Header, Launch, Measurement, Point
from gac.profiling.rows import Rows

_LEAST_HALF = 4


@dataclass(frozen=True, eq=False)
class Sweep:
    """Latency of one operator along one axis, all others fixed; sorted by dim.

    ``dims`` int64, ``ns`` (median) and ``iqr`` (``Measurement.spread_ns``) float64, all of shape ``(points,)``;
    ``launches`` of a point are empty where the kernels are not known.
    """

    operator: str
    dtype: str
    cache: Cache
    axis: str
    fixed: tuple[tuple[str, int], ...]
    dims: Ints
    ns: Floats
    iqr: Floats
    launches: tuple[tuple[Launch, ...], ...]

    def __len__(self) -> int:
        return len(self.dims)

    def inside(self, dims: tuple[int, int] | None) -> Bools:
        first, last = dims or (self.dims[0], self.dims[-1])
        return (self.dims >= first) & (self.dims <= last)

    @property
    def kernels(self) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(launch.name for launch in launches) for launches in self.launches)

    @property
    def label(self) -> str:
        """For example ``low_rank bf16 m=1024 k=4096 n=4096, r``; hot sweeps say so."""
        return f"{Point(Operation(self.operator, self.fixed), self.dtype, self.cache)}, {self.axis}"


@dataclass(frozen=True, eq=False, repr=False)
class Profile(Shown):
    """A latency table: header, measurements, SHA-256 of its bytes, and by row the timings in ns of sentinels."""

    path: Path
    header: Header
    measurements: Rows
    digest: str
    sentinels: Mapping[int, tuple[float, ...]]
    _sweeps: dict[Any, Sweep] = field(default_factory=dict, init=False)

    def tables(self) -> Sequence[Table | str]:
        numbers = ("shapes", "failed", "fastest", "slowest")
        columns = [("operator", "<"), ("dtype", "<"), *((name, ">") for name in numbers)]
        kinds: dict[tuple[str, str], list[float | None]] = {}
        for measured in self.measurements:
            kinds.setdefault((measured.operator, measured.dtype), []).append(measured.median_ns)
        rows = []
        for kind, medians in sorted(kinds.items()):
            known = [ns for ns in medians if ns is not None]
            times = [f"{pick(known) / 1e3:,.1f} µs" for pick in (min, max)] if known else ["-", "-"]
            rows.append((*kind, f"{len(medians):,}", f"{len(medians) - len(known):,}", *times))
        header = self.header
        notes = (
            f"{len(self.measurements):,} shapes; GAC {header.gac_version}, driver {header.driver}, {header.libraries}\n"
            f"{self.converged_fraction:.1%} of the medians known to 1 %, drift {self.drift:.1%}; {header.date}, "
            f"digest {self.digest[:12]}"
        )
        return [Table(columns, rows, f"profile {self.path.stem}: {header.gpu}", notes)]

    def rows(self) -> Sequence[Row]:
        run, result = ("operator", "dtype", "cache"), ("median_ns", "spread_ns", "samples", "converged", "error")
        return [fields(row, *run) | dict(row.shape) | fields(row, *result) for row in self.measurements]

    @classmethod
    def opened(cls, profile: "Profile | str | Path") -> "Profile":
        return profile if isinstance(profile, Profile) else cls.load(profile)

    @classmethod
    @checked
    def load(cls, path_or_name: str | Path) -> "Profile":
        """Read a profile from a path, or by the name of a shipped or saved one (``nvidia-h100-80gb-hbm3``).

        A last line that a kill cut short (no newline) is ignored; anything else that is malformed is refused.

        Raises:
            ProfileError: there is no such profile, or it is malformed (with line and field).
        """
        path = find_profile(path_or_name)
        try:
            with path.open("rb") as file:
                return cls(path, *read(file, path))
        except OSError as failure:
            problem = f"profile {path} cannot be read: {failure.strerror}"
            raise ProfileError(problem, "a file written by gac profile", "Check the path.") from failure

    def measured_in(self, operator: str, dtype: str) -> bool:
        return (operator, dtype, "cold") in self._measured

    def find(self, point: Point) -> Measurement | None:
        return self.measurements.find(point)

    @checked
    def rows_of(
        self, operator: str, fixed: Mapping[str, int], axis: str, dtype: str = "bf16", cache: Cache = "cold"
    ) -> Sweep:
        """Return the measured points along ``axis`` with every other axis as in ``fixed`` (possibly none).

        ProfileError where the axes are not those of the operator.
        """
        key = (operator, tuple(sorted(fixed.items())), axis, dtype, cache)
        if key in self._sweeps:
            return self._sweeps[key]
        none = np.empty((0, len(fixed) + 1), dtype=np.int64)
        axes, rows, sizes = self._measured.get((operator, dtype, cache), ((*fixed, axis), none[:, 0], none))
        if {*fixed, axis} != set(axes) or axis in fixed:
            raise ProfileError(
                f"axes {', '.join(fixed)} fixed and {axis} varied for operator {operator}",
                f"the axes {', '.join(axes)}, one of them varied",
                "Name the operator's axes.",
            )
        column = axes.index(axis)
        same = sizes == np.array([fixed.get(name, 0) for name in axes], dtype=np.int64)
        same[:, column] = True
        chosen = np.flatnonzero(same.all(axis=1))
        chosen = chosen[np.argsort(sizes[chosen, column], kind="stable")]
        dims, table, rows = sizes[chosen, column], self.measurements, rows[chosen]
        launches = tuple(map(table.launches_of, table.launched[rows].tolist()))
        ns, spread = table.median_ns[rows], table.spread_ns[rows]
        sweep = Sweep(operator, dtype, cache, axis, tuple(fixed.items()), dims, ns, spread, launches)
        self._sweeps[key] = sweep
        return sweep

    def latency(
        self, operator: str, fixed: Mapping[str, int], axis: str, dims: Ints, dtype: str = "bf16"
    ) -> tuple[Ints, Bools]:
        """Return the latency in ns, rounded up, at each of ``dims`` along ``axis``, and where it was measured.

        A dim that was not measured gets the larger latency of the nearest measured dims below and above it of its
        alignment class (the largest power of two that divides the dim, at most 64), so never across an alignment
        cliff, and only if the two are at most ``max(64, dim / 4)`` apart. The larger one, because a choice among
        values that err both ways falls on those that err low. There is no extrapolation: all other dims get -1. A
        smooth operator (a collective) is interpolated linearly between the two nearest measured dims.

        Raises:
            ProfileError: the axes are not those of the operator, or the dims are no integers.
        """
        requested = np.asarray(dims)
        if requested.size and requested.dtype.kind not in "iu":
            raise ProfileError(f"dims {dims!r}", "integers, one or several", "Round them, or name other dims.")
        between = interpolate_smooth if _is_smooth(operator) else interpolate
        return between(self.rows_of(operator, fixed, axis, dtype), requested.astype(np.int64))

    def modelled(self, operator: str, fixed: Mapping[str, int], axis: str, dims: Ints, dtype: str = "bf16") -> Ints:
        """Return int64 ns, rounded up, at each of ``dims`` (shape ``(dims,)``), by a model fitted to the table.

        It is for shapes that ``latency`` does not know; -1 where the table has too little near, see ``GpuModel``.
        """
        sizes = {name: np.full(len(dims), size, dtype=np.int64) for name, size in fixed.items()} | {axis: dims}
        axes = OPERATORS.get(operator).axes if operator in OPERATORS.names else tuple(sizes)
        if set(axes) != set(sizes):
            return np.full(len(dims), -1, dtype=np.int64)
        ns = self.model.latency(operator, dtype, axes, np.column_stack([sizes[name] for name in axes]))
        return np.ceil(np.nan_to_num(ns, nan=-1.0)).astype(np.int64)

    @cached_property
    def model(self) -> GpuModel:
        return GpuModel(self.measurements, Gpu(self.header.sm_count, self.header.l2_bytes))

    def point(self, operation: Operation, dtype: str = "bf16") -> int | None:
        """Return the measured latency of one shape in ns, rounded up; None where there is no number for it."""
        row = self.measurements.find(Point(operation, dtype))
        return None if row is None or row.median_ns is None else ceil(row.median_ns)

    @checked
    def sweeps(self, least: Count = 8) -> tuple[Sweep, ...]:
        """List every operator, dtype, cache and axis along which at least ``least`` dims were measured, in fixed order.

        Smooth operators are left out: they have no cliffs.
        """
        return tuple(sweep for kind in sorted(self._measured) for sweep in self.sweeps_of(*kind, least=least))

    def sweeps_of(self, operator: str, dtype: str, cache: Cache = "cold", least: int = 8) -> Iterator[Sweep]:
        if _is_smooth(operator) or (operator, dtype, cache) not in self._measured:
            return
        axes, _, sizes = self._measured[operator, dtype, cache]
        for column, axis in enumerate(axes):
            others = axes[:column] + axes[column + 1 :]
            rest, counts = np.unique(np.delete(sizes, column, axis=1), axis=0, return_counts=True)
            for fixed in rest[counts >= least].tolist():
                yield self.rows_of(operator, dict(zip(others, fixed, strict=True)), axis, dtype, cache)

    @property
    def failed(self) -> tuple[Measurement, ...]:
        return tuple(self.measurements[row] for row in sorted(self.measurements.errors))

    @property
    def converged_fraction(self) -> float:
        """Fraction of the successful measurements whose median is known to within 1 %."""
        converged = self.measurements.converged[self.measurements.counts > 0]
        return float(converged.mean()) if len(converged) else 0.0

    @property
    def drift(self) -> float:
        """Largest fraction by which a sentinel's timings rose or fell while the file was written.

        The medians of the earlier and the later half of a sentinel's timings are compared, at least four each. Halves
        that overlap are noise, not drift.
        """
        return max(map(_change, self.sentinels.values()), default=0.0)

    @property
    def spread(self) -> float:
        """The spread of a shape's passes, ``(max - min) / median``; the 95th percentile over the shapes."""
        ordered = [passes for _, passes in self.measurements.by_count() if passes.shape[1] > 1]
        ranges = [(passes[:, -1] - passes[:, 0]) / np.median(passes, axis=1) for passes in ordered]
        return float(np.percentile(np.concatenate(ranges), 95)) if ranges else 0.0

    @cached_property
    def _measured(self) -> dict[tuple[str, str, Cache], tuple[tuple[str, ...], Ints, Ints]]:
        """By operator, dtype and cache the axes, the rows that have a number, and their sizes along the axes."""
        rows, measured = self.measurements, {}
        for number, kind in enumerate(rows.kinds):
            chosen = np.flatnonzero((rows.kind == number) & (rows.counts > 0))
            if len(chosen):
                sizes = rows.sizes[chosen, : len(kind.axes)]
                measured[kind.operator, kind.dtype, kind.cache] = (kind.axes, chosen, sizes)
        return measured


def _is_smooth(operator: str) -> bool:
    return operator in OPERATORS.names and OPERATORS.get(operator).smooth


def _change(timings: Sequence[float]) -> float:
    half = len(timings) // 2
    early, late = timings[:half], timings[-half:]
    if half < _LEAST_HALF or (min(late) <= max(early) and min(early) <= max(late)):
        return 0.0
    return abs(float(np.median(late) / np.median(early)) - 1)


def interpolate(sweep: Sweep, dims: Ints) -> tuple[Ints, Bools]:
    latency = np.full(dims.shape, -1.0)
    index = np.minimum(np.searchsorted(sweep.dims, dims), max(len(sweep) - 1, 0))
    measured = sweep.dims[index] == dims if len(sweep) else np.zeros(dims.shape, dtype=np.bool_)
    latency[measured] = sweep.ns[index[measured]]
    classes, known = alignment_class(dims), alignment_class(sweep.dims)
    for step in np.unique(classes[~measured]):
        wanted = ~measured & (classes == step)
        latency[wanted] = _between(sweep.dims[known == step], sweep.ns[known == step], dims[wanted])
    return np.ceil(latency).astype(np.int64), measured


def interpolate_smooth(sweep: Sweep, dims: Ints) -> tuple[Ints, Bools]:
    if not len(sweep):
        return np.full(dims.shape, -1), np.zeros(dims.shape, dtype=np.bool_)
    latency = np.interp(dims, sweep.dims, sweep.ns, left=-1.0, right=-1.0)
    return np.ceil(latency).astype(np.int64), np.isin(dims, sweep.dims)


def _between(known: Ints, ns: Floats, dims: Ints) -> Floats:
    """Return the larger latency at the ends of brackets that are narrow enough; -1 elsewhere."""
    if len(known) < 2:
        return np.full(dims.shape, -1.0)
    above = np.clip(np.searchsorted(known, dims), 1, len(known) - 1)
    low, high = known[above - 1], known[above]
    bracketed = (low <= dims) & (dims <= high) & (high - low <= np.maximum(COARSEST_CLASS, dims // 4))
    return np.where(bracketed, np.maximum(ns[above - 1], ns[above]), -1.0)


def other_tables(profile: Profile) -> Iterator[Profile]:
    """Load the shipped tables other than this one, one after another: those of its GPU first.

    Each is read once in a process.
    """
    gpu = default_path(profile.header.gpu).stem
    for path in sorted(shipped_profiles(), key=lambda path: not path.stem.startswith(gpu)):
        table = _loaded(path)
        if table.digest != profile.digest:
            yield table


_loaded = cache(Profile.load)
