"""What a form takes where every weight is split over several GPUs: its part of each GEMM, and the collectives."""

from collections.abc import Callable, Iterator, Sequence
from math import lcm
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from gac.allocation.latencies import (
    BF16,
    DTYPE,
    LOADED,
    MEASURED,
    UNKNOWN,
    ByWidth,
    Known,
    Timing,
    look_up,
    sum_of_latencies,
)
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
"""What runs at each of some dims; the same operators at each, or nothing."""


def timing_of(profile: Profile | None, run: Deployment) -> Timing:
    """Where the latencies of a deployment come from."""
    kind = Timing if run.tensor_parallel == 1 else SplitTiming
    return kind(profile, run.parsed, run.triton, run.tensor_parallel)


def check_collectives(profile: Profile, run: Deployment, sites: Sequence[Site]) -> None:
    """Refuse a table without the collectives that so many GPUs run for the workloads.

    They have to be as wide as the sites' outputs, and gathers as what weights that share a GEMM gather at most.

    Raises:
        ProfileError: says how they are measured.
    """
    gpus = run.tensor_parallel
    written = max((weight.out_features for site in sites for weight in site.weights if weight.to_residual), default=1)
    fused = ([site.weights[at] for at in site.fused] for site in sites)
    gathered = max((sum(min(one.in_features, one.out_features) for one in weights) for weights in fused), default=1)
    for workload in run.parsed if gpus > 1 else ():
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

    What a GPU runs is the list of ``gac.forms.tensor_parallel``: each GEMM with the sizes that it has there, looked up
    by itself, and the collectives that follow. What several weights gather from a GEMM that they share is gathered at
    once.
    """

    def of_weight(self, form: Form, weight: Weight, dims: Ints, scheme: Scheme = BF16) -> Known:
        return self._summed(lambda rows: self._lists(form, weight, dims, rows), len(dims), scheme)

    def after_fused(self, form: Form, weight: Weight, dims: Ints, scheme: Scheme = BF16) -> Known:
        def after_both(rows: int) -> Lists:
            lists = self._lists(form, weight, dims, rows)
            return [operations[2 if _gather_follows(operations) else 1 :] for operations in lists]

        features, numbers = self._features(form, weight, dims)[0], self._to_gather(form, weight, dims)
        alone = self._together(weight, features, np.where(features, numbers, 0), scheme)
        after = self._summed(after_both, len(dims), scheme)
        return sum_of_latencies(alone[0], after[0]), np.maximum(alone[1], after[1])

    def joined(self, form: Form, weight: Weight, dims: Ints) -> Ints:
        """Beside its features the numbers that it gathers with the others, ``(dims, 2 * workloads)``."""
        features = super().joined(form, weight, dims)
        return np.hstack([features, np.where(features, self._to_gather(form, weight, dims), 0)])

    def none_joined(self, count: int) -> Ints:
        return np.tile(super().none_joined(count), 2)

    def of_shared(self, first: Weight, widths: Ints, scheme: Scheme = BF16) -> Known:
        features, numbers = np.hsplit(widths, 2)
        return self._together(first, features, numbers, scheme)

    def _together(self, first: Weight, features: Ints, numbers: Ints, scheme: Scheme) -> Known:
        """A GEMM of so many features on each GPU, and one gather of so many numbers after it."""
        gemm = self.of_fused(first, features, scheme)
        known = self.once("gathers", first, lambda: ByWidth(len(self.workloads)))
        gather = known.at(numbers, self._of_gathers)
        return sum_of_latencies(gemm[0], gather[0]), np.maximum(gemm[1], gather[1])

    def _of_gathers(self, numbers: Ints) -> Known:
        """Gathers of so many numbers of each token, ``(n, workloads)``; none for 0."""
        latency = np.full((len(numbers), len(self.workloads)), UNKNOWN, dtype=np.int64)
        how = np.full_like(latency, MEASURED)
        if self.profile is not None:
            for column, workload in enumerate(self.workloads):
                gather = all_gather(self.gpus, workload.rows, 1)
                latency[:, column], how[:, column] = look_up(self.profile, gather, _OUT, numbers, DTYPE)
        latency[numbers == 0], how[numbers == 0] = 0, MEASURED
        return latency, how

    def _to_gather(self, form: Form, weight: Weight, dims: Ints) -> Ints:
        """Numbers of a token that are gathered after the first GEMM, ``(dims, workloads)``."""
        lists = self._lists(form, weight, dims, 1)
        found = [operations[1].axes[_OUT] if _gather_follows(operations) else 0 for operations in lists]
        return self._for_all(np.array(found, dtype=np.int64))

    def sound(self, form: Form, weight: Weight, dims: Ints, fused: bool, scheme: Scheme = BF16) -> NDArray[np.bool_]:
        """Which dims the profile shows to be sound on each GPU: those whose part of every GEMM is.

        The part that a weight with a second GEMM has in a shared one only has to be aligned.
        """
        assert self.profile is not None, "soundness needs a profile"
        sound = np.ones(len(dims), dtype=np.bool_)
        for rows in [workload.rows for workload in self.workloads] or [1]:
            lists = [split_gemms(form, weight, dim, rows, self.gpus) for dim in dims.tolist()]
            for at, axis in enumerate(moved_axes(form, weight)):
                here = np.array([len(gemms) > at for gemms in lists])
                if axis is None or not here.any():
                    continue
                parts = [gemms[at] for gemms in lists if len(gemms) > at]
                alone = not (fused and at == 0 and form.latency.gemm_after_fused(weight, 1, 1) is not None)
                sound[here] &= self._sound(parts, axis, scheme, alone)
        return sound

    def _sound(self, gemms: Sequence[Operation], axis: str, scheme: Scheme, alone: bool) -> NDArray[np.bool_]:
        """Which of these sizes of an axis are aligned, and not collapsed where the GEMM runs alone."""
        assert self.profile is not None
        operator, names, sizes = _columns([self.run_as(one, scheme) for one in gemms])
        dtype = scheme.dtype if self.profile.measured_in(operator, scheme.dtype) else DTYPE
        loaded = LOADED if self.triton and scheme.storage is None else 1
        period = lcm(loaded, *(operator_period(self.profile, operator, one) for one in (dtype, DTYPE)))
        found: NDArray[np.bool_] = sizes[:, names.index(axis)] % period == 0
        for fixed, ours in _groups(names, sizes, axis) if alone else ():
            found[ours] &= sound_dims(self.profile, operator, [fixed], axis, sizes[ours, names.index(axis)], dtype)
        return found

    def _lists(self, form: Form, weight: Weight, dims: Ints, rows: int) -> Lists:
        return [split_operations(form, weight, dim, rows, self.gpus) for dim in dims.tolist()]

    def _summed(self, lists_for: Callable[[int], Lists], count: int, scheme: Scheme) -> Known:
        """The latencies of what runs, for each workload; nothing runs where a list is empty."""
        latency = np.full((count, len(self.workloads)), UNKNOWN, dtype=np.int64)
        how = np.full(latency.shape, MEASURED, dtype=np.int64)
        if self.profile is None or not count:
            return latency, how
        latency[:] = 0
        for column, workload in enumerate(self.workloads):
            lists = lists_for(workload.rows)
            for at in range(max(map(len, lists))):
                here = np.flatnonzero([len(operations) > at for operations in lists])
                ns, kind = self._each([lists[row][at] for row in here.tolist()], scheme)
                latency[here, column] = sum_of_latencies(latency[here, column], ns)
                how[here, column] = np.maximum(how[here, column], kind)
        return latency, how

    def _each(self, operations: Sequence[Operation], scheme: Scheme) -> Known:
        """Each of some shapes of one operator, shape ``(operations,)``."""
        assert self.profile is not None
        together = operations[0].operator in COLLECTIVES
        operator, names, sizes = _columns(operations if together else [self.run_as(one, scheme) for one in operations])
        moved = [name for at, name in enumerate(names) if len(np.unique(sizes[:, at])) > 1]
        axis = moved[-1] if moved else _OUT
        ns, how = np.empty(len(sizes), dtype=np.int64), np.empty(len(sizes), dtype=np.int64)
        for fixed, ours in _groups(names, sizes, axis):
            one = Operation(operator, tuple(fixed.items()))
            along = sizes[ours, names.index(axis)]
            ns[ours], how[ours] = look_up(self.profile, one, axis, along, DTYPE if together else scheme.dtype)
        return ns, how


def _gather_follows(operations: Sequence[Operation]) -> bool:
    """Whether a gather follows the first GEMM."""
    return len(operations) > 1 and operations[1].operator == "all_gather"


def _columns(operations: Sequence[Operation]) -> tuple[str, list[str], Ints]:
    """The operator, the names of its axes, and the size of each, shape ``(operations, axes)``."""
    sizes = np.array([[size for _, size in one.shape] for one in operations], dtype=np.int64)
    return operations[0].operator, [name for name, _ in operations[0].shape], sizes


def _groups(names: Sequence[str], sizes: Ints, axis: str) -> Iterator[tuple[dict[str, int], Ints]]:
    """Shapes that differ along one axis alone: the sizes of the others, and which they are."""
    at = names.index(axis)
    others, which = np.unique(np.delete(sizes, at, axis=1), axis=0, return_inverse=True)
    rest = [name for name in names if name != axis]
    for number, fixed in enumerate(others.tolist()):
        yield dict(zip(rest, fixed, strict=True)), np.flatnonzero(which.ravel() == number)
