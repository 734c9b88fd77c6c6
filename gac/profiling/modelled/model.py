"""The model of one GPU: a latency for shapes that its table lacks, where the table has enough near them."""

from dataclasses import dataclass, field
from functools import cache, cached_property

import numpy as np

from gac.core.arrays import Bools, Floats, Ints, alignment_class
from gac.profiling.modelled.kriging import Kriging, drawn
from gac.profiling.modelled.roofline import FEW_ROWS, Gpu, fitted, gemm_terms, row_terms, shared_terms, wide_row_terms
from gac.profiling.operators import OPERATORS
from gac.profiling.operators.base import ACTIVATIONS, ITEM_BYTES, Operator, numbers_of, stored_as
from gac.profiling.rows import Rows

REACH = 4  # a shape is modelled where some measured one has each size within this factor of its own
SIDE = 256  # the longer side of a weight that is modelled, at least: no model of the tables has a smaller one
LEAST = 32  # measured shapes of an operator, dtype, number of rows and alignment that a model is fitted to, at least
_ENOUGH = 128  # of them from which terms are fitted for how programs share tiles: ten for each term

ALIGNED = 8
"""From this class on, 16 bytes of 16-bit numbers, alignment moves latencies little; those dims are fitted together.

Where they are inputs of a GEMM, from the class ``aligned_inputs`` of the operator on.
"""

_SIZES = ("k", "r", "n")
_SIDES = ("k", "n")
_INPUTS = ("k", "r")  # along which some GEMM sums
_ONE_GEMM = ("m k n",)


@dataclass(frozen=True)
class _Group:
    """Common properties of measurements that are fitted together.

    ``others`` are sizes of the axes that are not modelled (rows, the group of a scheme), ``classes`` the alignment of
    those that are: 1, 2, 4, and ``ALIGNED`` for all above. ``kernel``: a kernel of GAC's multiplies; neither PyTorch
    unpacks the weights of a scheme, nor cuBLAS takes those of 16 bits.
    """

    operator: str
    dtype: str
    others: tuple[tuple[str, int], ...]
    classes: tuple[int, ...]
    kernel: bool

    @property
    def rows(self) -> int:
        return dict(self.others)["m"]

    @property
    def pair_of(self) -> str | None:
        return OPERATORS.get(self.operator).pair_of


@dataclass(frozen=True, eq=False)
class _Fit:
    """The fit of a group: all its shapes ``(n, sizes)``, which of them the field was fitted to, and the fit."""

    shapes: Ints
    chosen: Ints
    coefficients: Floats
    field: Kriging

    def reaches(self, shapes: Ints) -> Bools:
        sizes = shapes[:, None]
        near = np.all((sizes <= REACH * self.shapes) & (self.shapes <= REACH * sizes), axis=2)
        within: Bools = np.any(near, axis=1)
        return within


@dataclass(frozen=True, eq=False)
class GpuModel:
    """Latencies as the product of a roofline and a field of the residuals of measured shapes near by.

    Both are fitted to the table's own rows, when they are first asked for: each operator, dtype, number of rows and
    alignment apart, and weights that no kernel of a scheme reads apart. Operators of one GEMM are modelled, and pairs:
    their roofline is the sum of the two GEMMs as they are modelled by themselves.
    """

    measurements: Rows
    gpu: Gpu
    _fits: dict[_Group, _Fit | None] = field(default_factory=dict, init=False, repr=False)

    def latency(self, operator: str, dtype: str, axes: tuple[str, ...], shapes: Ints) -> Floats:
        """Return the latency in ns at each of the shapes ``(shapes, axes)``; NaN where the table has too little near.

        That is: fewer than ``LEAST`` measurements of its group (operator, dtype, rows, alignment, read by a kernel or
        not), or none within a factor of ``REACH`` in every size, or neither side of the weight reaches ``SIDE``, or
        the operator is not modelled, refuses the shape, or failed there when it was measured.
        """
        result = np.full(len(shapes), np.nan)
        sides = shapes[:, [axes.index(axis) for axis in axes if axis in _SIDES]]
        for group, members in self._groups(operator, dtype, axes, shapes).items():
            if (fit := self._fit(group)) is not None:
                sizes = shapes[members][:, [axes.index(axis) for axis in axes if axis in _SIZES]]
                within = fit.reaches(sizes) & (sides[members] >= SIDE).any(axis=1)
                result[members] = np.where(within, self._expected(group, fit, sizes), np.nan)
        for index in np.flatnonzero(np.isfinite(result)).tolist():
            known, shape = OPERATORS.get(operator), tuple(shapes[index].tolist())
            by_axis = dict(zip(axes, shape, strict=True))
            if known.unmet(by_axis) or known.refusal(by_axis, dtype) or (operator, dtype, shape) in self._failed:
                result[index] = np.nan
        return result

    def gap(self, operator: str, dtype: str, axes: tuple[str, ...], shape: tuple[int, ...]) -> str:
        """Return the reason why the latency of a shape is unknown, to follow a colon."""
        by_axis, shapes = dict(zip(axes, shape, strict=True)), np.array([shape])
        if not (groups := self._groups(operator, dtype, axes, shapes)):
            return f"no model of {operator}, which has to be measured"
        (group,) = groups
        if (fit := self._fit(group)) is None:
            count = len(self._measured.get(group, ()))
            return f"{count} shapes with m={group.rows} and this alignment in the table; a model needs {LEAST}"
        if not fit.reaches(np.array([[size for axis, size in by_axis.items() if axis in _SIZES]])).all():
            return f"no measured shape within a factor of {REACH} in every size"
        if max(by_axis[axis] for axis in _SIDES) < SIDE:
            return f"neither side of the weight reaches {SIDE}"
        return "the operator refuses this shape, or failed there when it was measured"

    @cached_property
    def _failed(self) -> frozenset[tuple[str, str, tuple[int, ...]]]:
        rows = (self.measurements[row] for row in self.measurements.errors)
        return frozenset((row.operator, row.dtype, tuple(row.shape.values())) for row in rows)

    def error(self, rows: int, dtype: str = "bf16") -> float | None:
        """Return the median of ``errors`` over all operators; None where nothing is modelled."""
        errors = list(self.errors(rows, dtype).values())
        return float(np.median(np.concatenate(errors))) if errors else None

    def errors(self, rows: int, dtype: str = "bf16") -> dict[str, Floats]:
        """Return relative errors on held-out shapes, for a number of rows and a dtype, by operator.

        All measured shapes in the same octave of every size are held out in turn. They are predicted from the rest,
        with the roofline as it is.
        """
        errors: dict[str, Floats] = {}
        for group in self._measured:
            if (group.rows, group.dtype) == (rows, dtype) and (fit := self._fit(group)) is not None:
                octaves = np.rint(np.log2(fit.shapes[fit.chosen].astype(np.float64)))
                missed = fit.field.left_out(np.unique(octaves, axis=0, return_inverse=True)[1].ravel())
                known = errors.get(group.operator, np.empty(0))
                errors[group.operator] = np.concatenate([known, np.abs(np.expm1(-missed))])
        return errors

    @cached_property
    def _measured(self) -> dict[_Group, Ints]:
        table, measured = self.measurements, dict[_Group, Ints]()
        for number, kind in enumerate(table.kinds):
            if kind.cache == "cold":
                rows = np.flatnonzero((table.kind == number) & (table.counts > 0))
                groups = self._groups(kind.operator, kind.dtype, kind.axes, table.sizes[rows, : len(kind.axes)])
                measured |= {group: rows[members] for group, members in groups.items()}
        return measured

    def _groups(self, operator: str, dtype: str, axes: tuple[str, ...], shapes: Ints) -> dict[_Group, Ints]:
        known = OPERATORS.get(operator) if operator in OPERATORS.names else None
        if known is None or known.axes != axes or not (known.pair_of or known.products == _ONE_GEMM) or not len(shapes):
            return {}
        sized = np.array([name in _SIZES for name in axes])
        finest = [known.aligned_inputs if name in _INPUTS else ALIGNED for name in axes if name in _SIZES]
        classes = np.minimum(alignment_class(shapes[:, sized]), finest)
        columns = np.column_stack([_in_kernels(known, dtype, shapes, sized), shapes[:, ~sized], classes])
        keys, group_of = np.unique(columns, axis=0, return_inverse=True)
        others, groups = [name for name in axes if name not in _SIZES], dict[_Group, Ints]()
        for number, (kernel, *key) in enumerate(keys.tolist()):
            fixed, alignment = key[: len(others)], tuple(key[len(others) :])
            group = _Group(operator, dtype, tuple(zip(others, fixed, strict=True)), alignment, bool(kernel))
            groups[group] = np.flatnonzero(group_of.ravel() == number)
        return groups

    def _fit(self, group: _Group) -> _Fit | None:
        if group not in self._fits:
            self._fits[group] = self._fitted(group)
        return self._fits[group]

    def _fitted(self, group: _Group) -> _Fit | None:
        rows = self._measured.get(group, np.empty(0, dtype=np.int64))
        if len(rows) < LEAST:
            return None
        axes = self.measurements.kinds[int(self.measurements.kind[rows[0]])].axes
        sized = [index for index, name in enumerate(axes) if name in _SIZES]
        shapes, ns = self.measurements.sizes[rows][:, sized], self.measurements.median_ns[rows]
        terms = self._terms(group, shapes)
        known = np.isfinite(terms).all(axis=1)
        if known.sum() < LEAST:
            return None
        shapes, ns, terms = shapes[known], ns[known], terms[known]
        coefficients = np.ones(terms.shape[1]) if group.pair_of else fitted(terms, ns)
        chosen = drawn(len(ns))
        residuals = np.log(ns[chosen] / (terms[chosen] @ coefficients))
        return _Fit(shapes, chosen, coefficients, Kriging.fit(shapes[chosen], residuals))

    def _expected(self, group: _Group, fit: _Fit, sizes: Ints) -> Floats:
        return self._terms(group, sizes) @ fit.coefficients * np.exp(fit.field.predict(sizes))

    def _terms(self, group: _Group, sizes: Ints) -> Floats:
        if group.pair_of:
            return np.stack([self._gemm(group, sizes[:, pair]) for pair in ([0, 1], [1, 2])], axis=1)
        k, n = sizes[:, 0], sizes[:, 1]
        scheme = None if numbers_of(group.dtype) == group.dtype else stored_as(group.dtype)
        if scheme is None:  # 16 bits each, whatever the dtype
            weight_bytes = ITEM_BYTES[ACTIVATIONS] * k.astype(np.float64) * n
        else:
            weight_bytes = np.array([float(scheme.bytes(rows, columns)) for columns, rows in sizes.tolist()])
        in_kernel = group.kernel and group.rows <= FEW_ROWS and not (scheme is not None and scheme.input_quantiser)
        if in_kernel and group.rows == 1:
            return (wide_row_terms if scheme is None else row_terms)(k, n, self.gpu, weight_bytes)
        terms_of = shared_terms if in_kernel and len(self._measured[group]) >= _ENOUGH else gemm_terms
        return terms_of(group.rows, k, n, self.gpu, weight_bytes)

    def _gemm(self, pair: _Group, sizes: Ints) -> Floats:
        """Return the latency in ns of one GEMM of a pair, however far the measured ones are; NaN where none is."""
        result, rows = np.full(len(sizes), np.nan), np.full((len(sizes), 1), pair.rows, dtype=np.int64)
        groups = self._groups(str(pair.pair_of), pair.dtype, ("m", "k", "n"), np.hstack([rows, sizes]))
        for group, members in groups.items():
            if (fit := self._fit(group)) is not None:
                result[members] = self._expected(group, fit, sizes[members])
        return result


def _in_kernels(operator: Operator, dtype: str, shapes: Ints, sized: Bools) -> Bools:
    """Mark shapes whose weight, or both of a pair, kernels of GAC's read; of 16 bits those of the operator's own."""
    if numbers_of(dtype) == dtype:
        return operator.in_own_kernel(shapes)
    unread = cache(stored_as(dtype).kernel_unsupported_reason)
    sizes = (zip(size[1:], size, strict=False) for size in shapes[:, sized].tolist())  # rows and columns of each weight
    return np.array([all(unread(*weight) is None for weight in weights) for weights in sizes], dtype=np.bool_)
