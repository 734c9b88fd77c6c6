"""Measurements of a profile in columns: some hundred bytes a row, each built when it is asked for."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from gac.core.arrays import Bools, Floats, Ints
from gac.profiling.records import Cache, KernelLine, Launch, Measurement, Point


class Kind(NamedTuple):
    """Common properties of rows that can be compared with each other."""

    operator: str
    dtype: str
    cache: Cache
    axes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Rows:
    """Measurements in the order of their lines; ``rows[3]`` is built from the columns, all of length n."""

    kinds: tuple[Kind, ...]
    kind: Ints  # each row's index in ``kinds``
    sizes: Ints  # shape ``(n, most axes)``; 0 beyond a row's last axis
    iqr_ns: Floats  # of the first pass's samples; NaN where there is no number
    samples: Ints
    sm_clock_mhz: Ints  # 0: not known
    converged: Bools
    launched: Ints  # each row's index in ``launches``
    launches: tuple[tuple[tuple[int, int, int, int], ...], ...]  # sequences of numbers of kernels and grids
    kernels: tuple[KernelLine, ...]
    errors: Mapping[int, str]  # by row, why it has no number
    passes: Floats  # the medians of all passes, row by row, in order
    starts: Ints  # shape ``(n + 1,)``; row i has ``passes[starts[i]:starts[i + 1]]``
    _launches: dict[int, tuple[Launch, ...]] = field(default_factory=dict, init=False)

    def __len__(self) -> int:
        return len(self.kind)

    def __getitem__(self, row: int) -> Measurement:
        row = range(len(self))[row]
        kind = self.kinds[self.kind[row]]
        passes = tuple(self.passes[self.starts[row] : self.starts[row + 1]].tolist())
        shape = dict(zip(kind.axes, self.sizes[row].tolist(), strict=False))
        median_ns, iqr_ns = (float(column[row]) if passes else None for column in (self.median_ns, self.iqr_ns))
        return Measurement(
            kind.operator,
            shape,
            kind.dtype,
            kind.cache,
            median_ns,
            iqr_ns,
            samples=int(self.samples[row]),
            sm_clock_mhz=int(self.sm_clock_mhz[row]) or None,
            converged=bool(self.converged[row]),
            launches=self.launches_of(int(self.launched[row])),
            error=self.errors.get(row),
            passes=passes,
        )

    def __iter__(self) -> Iterator[Measurement]:
        return map(self.__getitem__, range(len(self)))

    def find(self, point: Point) -> Measurement | None:
        axes = point.operation.axes
        kind = Kind(point.operation.operator, point.dtype, point.cache, tuple(axes))
        if kind not in self.kinds or not all(0 < size < 2**63 for size in axes.values()):
            return None
        key = np.zeros(1 + self.sizes.shape[1], dtype=np.int64)
        key[: 1 + len(axes)] = self.kinds.index(kind), *axes.values()
        row = self._row_of_key.get(key.tobytes())
        return None if row is None else self[row]

    def first_duplicate(self) -> int | None:
        if len(self._row_of_key) == len(self):
            return None
        first: dict[bytes, int] = {}
        return next(row for row, key in enumerate(self._keys()) if first.setdefault(key, row) != row)

    @cached_property
    def counts(self) -> Ints:
        """Number of passes of each row; 0 where it has no number."""
        return np.diff(self.starts)

    @cached_property
    def median_ns(self) -> Floats:
        return self._quantiles(0.5)

    @cached_property
    def spread_ns(self) -> Floats:
        return np.maximum(self.iqr_ns, self._quantiles(0.75) - self._quantiles(0.25))

    def launches_of(self, sequence: int) -> tuple[Launch, ...]:
        if sequence not in self._launches:
            lines = ((self.kernels[kernel], (x, y, z)) for kernel, x, y, z in self.launches[sequence])
            launches = (Launch(kernel.name, grid, kernel.block, kernel.shared_bytes) for kernel, grid in lines)
            self._launches[sequence] = tuple(launches)
        return self._launches[sequence]

    def by_count(self) -> Iterator[tuple[Ints, Floats]]:
        """Yield rows with the same number of passes, and those passes, sorted, shape ``(rows, passes)``."""
        for count in np.unique(self.counts).tolist():
            rows = np.flatnonzero(self.counts == count)
            yield rows, np.sort(self.passes[self.starts[rows][:, None] + np.arange(count)], axis=1)

    def _quantiles(self, share: float) -> Floats:
        result = np.full(len(self), np.nan)
        for rows, ordered in self.by_count():
            if ordered.shape[1]:
                result[rows] = np.quantile(ordered, share, axis=1)
        return result

    @cached_property
    def _row_of_key(self) -> dict[bytes, int]:
        return dict(zip(self._keys(), range(len(self)), strict=True))

    def _keys(self) -> list[bytes]:
        keys = np.column_stack([self.kind, self.sizes])
        return keys.view(f"V{keys.strides[0]}").ravel().tolist()
