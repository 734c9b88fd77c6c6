"""What a form takes at each dim, looked up in a latency table."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from gac.core.arrays import Ints
from gac.core.operations import Operation, linear, round_inputs
from gac.core.workloads import Workload
from gac.forms import Form
from gac.forms.tensor_parallel import split_fused
from gac.models.sites import Weight
from gac.profiling.cliffs import operator_period, sound_dims
from gac.profiling.operators import with_decode_kernel
from gac.profiling.table import Profile
from gac.runtime.contract import apart_from
from gac.schemes import DEFAULT_SCHEME, Scheme, scheme_named

T = TypeVar("T")

UNKNOWN = -1
_IN, _OUT = "k", "n"
BF16 = scheme_named(DEFAULT_SCHEME)
DTYPE = BF16.dtype
"""What latencies are looked up in where nothing else is said."""

LOADED = 16
"""Triton reads rows that are multiples of as many numbers 16 bytes at a time, and others one by one."""

MEASURED, INTERPOLATED, MODELLED = 0, 1, 2
"""How a latency was obtained; the larger, the less directly."""

Known = tuple[Ints, Ints]
"""Latency in ns (-1 where unknown) and how each known one was obtained, both of shape ``(dims, workloads)``."""


@dataclass(frozen=True, eq=False)
class Timing:
    """Where latencies come from: a profile (or None: all unknown), and the workloads.

    ``triton``: GEMMs of one row run in Triton, see ``gac.runtime.decode_kernel``; those of weights in a storage do not.
    ``gpus``: over how many every weight is split; ``gac.allocation.split_latencies`` has the latencies of several.
    """

    profile: Profile | None
    workloads: tuple[Workload, ...]
    triton: bool = False
    gpus: int = 1
    _known: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    def once(self, key: Hashable, weight: Weight, look_up: Callable[[], T]) -> T:
        """What is looked up for a weight, once for all that differ in their names alone.

        Args:
            key: what is looked up of it.
        """
        asked = key, _unnamed(weight)
        if asked not in self._known:
            self._known[asked] = look_up()
        found: T = self._known[asked]
        return found

    def of_weight(self, form: Form, weight: Weight, dims: Ints, scheme: Scheme = BF16) -> Known:
        """One weight in one form at each of the dims."""
        if not form.latency.timed and form.latency.gemm_after_fused(weight, 1, 1) is not None:
            return self._one_by_one(form, weight, dims, scheme)
        sizes, axis = self._for_all(_each(form.size, weight, dims)), form.latency.axis(weight)
        return self._along(
            lambda rows: form.latency.operation(weight, int(dims[0]), rows), axis, sizes, scheme, weight.input_from_norm
        )

    def _one_by_one(self, form: Form, weight: Weight, dims: Ints, scheme: Scheme) -> Known:
        """Its first GEMM and what follows it, of a form whose operation no table holds."""
        widths = self._for_all(_each(partial(split_fused, form, gpus=self.gpus), weight, dims))
        first, after = self.of_fused(weight, widths, scheme), self._second(form, weight, dims, scheme)
        return sum_of_latencies(first[0], after[0]), np.maximum(first[1], after[1])

    def _second(self, form: Form, weight: Weight, dims: Ints, scheme: Scheme) -> Known:
        return self._along(lambda rows: _after(form, weight, int(dims[0]), rows), "k", self._for_all(dims), scheme)

    def after_fused(self, form: Form, weight: Weight, dims: Ints, scheme: Scheme = BF16) -> Known:
        """What such a weight takes beside the GEMM that it shares, and in its place where it runs apart."""
        after = None
        if form.latency.gemm_after_fused(weight, 1, 1) is not None:
            after = self._second(form, weight, dims, scheme)
        apart = self.of_fused(weight, self._features(form, weight, dims)[0], scheme)
        return apart if after is None else (sum_of_latencies(apart[0], after[0]), np.maximum(apart[1], after[1]))

    def joined(self, form: Form, weight: Weight, dims: Ints) -> Ints:
        """Output features that it adds to the GEMM that it shares, ``(dims, workloads)``: 0 where it runs apart."""
        return self._features(form, weight, dims)[1]

    def none_joined(self, count: int) -> Ints:
        """The same of so many dims of a weight that shares none."""
        return np.zeros((count, len(self.workloads)), dtype=np.int64)

    def of_shared(self, first: Weight, widths: Ints, scheme: Scheme = BF16) -> Known:
        """What weights run together, at each of the sums of what they have ``joined``."""
        return self.of_fused(first, widths, scheme)

    def of_fused(self, first: Weight, widths: Ints, scheme: Scheme = BF16) -> Known:
        """The GEMM that several weights share, at each of its output widths ``(dims, workloads)``; none for 0.

        Args:
            first: one of them; they read the same input.
        """
        along = partial(
            self._along, lambda rows: linear(rows, first.in_features, 1), "n", scheme=scheme, made=first.input_from_norm
        )
        known = self.once(("widths", scheme.name), first, lambda: ByWidth(len(self.workloads)))
        return known.at(widths, lambda lacking: along(self._for_all(lacking)))

    def sound(self, form: Form, weight: Weight, dims: Ints, fused: bool, scheme: Scheme = BF16) -> NDArray[np.bool_]:
        """Which dims the profile shows to be sound for all workloads (for a single row where there is none).

        A dim that is moved by the shared GEMM alone is judged by the weight's own. A scheme is judged by its own rows
        where the profile has any, else by those of 16 bits, and dims are aligned for these in any case: so inputs come.
        """
        assert self.profile is not None, "soundness needs a profile"
        after = fused and form.latency.gemm_after_fused(weight, 1, 1) is not None
        axis = "k" if after else form.latency.axis(weight)
        assert axis is not None
        sizes = dims if after else _each(form.size, weight, dims)
        sound: NDArray[np.bool_] = sizes % (LOADED if self.triton and scheme.storage is None else 1) == 0
        for rows in [workload.rows for workload in self.workloads] or [1]:
            operation = self.run_as(
                _after(form, weight, 1, rows) if after else form.latency.operation(weight, 1, rows), scheme
            )
            operator, fixed = operation.operator, [fixed_of(operation, axis)]
            dtype = scheme.dtype if self.profile.measured_in(operator, scheme.dtype) else DTYPE
            sound &= sound_dims(self.profile, operator, fixed, axis, sizes, dtype)
            sound &= sizes % operator_period(self.profile, operator, DTYPE) == 0
        for attention in self._attentions(form, weight):
            cached = form.cache.axis(weight)
            assert cached is not None
            sound &= sound_dims(self.profile, attention.operator, [fixed_of(attention, cached)], cached, dims)
        nothing: NDArray[np.bool_] = sizes == 0
        return sound | nothing

    def _attentions(self, form: Form, weight: Weight) -> list[Operation]:
        """What attends over a cache that the form makes smaller, for each workload that decodes."""
        moved = weight.query_heads and form.cache.axis(weight) is not None
        decoding = [one for one in self.workloads if one.phase == "decode" and moved]
        return [form.cache.attention(weight, 1, one.batch, one.tokens) for one in decoding]

    def run_as(self, operation: Operation, scheme: Scheme) -> Operation:
        """What runs instead of this operation of 16-bit weights."""
        return scheme.operation(with_decode_kernel(operation, scheme.dtype) if self.triton else operation)

    def _for_all(self, sizes: Ints) -> Ints:
        return np.repeat(sizes[:, None], len(self.workloads), axis=1)

    def _features(self, form: Form, weight: Weight, dims: Ints) -> tuple[Ints, Ints]:
        """Of its first GEMM on a GPU, ``(dims, workloads)``: where it runs apart, and where in the shared one."""
        features = self._for_all(_each(partial(split_fused, form, gpus=self.gpus), weight, dims))
        apart = features >= np.array([apart_from(workload.rows) for workload in self.workloads], dtype=np.int64)
        return np.where(apart, features, 0), np.where(apart, 0, features)

    def _along(
        self,
        operation_at: Callable[[int], Operation],
        axis: str | None,
        sizes: Ints,
        scheme: Scheme,
        made: bool = False,
    ) -> Known:
        """What runs for a number of rows, with an axis of each of the sizes ``(dims, workloads)``; nothing for 0.

        Without an axis it runs as it is. What makes the input (``made``) rounds it for schemes that read it rounded.
        """
        latency, how = np.full(sizes.shape, UNKNOWN, dtype=np.int64), np.full(sizes.shape, MEASURED, dtype=np.int64)
        if self.profile is None or len(sizes) == 0:
            return latency, how
        for column, workload in enumerate(self.workloads):
            operation = self.run_as(operation_at(workload.rows), scheme)
            if axis is not None:
                runs = sizes[:, column] > 0
                latency[~runs, column] = 0
                latency[runs, column], how[runs, column] = look_up(
                    self.profile, operation, axis, sizes[runs, column], scheme.dtype
                )
            elif (point := self.profile.point(operation, scheme.dtype)) is not None:
                latency[:, column] = point
            elif _OUT in operation.axes:
                size = np.array([operation.axes[_OUT]])
                latency[:, column], how[:, column] = look_up(self.profile, operation, _OUT, size, scheme.dtype)
            if made:
                latency[:, column] = self._rounded_before(latency[:, column], operation, scheme)
        return latency, how

    def _rounded_before(self, latency: Ints, operation: Operation, scheme: Scheme) -> Ints:
        """The latencies of GEMMs with the inputs of one, without their rounding where the table has it."""
        assert self.profile is not None
        if (numbers := scheme.input_dtype) is None:
            return latency
        rows, read = operation.axes["m"], np.array([operation.axes[_IN]])
        rounding, _ = self.profile.latency(round_inputs(numbers, rows, 1).operator, {"m": rows}, _IN, read, DTYPE)
        both = (latency > 0) & (rounding != UNKNOWN)
        return np.where(both, np.maximum(latency - rounding, 1), latency)


class ByWidth:
    """What weights run together takes at each of its widths, each looked up once: combinations share few widths."""

    def __init__(self, workloads: int) -> None:
        self._looked_up = np.zeros(0, dtype=np.bool_)
        self._known = np.zeros((2, 0, workloads), dtype=np.int64)

    def at(self, widths: Ints, look_up: Callable[[Ints], Known]) -> Known:
        """At the widths ``(n, workloads)``.

        Args:
            look_up: finds it for all workloads at each of some widths ``(m,)``.
        """
        if (more := int(widths.max(initial=-1)) + 1 - len(self._looked_up)) > 0:
            self._looked_up = np.pad(self._looked_up, (0, more))
            self._known = np.pad(self._known, ((0, 0), (0, more), (0, 0)))
        asked = np.zeros_like(self._looked_up)
        asked[widths] = True
        lacking = np.flatnonzero(asked & ~self._looked_up)
        if len(lacking):
            self._known[:, lacking] = look_up(lacking)
            self._looked_up[lacking] = True
        latency, how = self._known[:, widths, np.arange(widths.shape[1])]
        return latency, how


@lru_cache(maxsize=4096)
def _unnamed(weight: Weight) -> Weight:
    return replace(weight, name="", input_group=None)


def look_up(profile: Profile, operation: Operation, axis: str, dims: Ints, dtype: str) -> tuple[Ints, Ints]:
    """Latency of an operation at each of the dims along an axis, and how it was obtained; -1 where unknown.

    What is measured or interpolated wins over what is modelled.
    """
    fixed = fixed_of(operation, axis)
    ns, measured = profile.latency(operation.operator, fixed, axis, dims, dtype)
    how = np.where(measured, MEASURED, INTERPOLATED)
    if (lacking := ns == UNKNOWN).any():
        ns[lacking] = profile.modelled(operation.operator, fixed, axis, dims[lacking], dtype)
        how[lacking] = MODELLED
    return ns, how


def sum_of_latencies(left: Ints, right: Ints) -> Ints:
    """The sum, unknown where either is."""
    return np.where((left == UNKNOWN) | (right == UNKNOWN), UNKNOWN, left + right)


def _each(count: Callable[[Weight, int], int], weight: Weight, dims: Ints) -> Ints:
    """What a form counts at each dim: how long the axis is that it moves, or the features of its first GEMM."""
    return np.array([count(weight, dim) for dim in dims.tolist()], dtype=np.int64)


def _after(form: Form, weight: Weight, dim: int, rows: int) -> Operation:
    operation = form.latency.gemm_after_fused(weight, dim, rows)
    assert operation is not None
    return operation


def fixed_of(operation: Operation, axis: str) -> dict[str, int]:
    """The sizes of the other axes."""
    return {name: size for name, size in operation.shape if name != axis}
