"""The measurements of a profile, kept in columns: a million rows take some hundred bytes each, built when asked for."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from gac.arrays import Floats, Ints
from gac.profiling.lines import KernelLine
from gac.profiling.records import Cache, Launch, Measurement, Point

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Kind:
    """What rows have in common that are compared with each other: their shapes have the same axes."""

    operator: str
    dtype: str
    cache: Cache
    axes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Rows(Sequence[Measurement]):
    """Measurements in the order of their lines; ``rows[3]`` is built from the columns, all of length n.

    Attributes:
        kinds: what ``kind`` refers to.
        kind: int64; each row's operator, dtype, cache and axes.
        sizes: int64, shape ``(n, most axes)``; 0 beyond a row's own axes.
        iqr_ns: float64, of the first pass's samples; NaN where there is no number.
        samples, sm_clock_mhz: int64; a clock of 0 is not known.
        converged: bool.
        launched: int64; which of ``launches`` ran.
        launches: sequences of launches, each by the number of its kernel and its grid.
        kernels: what those numbers refer to.
        errors: by row, why it has no number.
        passes: float64; the medians of all passes, row by row, in order.
        starts: int64, shape ``(n + 1,)``; row i has ``passes[starts[i]:starts[i + 1]]``.
    """

    kinds: tuple[Kind, ...]
    kind: Ints
    sizes: Ints
    iqr_ns: Floats
    samples: Ints
    sm_clock_mhz: Ints
    converged: Bools
    launched: Ints
    launches: tuple[tuple[tuple[int, int, int, int], ...], ...]
    kernels: tuple[KernelLine, ...]
    errors: Mapping[int, str]
    passes: Floats
    starts: Ints

    def __len__(self) -> int:
        return len(self.kind)

    @overload
    def __getitem__(self, at: int) -> Measurement: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Measurement, ...]: ...
    def __getitem__(self, at: int | slice) -> Measurement | tuple[Measurement, ...]:
        if isinstance(at, slice):
            return tuple(self[row] for row in range(*at.indices(len(self))))
        return self._built(range(len(self))[at])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Rows | tuple | list):
            return NotImplemented
        return len(self) == len(other) and all(ours == theirs for ours, theirs in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def find(self, point: Point) -> Measurement | None:
        """The measurement of a point; None where there is none."""
        axes = point.operation.axes
        kind = self._numbers.get(Kind(point.operation.operator, point.dtype, point.cache, tuple(axes)))
        if kind is None or not all(0 < size < 2**63 for size in axes.values()):
            return None
        wanted = np.zeros(self.sizes.shape[1], dtype=np.int64)
        wanted[: len(axes)] = list(axes.values())
        keys, order = self._index
        key = hashes(np.array([kind]), wanted[None])[0]
        for place in order[np.searchsorted(keys, key) : np.searchsorted(keys, key, "right")].tolist():
            if self.kind[place] == kind and (self.sizes[place] == wanted).all():
                return self._built(place)
        return None

    def repeated(self) -> int | None:
        """The first row whose point an earlier row has; None where every point is there once."""
        keys, order = self._index
        twins = np.flatnonzero(keys[1:] == keys[:-1])
        if not len(twins):
            return None
        seen: set[tuple[int, ...]] = set()
        for row in np.unique(np.concatenate([order[twins], order[twins + 1]])).tolist():
            point = (int(self.kind[row]), *self.sizes[row].tolist())
            if point in seen:
                return int(row)
            seen.add(point)
        return None

    @cached_property
    def counts(self) -> Ints:
        """How many passes each row has; 0 where it has no number."""
        found: Ints = np.diff(self.starts)
        return found

    @cached_property
    def median_ns(self) -> Floats:
        """The median of each row's passes; NaN where it has no number."""
        return self._quantiles(0.5)

    @cached_property
    def spread_ns(self) -> Floats:
        """``Measurement.spread_ns`` of each row; NaN where it has no number."""
        between = self._quantiles(0.75) - self._quantiles(0.25)
        return np.maximum(self.iqr_ns, between)

    def launches_of(self, which: int) -> tuple[Launch, ...]:
        """The kernels of one of the sequences, in order; one object however many rows launch them."""
        if which not in self._launches:
            ran = ((self.kernels[kernel], grid) for kernel, *grid in self.launches[which])
            self._launches[which] = tuple(
                Launch(one.name, (x, y, z), one.block, one.shared_bytes) for one, (x, y, z) in ran
            )
        return self._launches[which]

    def by_count(self) -> Iterator[tuple[Ints, Floats]]:
        """Rows with the same number of passes, and those passes, sorted, shape ``(rows, passes)``."""
        for count in np.unique(self.counts).tolist():
            rows = np.flatnonzero(self.counts == count)
            yield rows, np.sort(self.passes[self.starts[rows][:, None] + np.arange(count)], axis=1)

    def _quantiles(self, share: float) -> Floats:
        """Of each row's passes; NaN where it has none."""
        found = np.full(len(self), np.nan)
        for rows, ordered in self.by_count():
            if ordered.shape[1]:
                found[rows] = np.quantile(ordered, share, axis=1)
        return found

    @cached_property
    def _launches(self) -> dict[int, tuple[Launch, ...]]:
        return {}

    @cached_property
    def _numbers(self) -> dict[Kind, int]:
        return {kind: number for number, kind in enumerate(self.kinds)}

    @cached_property
    def _index(self) -> tuple[Any, Ints]:
        keys = hashes(self.kind, self.sizes)
        order = np.argsort(keys, kind="stable")
        return keys[order], order

    def _built(self, row: int) -> Measurement:
        kind = self.kinds[self.kind[row]]
        passes = tuple(self.passes[self.starts[row] : self.starts[row + 1]].tolist())
        return Measurement(
            kind.operator,
            dict(zip(kind.axes, self.sizes[row].tolist(), strict=False)),
            kind.dtype,
            kind.cache,
            float(self.median_ns[row]) if passes else None,
            float(self.iqr_ns[row]) if passes else None,
            int(self.samples[row]),
            int(self.sm_clock_mhz[row]) or None,
            bool(self.converged[row]),
            self.launches_of(int(self.launched[row])),
            self.errors.get(row),
            passes,
        )


def hashes(kind: Ints, sizes: Ints) -> Any:
    """A 64-bit number for each row; rows that have the same one are compared."""
    found = kind.astype(np.uint64)
    for column in sizes.T.astype(np.uint64):
        found = (found ^ (found >> np.uint64(29))) * np.uint64(0x9E3779B97F4A7C15) + column
    return found
