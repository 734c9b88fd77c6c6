"""Latencies where every weight is split over several GPUs: a GPU's part of each GEMM, and the collectives."""

from collections.abc import Callable, Iterator, Sequence
from math import lcm
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from gac.allocation.latencies import BF16, DTYPE, Latencies, Timing, add, look_up, of_each_size
from gac.core.arrays import Ints
from gac.core.errors import ProfileError
from gac.core.operations import Operation, all_gather
from gac.forms import Form
from gac.forms.tensor_parallel import COLLECTIVES, moved_axes, split_gemms, split_operations
from gac.models.sites import Site, Weight
from gac.plan.recipe import Deployment
from gac.profiling.cliffs import operator_period, sound_dims
from gac.profiling.table import Profile
from gac.schemes import Scheme

_OUT = "n"
Lists: TypeAlias = Sequence[tuple[Operation, ...]]
"""The operations at each of some dims; the same operators at each, or none."""


def check_collectives(profile: Profile, deployment: Deployment, sites: Sequence[Site]) -> None:
    """Refuse a table without the collectives, as wide as the sites need them, of so many GPUs and the workloads.

    Raises:
        ProfileError: says how they are measured.
    """
    gpus = deployment.tensor_parallel
    written = max((weight.out_features for site in sites for weight in site.weights if weight.to_residual), default=1)
    fused = ([site.weights[position] for position in site.fused] for site in sites)
    gathered = max(
        (sum(min(weight.in_features, weight.out_features) for weight in weights) for weights in fused), default=1
    )
    for workload in deployment.parsed:
        for operator, widest in (("all_reduce", written), ("all_gather", max(written, gathered))):
            known = profile.rows_of(operator, {"gpus": gpus, "m": workload.rows}, "n", DTYPE).dims
            if known.max(initial=0) < widest:
                raise ProfileError(
                    f"a latency table of {profile.header.gpu} without {operator} of {widest:,} columns on {gpus} GPUs "
                    f"for {workload}",
                    "the collectives of a split model",
                    f"Measure them with torchrun --nproc-per-node {gpus} -m gac profile --collectives "
                    f"--workload {workload} -o TABLE, or plan without latencies: latency='any' (--latency any).",
                )


class SplitTiming(Timing):
    """Latencies on each of several GPUs, which all run the same.

    A GPU runs the list of ``gac.forms.tensor_parallel``: each GEMM with the sizes that it has there, looked up
    by itself, and the collectives that follow. What several weights gather from a shared GEMM is gathered at once.
    """

    def of_weight(self, form: Form, weight: Weight, dims: Ints, scheme: Scheme = BF16) -> Latencies:
        return self._summed(lambda rows: self._lists(form, weight, dims, rows), len(dims), scheme)

    def after_fused(self, form: Form, weight: Weight, dims: Ints, scheme: Scheme = BF16) -> Latencies:
        def rest(rows: int) -> Lists:
            lists = self._lists(form, weight, dims, rows)
            return [operations[2 if _gather_follows(operations) else 1 :] for operations in lists]

        features, numbers = self._features(form, weight, dims)[0], self._to_gather(form, weight, dims)
        apart = self._gemm_and_gather(weight, features, np.where(features, numbers, 0), scheme)
        return add(apart, self._summed(rest, len(dims), scheme))

    def shared_width(self, form: Form, weight: Weight, dims: Ints) -> Ints:
        """Return its features and the numbers that it gathers with the others, ``(dims, 2 * workloads)``."""
        features = super().shared_width(form, weight, dims)
        return np.hstack([features, np.where(features, self._to_gather(form, weight, dims), 0)])

    def no_width(self, count: int) -> Ints:
        return np.tile(super().no_width(count), 2)

    def of_shared(self, first: Weight, widths: Ints, scheme: Scheme = BF16) -> Latencies:
        features, numbers = np.hsplit(widths, 2)
        return self._gemm_and_gather(first, features, numbers, scheme)

    def _gemm_and_gather(self, first: Weight, features: Ints, numbers: Ints, scheme: Scheme) -> Latencies:
        return add(super().of_shared(first, features, scheme), of_each_size(numbers, self._of_gathers))

    def _of_gathers(self, numbers: Ints) -> Latencies:
        latency, source = self.unknown(len(numbers))
        if self.profile is not None:
            for column, workload in enumerate(self.workloads):
                gather = all_gather(self.gpus, workload.rows, 1)
                latency[:, column], source[:, column] = look_up(self.profile, gather, _OUT, numbers, DTYPE)
        latency[numbers == 0], source[numbers == 0] = 0, 0
        return latency, source

    def _to_gather(self, form: Form, weight: Weight, dims: Ints) -> Ints:
        lists = self._lists(form, weight, dims, 1)
        numbers = [operations[1].axes[_OUT] if _gather_follows(operations) else 0 for operations in lists]
        return self._for_all(np.array(numbers, dtype=np.int64))

    def sound(self, form: Form, weight: Weight, dims: Ints, fused: bool, scheme: Scheme = BF16) -> NDArray[np.bool_]:
        sound = np.ones(len(dims), dtype=np.bool_)
        for rows in [workload.rows for workload in self.workloads] or [1]:
            lists = [split_gemms(form, weight, dim, rows, self.gpus) for dim in dims.tolist()]
            for position, axis in enumerate(moved_axes(form, weight)):
                present = np.array([len(gemms) > position for gemms in lists])
                if axis is None or not present.any():
                    continue
                parts = [gemms[position] for gemms in lists if len(gemms) > position]
                apart = not (fused and position == 0 and form.latency.gemm_after_fused(weight, 1, 1) is not None)
                sound[present] &= self._sound(parts, axis, scheme, apart)
        return sound

    def _sound(self, gemms: Sequence[Operation], axis: str, scheme: Scheme, apart: bool) -> NDArray[np.bool_]:
        assert self.profile is not None, "soundness needs a profile"
        operator, names, sizes = _columns([self._as_run(gemm, scheme) for gemm in gemms])
        dtype = scheme.dtype if self.profile.measured_in(operator, scheme.dtype) else DTYPE
        period = lcm(*(operator_period(self.profile, operator, each) for each in (dtype, DTYPE)))
        sound: NDArray[np.bool_] = sizes[:, names.index(axis)] % period == 0
        for fixed, rows in _groups(names, sizes, axis) if apart else ():
            sound[rows] &= sound_dims(self.profile, operator, [fixed], axis, sizes[rows, names.index(axis)], dtype)
        return sound

    def _lists(self, form: Form, weight: Weight, dims: Ints, rows: int) -> Lists:
        return [split_operations(form, weight, dim, rows, self.gpus) for dim in dims.tolist()]

    def _summed(self, lists_for: Callable[[int], Lists], count: int, scheme: Scheme) -> Latencies:
        latency, source = self.unknown(count)
        if self.profile is None or not count:
            return latency, source
        latency[:] = 0
        for column, workload in enumerate(self.workloads):
            lists = lists_for(workload.rows)
            for position in range(max(map(len, lists))):
                rows = np.flatnonzero([len(operations) > position for operations in lists])
                its = self._of_operations([lists[row][position] for row in rows.tolist()], scheme)
                latency[rows, column], source[rows, column] = add((latency[rows, column], source[rows, column]), its)
        return latency, source

    def _of_operations(self, operations: Sequence[Operation], scheme: Scheme) -> Latencies:
        assert self.profile is not None
        collective = operations[0].operator in COLLECTIVES
        if not collective:
            operations = [self._as_run(operation, scheme) for operation in operations]
        operator, names, sizes = _columns(operations)
        moved = [name for column, name in enumerate(names) if len(np.unique(sizes[:, column])) > 1]
        axis = moved[-1] if moved else _OUT
        ns, source = np.empty(len(sizes), dtype=np.int64), np.empty(len(sizes), dtype=np.int64)
        for fixed, rows in _groups(names, sizes, axis):
            along, dtype = sizes[rows, names.index(axis)], DTYPE if collective else scheme.dtype
            operation = Operation(operator, tuple(fixed.items()))
            ns[rows], source[rows] = look_up(self.profile, operation, axis, along, dtype)
        return ns, source


def _gather_follows(operations: Sequence[Operation]) -> bool:
    return len(operations) > 1 and operations[1].operator == "all_gather"


def _columns(operations: Sequence[Operation]) -> tuple[str, list[str], Ints]:
    """The operator, the names of its axes, and the size of each, shape ``(operations, axes)``."""
    sizes = np.array([[size for _, size in operation.shape] for operation in operations], dtype=np.int64)
    return operations[0].operator, [name for name, _ in operations[0].shape], sizes


def _groups(names: Sequence[str], sizes: Ints, axis: str) -> Iterator[tuple[dict[str, int], Ints]]:
    """Shapes that differ along one axis alone: the sizes of the others, and their rows."""
    others, which = np.unique(np.delete(sizes, names.index(axis), axis=1), axis=0, return_inverse=True)
    rest = [name for name in names if name != axis]
    for number, fixed in enumerate(others.tolist()):
        yield dict(zip(rest, fixed, strict=True)), np.flatnonzero(which.ravel() == number)
