"""Latencies of forms at each dim, looked up in a latency table: GEMMs, and attention of models that decode."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from gac.core.arrays import Ints
from gac.core.operations import Operation, linear, round_inputs, routed
from gac.core.workloads import Workload
from gac.forms import Form, form_named
from gac.forms.tensor_parallel import split_fused
from gac.models.sites import Site, Weight
from gac.plan.engines import TRANSFORMERS, Engine, Step
from gac.plan.plan import WeightChoice
from gac.profiling.cliffs import operator_period, sound_dims
from gac.profiling.table import Profile
from gac.runtime.contract import apart_from
from gac.schemes import DEFAULT_SCHEME, Scheme, scheme_named

T = TypeVar("T")

UNKNOWN = -1
_IN, _OUT = "k", "n"
BF16 = scheme_named(DEFAULT_SCHEME)
DTYPE = BF16.dtype
"""Default dtype of look-ups."""

MEASURED, INTERPOLATED, MODELLED = 0, 1, 2
"""Sources of a latency, from the most direct one."""

Latencies = tuple[Ints, Ints]
"""Latencies in ns (``UNKNOWN``, -1, where unknown) and their sources, both of shape ``(dims, workloads)``."""


@dataclass(frozen=True, eq=False)
class Timing:
    """Source of latencies: a profile (None: all are unknown), and the workloads.

    ``gpus``: over how many every weight is split, see ``gac.allocation.split_latencies`` for several. ``steps``: whole
    steps of the dense model in the engine, by workload, where they are known; their scale is that of every GEMM, and
    the second GEMM of every pair has a launch of theirs (``launches``).
    """

    profile: Profile | None
    workloads: tuple[Workload, ...]
    gpus: int = 1
    engine: Engine = TRANSFORMERS
    steps: Mapping[str, Step] = field(default_factory=dict)
    _cache: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    def once(self, key: Hashable, weight: Weight, look_up: Callable[[], T]) -> T:
        """Look something up for a weight, once for all that differ in their names alone."""
        full_key = key, unnamed(weight)
        if full_key not in self._cache:
            self._cache[full_key] = look_up()
        result: T = self._cache[full_key]
        return result

    def unknown(self, count: int) -> Latencies:
        latency = np.full((count, len(self.workloads)), UNKNOWN, dtype=np.int64)
        return latency, np.full_like(latency, MEASURED)

    @property
    def times_experts(self) -> bool:
        """False where the table has no routed experts: plans then leave experts and routers out of latencies."""
        operator = self.engine.operation(routed(1, 1, 1, 1, 1), DTYPE).operator
        return self.profile is not None and self.profile.measured_in(operator, DTYPE)

    def of_weight(self, form: Form, weight: Weight, dims: Ints, scheme: Scheme = BF16) -> Latencies:
        if weight.is_routed and not self.times_experts:
            latency, origin = self.unknown(len(dims))
            return np.zeros_like(latency), origin
        if not form.latency.timed and form.latency.gemm_after_fused(weight, 1, 1) is not None:  # in no table as one
            widths = self._for_all(_at_each(partial(split_fused, form, gpus=self.gpus), weight, dims))
            return add(self.of_shared(weight, widths, scheme), self._second_gemm(form, weight, dims, scheme))
        counted = dims if weight.is_routed else _at_each(form.size, weight, dims)
        sizes, axis = self._for_all(counted), form.latency.axis(weight)
        return self._along(
            lambda rows: form.latency.operation(weight, int(dims[0]), rows), axis, sizes, scheme, weight.input_from_norm
        )

    def _second_gemm(self, form: Form, weight: Weight, dims: Ints, scheme: Scheme) -> Latencies:
        return self._along(lambda rows: _after(form, weight, int(dims[0]), rows), _IN, self._for_all(dims), scheme)

    def after_fused(self, form: Form, weight: Weight, dims: Ints, scheme: Scheme = BF16) -> Latencies:
        """Return the latencies of a weight less the GEMM that it shares; with its first GEMM where that runs apart."""
        apart = self.of_shared(weight, self._features(form, weight, dims)[0], scheme)
        if form.latency.gemm_after_fused(weight, 1, 1) is None:
            return apart
        return add(apart, self._second_gemm(form, weight, dims, scheme))

    def launches(self, form: Form, weight: Weight, dims: Ints) -> Ints:
        """Return what GEMMs beyond the dense model's cost steps beside their own time, of shape ``(dims, workloads)``.

        That is the second GEMM of a pair: siblings share the first one, as they share the dense model's.
        """
        steps = [self.steps.get(str(workload)) for workload in self.workloads]
        ns = np.array([0 if step is None else step.launch_ns for step in steps], dtype=np.int64)
        further = (dims > 0) & (form.latency.gemm_after_fused(weight, 1, 1) is not None)
        return further[:, None] * ns

    def shared_width(self, form: Form, weight: Weight, dims: Ints) -> Ints:
        return self._features(form, weight, dims)[1]

    def no_width(self, count: int) -> Ints:
        return np.zeros((count, len(self.workloads)), dtype=np.int64)

    def of_shared(self, first: Weight, widths: Ints, scheme: Scheme = BF16) -> Latencies:
        """Return the latencies of a GEMM of the weight's input at output widths ``(dims, workloads)``."""
        gemm, from_norm = partial(linear, k=first.in_features, n=1), first.input_from_norm
        return of_each_size(widths, lambda sizes: self._along(gemm, _OUT, self._for_all(sizes), scheme, from_norm))

    def sound(self, form: Form, weight: Weight, dims: Ints, fused: bool, scheme: Scheme = BF16) -> NDArray[np.bool_]:
        """Return the mask of the dims that the profile shows to be sound for all workloads (one row without any).

        A dim that changes the shared GEMM alone is judged by the weight's second one. A scheme is judged by its own
        rows where the profile has any, else by those of 16 bits, and dims are aligned for 16 bits in any case, as
        inputs are.
        """
        assert self.profile is not None, "soundness needs a profile"
        if weight.is_routed:
            return np.ones(len(dims), np.bool_)
        after = fused and form.latency.gemm_after_fused(weight, 1, 1) is not None
        axis = _IN if after else form.latency.axis(weight)
        if axis is None:  # the dim changes no GEMM
            return np.ones(len(dims), np.bool_)
        sizes = dims if after else _at_each(form.size, weight, dims)
        sound: NDArray[np.bool_] = np.ones(len(sizes), np.bool_)
        for rows in [workload.rows for workload in self.workloads] or [1]:
            operation = _after(form, weight, 1, rows) if after else form.latency.operation(weight, 1, rows)
            operation = self._as_run(operation, scheme)
            operator, fixed = operation.operator, [other_axes(operation, axis)]
            dtype = scheme.dtype if self.profile.measured_in(operator, scheme.dtype) else DTYPE
            sound &= sound_dims(self.profile, operator, fixed, axis, sizes, dtype)
            sound &= sizes % operator_period(self.profile, operator, DTYPE) == 0
        if weight.query_heads and (cached := form.cache.axis(weight)) is not None:
            for workload in (workload for workload in self.workloads if workload.phase == "decode"):
                attention = form.cache.attention(weight, 1, workload.batch, workload.tokens)
                fixed = [other_axes(attention, cached)]
                sound &= sound_dims(self.profile, attention.operator, fixed, cached, dims)
        nothing: NDArray[np.bool_] = sizes == 0
        return sound | nothing

    def _as_run(self, operation: Operation, scheme: Scheme) -> Operation:
        """Return an operation as the engine runs it in a scheme."""
        return self.engine.operation(scheme.operation(operation), scheme.dtype)

    def _for_all(self, sizes: Ints) -> Ints:
        return np.repeat(sizes[:, None], len(self.workloads), axis=1)

    def _features(self, form: Form, weight: Weight, dims: Ints) -> tuple[Ints, Ints]:
        features = self._for_all(_at_each(partial(split_fused, form, gpus=self.gpus), weight, dims))
        if self.engine.shares:
            return np.zeros_like(features), features
        apart = features >= np.array([apart_from(workload.rows) for workload in self.workloads], dtype=np.int64)
        return np.where(apart, features, 0), np.where(apart, 0, features)

    def _along(
        self,
        operation_of: Callable[[int], Operation],
        axis: str | None,
        sizes: Ints,
        scheme: Scheme,
        from_norm: bool = False,
    ) -> Latencies:
        """Latencies of an operation (by rows) with an axis of each of the sizes ``(dims, workloads)``; none for 0.

        Without an axis it runs as it is. A norm that makes the input quantises it too, for schemes that need that.
        """
        latency, source = self.unknown(len(sizes))
        if self.profile is None or len(sizes) == 0:
            return latency, source
        for column, workload in enumerate(self.workloads):
            operation = self._as_run(operation_of(workload.rows), scheme)
            if axis is not None:
                runs = sizes[:, column] > 0
                latency[~runs, column] = 0
                latency[runs, column], source[runs, column] = look_up(
                    self.profile, operation, axis, sizes[runs, column], scheme.dtype
                )
            elif (point := self.profile.point(operation, scheme.dtype)) is not None:
                latency[:, column] = point
            elif _OUT in operation.axes:
                size = np.array([operation.axes[_OUT]])
                latency[:, column], source[:, column] = look_up(self.profile, operation, _OUT, size, scheme.dtype)
            if from_norm and not self.engine.plugin:
                latency[:, column] = self._without_quantising(latency[:, column], operation, scheme)
            if (step := self.steps.get(str(workload))) is not None:
                scale = step.scale_in(scheme.name)
                scaled = (latency[:, column] * scale.numerator) // scale.denominator
                latency[:, column] = np.where(latency[:, column] == UNKNOWN, UNKNOWN, scaled)
        return latency, source

    def _without_quantising(self, latency: Ints, operation: Operation, scheme: Scheme) -> Ints:
        assert self.profile is not None
        if (numbers := scheme.input_dtype) is None:
            return latency
        rows, read = operation.axes["m"], np.array([operation.axes[_IN]])
        rounding, _ = self.profile.latency(round_inputs(numbers, rows, 1).operator, {"m": rows}, _IN, read, DTYPE)
        both = (latency > 0) & (rounding != UNKNOWN)
        return np.where(both, np.maximum(latency - rounding, 1), latency)


def of_each_size(sizes: Ints, look_up: Callable[[Ints], Latencies]) -> Latencies:
    """Return the latencies at sizes ``(n, workloads)``, each looked up once for all workloads: few of them differ."""
    present = np.zeros(int(sizes.max(initial=-1)) + 1, dtype=np.bool_)
    present[sizes] = True
    latency, source = look_up(np.flatnonzero(present))
    rows, columns = (np.cumsum(present) - 1)[sizes], np.arange(sizes.shape[1])
    return latency[rows, columns], source[rows, columns]


@lru_cache(maxsize=4096)
def unnamed(weight: Weight) -> Weight:
    return replace(weight, name="", input_group=None)


def look_up(profile: Profile, operation: Operation, axis: str, dims: Ints, dtype: str) -> Latencies:
    """Look up the latencies of an operation at each of the dims along an axis, and their sources; -1 where unknown.

    A latency is measured, else interpolated, else modelled. The source of an unknown one has no meaning.
    """
    fixed = other_axes(operation, axis)
    ns, measured = profile.latency(operation.operator, fixed, axis, dims, dtype)
    source = np.where(measured, MEASURED, INTERPOLATED)
    if (lacking := ns == UNKNOWN).any():
        ns[lacking] = profile.modelled(operation.operator, fixed, axis, dims[lacking], dtype)
        source[lacking] = MODELLED
    return ns, source


def sum_of_latencies(left: Ints, right: Ints) -> Ints:
    return np.where((left == UNKNOWN) | (right == UNKNOWN), UNKNOWN, left + right)


def add(left: Latencies, right: Latencies) -> Latencies:
    return sum_of_latencies(left[0], right[0]), np.maximum(left[1], right[1])


def other_axes(operation: Operation, axis: str) -> dict[str, int]:
    return {name: size for name, size in operation.shape if name != axis}


def _at_each(count: Callable[[Weight, int], int], weight: Weight, dims: Ints) -> Ints:
    return np.array([count(weight, dim) for dim in dims.tolist()], dtype=np.int64)


def _after(form: Form, weight: Weight, dim: int, rows: int) -> Operation:
    operation = form.latency.gemm_after_fused(weight, dim, rows)
    assert operation is not None
    return operation


# --- attention ------------------------------------------------------------------------------------------------------


def attention_latency(timing: Timing, form: Form, weight: Weight, dims: Ints) -> Latencies:
    """Return the share of a k_proj or v_proj in the latency of attention, at each of the dims.

    Each of the two has half of it. Over latents a table has attention along the rank of either, with a fixed partner
    rank for the other: the share is that, less half of the latency with two such ranks. A dim that makes the cache
    smaller without an operation of its own takes the fraction that is left.

    0 where the table lacks attention over a dense cache of that context, for forms that leave it dense; for
    prefill, whose attention no form changes; and on several GPUs.
    """
    latency = np.zeros((len(dims), len(timing.workloads)), dtype=np.int64)
    source = np.full(latency.shape, MEASURED, dtype=np.int64)
    if timing.profile is None or not weight.query_heads or timing.gpus > 1 or len(dims) == 0:
        return latency, source
    for column, workload in enumerate(timing.workloads):
        if workload.phase == "prefill":
            continue
        if (axis := form.cache.axis(weight)) is not None:
            operation = form.cache.attention(weight, int(dims[0]), workload.batch, workload.tokens)
            both = operation.axes | {axis: form.cache.assumed_partner_dim(weight)}
            ns, source[:, column] = look_up(timing.profile, operation, axis, dims, DTYPE)
            partners = timing.profile.point(replace(operation, shape=tuple(both.items())), DTYPE)
            known = np.where(ns == UNKNOWN, UNKNOWN, np.maximum(ns - (partners or 0) // 2, 1))
            latency[:, column] = UNKNOWN if partners is None else known
        elif (dense := _dense_attention(timing.profile, weight, workload)) is not None:
            kept = np.array([form.cache.numbers(weight, dim) for dim in dims.tolist()], dtype=np.int64)
            latency[:, column] = -(-dense * kept // (2 * weight.cached_numbers))
    return latency, source


def summed_attention(timing: Timing, choices: Iterable[WeightChoice], workload: str) -> int:
    column = [str(other) for other in timing.workloads].index(workload)
    rows = (
        attention_latency(timing, form_named(choice.form), choice.weight, np.array([choice.dim]))[0]
        for choice in choices
    )
    return sum(int(latency[0, column]) for latency in rows)


def has_attention_latency(timing: Timing, form: Form, sites: Iterable[Site]) -> bool:
    """True if the table has the latency of a form that attention reads, and that of attention over a dense cache."""
    weights = (weight for site in sites for weight in site.weights)
    return all(
        timing.once((variant.name, "attention"), weight, partial(_has_attention, timing, variant, weight))
        for weight in weights
        for variant in form.variants(weight)
        if variant.applies_to(weight)
    )


def _has_attention(timing: Timing, form: Form, weight: Weight) -> bool:
    if form.cache.axis(weight) is None or timing.profile is None or not weight.query_heads or timing.gpus > 1:
        return False
    decoding = [workload for workload in timing.workloads if workload.phase == "decode"]
    known = attention_latency(timing, form, weight, np.array([form.cache.assumed_partner_dim(weight)]))[0] != UNKNOWN
    dense = (_dense_attention(timing.profile, weight, workload) for workload in decoding)
    return bool(known.all()) and None not in dense


def _dense_attention(profile: Profile, weight: Weight, workload: Workload) -> int | None:
    return profile.point(form_named("dense").cache.attention(weight, 1, workload.batch, workload.tokens), DTYPE)
