"""The model of one GPU: a latency for shapes that its table lacks, where the table can vouch for one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gac.core.arrays import Floats, Ints
from gac.profiling.alignment import alignment_class
from gac.profiling.modelled.kriging import Kriging, drawn
from gac.profiling.modelled.roofline import Gpu, fitted, gemm_terms, row_terms
from gac.profiling.operators import ACTIVATIONS, ITEM_BYTES, OPERATORS, numbers_of, stored_as
from gac.profiling.rows import Rows

REACH = 4
"""A shape is modelled where some measured one has each size within this factor of its own."""

SIDE = 256
"""The longer side of a weight that is modelled, at least: no model of the tables has a smaller one."""

LEAST = 32
"""Measured shapes of an operator, dtype, number of rows and alignment that a model is fitted to, at least."""

ALIGNED = 8
"""From this class on, 16 bytes of 16-bit numbers, alignment moves latencies little; those dims are fitted together."""

_SIZES = ("k", "r", "n")
_SIDES = ("k", "n")
_ONE_GEMM = ("m k n",)
_PAIRS: Mapping[str, str] = MappingProxyType({"low_rank": "linear", "low_rank_triton": "linear_triton"})
"""Of an operator of two GEMMs, the operator of either."""


@dataclass(frozen=True)
class _Like:
    """What measurements that are fitted together have in common.

    Attributes:
        others: sizes of the axes that are not modelled: the rows, the group of a scheme.
        classes: of the sizes that are, 1, 2 and 4, and ``ALIGNED`` for all above.
        kernel: whether kernels of the dtype multiply, and not PyTorch with unpacked weights.
    """

    operator: str
    dtype: str
    others: tuple[tuple[str, int], ...]
    classes: tuple[int, ...]
    kernel: bool

    @property
    def rows(self) -> int:
        return dict(self.others)["m"]


@dataclass(frozen=True, eq=False)
class _Fit:
    """What was fitted to such measurements.

    Attributes:
        shapes: all of them, shape ``(n, sizes)``.
        chosen: which of these the field was fitted to.
    """

    shapes: Ints
    chosen: Ints
    coefficients: Floats
    beyond: Kriging

    def reached(self, shapes: Ints) -> NDArray[np.bool_]:
        """Which shapes have a measured one within ``REACH`` in every size."""
        found = np.ones((len(shapes), len(self.shapes)), dtype=np.bool_)
        for asked, known in zip(shapes.T, self.shapes.T, strict=True):
            found &= (asked[:, None] <= REACH * known) & (known <= REACH * asked[:, None])
        reached: NDArray[np.bool_] = np.any(found, axis=1)
        return reached


@dataclass(frozen=True, eq=False)
class GpuModel:
    """Latencies as the product of a roofline and a field of what the measured shapes near by say beyond it.

    Both are fitted to the table's own rows, when they are first asked for: the measurements of an operator, a dtype, a
    number of rows and a kind of alignment by themselves, and what no kernel of a scheme reads apart. What is modelled
    are operators of one GEMM, and pairs: their roofline is the sum of the two GEMMs as they are modelled by themselves.

    Attributes:
        measurements: the rows of the table.
        gpu: what the roofline knows of it.
    """

    measurements: Rows
    gpu: Gpu
    _fits: dict[_Like, _Fit | None] = field(default_factory=dict, init=False, repr=False)

    def latency(self, operator: str, dtype: str, axes: tuple[str, ...], shapes: Ints) -> Floats:
        """Latency in ns at each of the shapes; NaN where the table cannot vouch for one.

        It cannot where it has fewer than ``LEAST`` measurements alike (operator, dtype, rows, kind of alignment, read
        by a kernel or not), or none within a factor of ``REACH`` in every size, or where neither side of the weight
        reaches ``SIDE``, or where the operator is none of those that are modelled. Nor is there a latency of what
        failed when it was measured, or what the operator is known to refuse.

        Args:
            axes: names of the shapes' axes.
            shapes: shape ``(shapes, axes)``.
        """
        found = np.full(len(shapes), np.nan)
        sides = shapes[:, [axes.index(one) for one in axes if one in _SIDES]]
        for like, ours in self._alike(operator, dtype, axes, shapes).items():
            if (fit := self._fit(like)) is not None:
                sizes = shapes[ours][:, [axes.index(one) for one in axes if one in _SIZES]]
                within = fit.reached(sizes) & (sides[ours] >= SIDE).any(axis=1)
                found[ours] = np.where(within, self._expected(like, fit, sizes), np.nan)
        for at in np.flatnonzero(np.isfinite(found)).tolist():
            if not self._runs(operator, dtype, axes, tuple(shapes[at].tolist())):
                found[at] = np.nan
        return found

    def _runs(self, operator: str, dtype: str, axes: tuple[str, ...], shape: tuple[int, ...]) -> bool:
        known, sizes = OPERATORS.get(operator), dict(zip(axes, shape, strict=True))
        refused = known.unmet(sizes) or known.refusal(sizes, dtype)
        return refused is None and (operator, dtype, shape) not in self._failed

    @cached_property
    def _failed(self) -> frozenset[tuple[str, str, tuple[int, ...]]]:
        """What was measured in vain, by operator, dtype and shape."""
        rows = (self.measurements[row] for row in self.measurements.errors)
        return frozenset((one.operator, one.dtype, tuple(one.shape.values())) for one in rows)

    def error(self, rows: int, dtype: str = "bf16") -> float | None:
        """The median of ``errors`` over all operators; None where nothing is modelled."""
        errors = list(self.errors(rows, dtype).values())
        return float(np.median(np.concatenate(errors))) if errors else None

    def errors(self, rows: int, dtype: str = "bf16") -> dict[str, Floats]:
        """Relative errors on shapes left out, of what is modelled with so many rows in a dtype, by operator.

        Left out are, in turn, all measured shapes that fall into the same octave of every size. What they took is then
        expected from the rest, with the roofline as it is.
        """
        found: dict[str, Floats] = {}
        for like in self._measured:
            if (like.rows, like.dtype) == (rows, dtype) and (fit := self._fit(like)) is not None:
                missed = fit.beyond.left_out(_octaves(fit.shapes[fit.chosen]))
                known = found.get(like.operator, np.empty(0))
                found[like.operator] = np.concatenate([known, np.abs(np.expm1(-missed))])
        return found

    @cached_property
    def _measured(self) -> dict[_Like, Ints]:
        """The rows of the table that are alike, of the operators that are modelled."""
        table, found = self.measurements, dict[_Like, Ints]()
        for number, kind in enumerate(table.kinds):
            if kind.cache == "cold":
                ours = np.flatnonzero((table.kind == number) & (table.counts > 0))
                shapes = table.sizes[ours, : len(kind.axes)]
                alike = self._alike(kind.operator, kind.dtype, kind.axes, shapes)
                found |= {like: ours[at] for like, at in alike.items()}
        return found

    def _alike(self, operator: str, dtype: str, axes: tuple[str, ...], shapes: Ints) -> dict[_Like, Ints]:
        """Which shapes are alike; none of an operator that is not modelled."""
        if not _modelled(operator, axes) or not len(shapes):
            return {}
        sized = np.array([name in _SIZES for name in axes])
        classes = np.minimum(alignment_class(shapes[:, sized]), ALIGNED)
        kernel = _in_kernels(dtype, shapes[:, sized])
        kinds, which = np.unique(np.column_stack([kernel, shapes[:, ~sized], classes]), axis=0, return_inverse=True)
        others, found = [name for name in axes if name not in _SIZES], dict[_Like, Ints]()
        for at, (runs, *kind) in enumerate(kinds.tolist()):
            own, classes_of = kind[: len(others)], tuple(kind[len(others) :])
            like = _Like(operator, dtype, tuple(zip(others, own, strict=True)), classes_of, bool(runs))
            found[like] = np.flatnonzero(which.ravel() == at)
        return found

    def _fit(self, like: _Like) -> _Fit | None:
        if like not in self._fits:
            self._fits[like] = self._fitted(like)
        return self._fits[like]

    def _fitted(self, like: _Like) -> _Fit | None:
        """None where too little was measured."""
        ours = self._measured.get(like, np.empty(0, dtype=np.int64))
        if len(ours) < LEAST:
            return None
        kind = self.measurements.kinds[int(self.measurements.kind[ours[0]])]
        sized = [at for at, name in enumerate(kind.axes) if name in _SIZES]
        shapes, ns = self.measurements.sizes[ours][:, sized], self.measurements.median_ns[ours]
        terms = self._terms(like, shapes)
        known = np.isfinite(terms).all(axis=1)
        if known.sum() < LEAST:
            return None
        shapes, ns, terms = shapes[known], ns[known], terms[known]
        coefficients = np.ones(terms.shape[1]) if like.operator in _PAIRS else fitted(terms, ns)
        chosen = drawn(len(ns))
        residuals = np.log(ns[chosen] / (terms[chosen] @ coefficients))
        return _Fit(shapes, chosen, coefficients, Kriging.fit(shapes[chosen], residuals))

    def _expected(self, like: _Like, fit: _Fit, sizes: Ints) -> Floats:
        """Latency in ns, NaN where a GEMM of a pair is not modelled."""
        found: Floats = self._terms(like, sizes) @ fit.coefficients * np.exp(fit.beyond.at(sizes))
        return found

    def _terms(self, like: _Like, sizes: Ints) -> Floats:
        """What the roofline of these shapes is a sum of, shape ``(shapes, terms)``; NaN where it is not known."""
        if like.operator not in _PAIRS:
            k, n = sizes[:, 0], sizes[:, 1]
            weight_bytes = _weight_bytes(like.dtype, k, n)
            if like.rows == 1 and like.kernel and _alone(like.dtype):
                return row_terms(k, n, self.gpu, weight_bytes)
            return gemm_terms(like.rows, k, n, self.gpu, weight_bytes)
        return np.stack([self._gemm(like, sizes[:, pair]) for pair in ([0, 1], [1, 2])], axis=1)

    def _gemm(self, pair: _Like, sizes: Ints) -> Floats:
        """Latency in ns of one GEMM of a pair by itself, however far the measured ones are; NaN where none is."""
        found, rows = np.full(len(sizes), np.nan), np.full((len(sizes), 1), pair.rows, dtype=np.int64)
        alike = self._alike(_PAIRS[pair.operator], pair.dtype, ("m", "k", "n"), np.hstack([rows, sizes]))
        for like, ours in alike.items():
            if (fit := self._fit(like)) is not None:
                found[ours] = self._expected(like, fit, sizes[ours])
        return found


def _modelled(operator: str, axes: tuple[str, ...]) -> bool:
    if operator not in OPERATORS.names or OPERATORS.get(operator).axes != axes:
        return False
    return operator in _PAIRS or OPERATORS.get(operator).products == _ONE_GEMM


def _weight_bytes(dtype: str, k: Ints, n: Ints) -> Floats:
    """What each weight takes: in a scheme as its storage holds it, in numbers 16 bits each, whatever they are."""
    if numbers_of(dtype) == dtype:
        return ITEM_BYTES[ACTIVATIONS] * k.astype(np.float64) * n
    scheme = stored_as(dtype)
    return np.array([scheme.bytes(*size) for size in zip(n.tolist(), k.tolist(), strict=True)], dtype=np.float64)


def _alone(dtype: str) -> bool:
    """Whether it is of a scheme that rounds weights and no inputs."""
    return numbers_of(dtype) != dtype and stored_as(dtype).input_quantiser is None


def _in_kernels(dtype: str, sizes: Ints) -> NDArray[np.bool_]:
    """At which sizes kernels of the dtype read the weight, or both of a pair; always where numbers are no scheme's."""
    if numbers_of(dtype) == dtype:
        return np.ones(len(sizes), dtype=np.bool_)
    unread = cache(stored_as(dtype).kernel_unsupported_reason)
    pairs = (zip(one[1:], one, strict=False) for one in sizes.tolist())  # rows and columns of each weight
    return np.array([all(unread(*weight) is None for weight in weights) for weights in pairs], dtype=np.bool_)


def _octaves(shapes: Ints) -> Ints:
    """The number of the cell that each shape falls into: its sizes rounded to powers of two."""
    cells = np.rint(np.log2(shapes.astype(np.float64))).astype(np.int64)
    found: Any = np.unique(cells, axis=0, return_inverse=True)[1]
    octaves: Ints = found.ravel()
    return octaves
