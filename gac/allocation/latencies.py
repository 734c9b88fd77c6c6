"""What a form takes at each dim, looked up in a latency table."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gac.forms import Form, Operation, Weight, linear
from gac.profiling.cliffs import sound_dims
from gac.profiling.table import Profile
from gac.sites import Ints, Workload

UNKNOWN = -1
DTYPE = "bf16"
"""What latencies are looked up in."""

Known = tuple[Ints, NDArray[np.bool_]]
"""Latency in ns (-1 where unknown) and whether it was measured, both of shape ``(dims, workloads)``."""


@dataclass(frozen=True, eq=False)
class Timing:
    """Where latencies come from: a profile (or None: all unknown), and the workloads; all in bf16."""

    profile: Profile | None
    workloads: tuple[Workload, ...]

    def of_weight(self, form: Form, weight: Weight, dims: Ints, fused: bool) -> Known:
        """One weight in one form at each of the dims; where ``fused``, without the GEMM that it shares."""
        if not fused:
            sizes = _sizes(form, weight, dims)
            return self._along(lambda rows: form.operation(weight, int(dims[0]), rows), form.axis(weight), sizes)
        if form.after(weight, 1, 1) is None:
            shape = (len(dims), len(self.workloads))
            return np.zeros(shape, dtype=np.int64), np.ones(shape, dtype=np.bool_)
        return self._along(lambda rows: _after(form, weight, int(dims[0]), rows), "k", dims)

    def of_fused(self, in_features: int, widths: Ints) -> Known:
        """The GEMM that several weights share, at each of its output widths."""
        return self._along(lambda rows: linear(rows, in_features, int(widths[0])), "n", widths)

    def sound(self, form: Form, weight: Weight, dims: Ints, fused: bool) -> NDArray[np.bool_]:
        """Which dims the profile shows to be sound for all workloads (for a single row where there is none).

        A dim that is moved by the shared GEMM alone is judged by the weight's own.
        """
        assert self.profile is not None, "soundness needs a profile"
        after = fused and form.after(weight, 1, 1) is not None
        axis = "k" if after else form.axis(weight)
        assert axis is not None
        rows = [workload.rows for workload in self.workloads] or [1]
        operations = [_after(form, weight, 1, m) if after else form.operation(weight, 1, m) for m in rows]
        sizes = dims if after else _sizes(form, weight, dims)
        sound = np.ones(len(dims), dtype=np.bool_)
        for operation in operations:
            sound &= sound_dims(self.profile, operation.operator, [_fixed(operation, axis)], axis, sizes, DTYPE)
        return sound

    def _along(self, operation_at: Callable[[int], Operation], axis: str | None, sizes: Ints) -> Known:
        """What runs for a number of rows, with an axis of each of the sizes (None: as it is)."""
        shape = (len(sizes), len(self.workloads))
        latency, measured = np.full(shape, UNKNOWN, dtype=np.int64), np.zeros(shape, dtype=np.bool_)
        if self.profile is None or len(sizes) == 0:
            return latency, measured
        for column, workload in enumerate(self.workloads):
            operation = operation_at(workload.rows)
            if axis is not None:
                latency[:, column], measured[:, column] = self.profile.latency(
                    operation.operator, _fixed(operation, axis), axis, sizes, DTYPE
                )
            else:
                point = self.profile.point(operation, DTYPE)
                if point is not None:
                    latency[:, column], measured[:, column] = point, True
        return latency, measured


def recorded(latency: Ints) -> tuple[int | None, ...]:
    """One candidate's ns for each workload, as records have them: None where unknown."""
    return tuple(None if ns == UNKNOWN else ns for ns in latency.tolist())


def _sizes(form: Form, weight: Weight, dims: Ints) -> Ints:
    """How long each dim makes the axis that it moves."""
    return np.array([form.size(weight, dim) for dim in dims.tolist()], dtype=np.int64)


def _after(form: Form, weight: Weight, dim: int, rows: int) -> Operation:
    operation = form.after(weight, dim, rows)
    assert operation is not None
    return operation


def _fixed(operation: Operation, axis: str) -> dict[str, int]:
    return {name: size for name, size in operation.shape if name != axis}
