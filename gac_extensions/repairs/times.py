"""Latency of the padded GEMMs, before and after: from a latency table, and on this machine's GPU."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

import numpy as np

from gac.allocation.latencies import DTYPE, UNKNOWN
from gac.core.errors import ProfileError
from gac.core.workloads import Workload
from gac.profiling.records import DeviceLostError, Point
from gac.profiling.table import Profile
from gac_extensions.repairs.dims import Dims, Run, SharedDim

How = Literal["predicted", "measured"]

Latency = Callable[[Run, Dims, int], int | None]
"""ns of a run at these dims for a number of rows; None if unknown."""


@dataclass(frozen=True)
class Times:
    """Latency of the GEMMs of every shared dim, summed over the model, for one workload, in bf16."""

    how: How  # ``predicted`` from a latency table, or ``measured`` here, shape by shape
    gpu: str
    workload: str
    gemms: int
    before_ns: int | None  # None if a shape is unknown
    after_ns: int | None
    before_unknown: int  # how many of the GEMMs are
    after_unknown: int


def total_times(
    how: How, gpu: str, runs: Sequence[Run], dims: tuple[Dims, Dims], workload: Workload, latency: Latency
) -> Times:
    before, after = ([latency(run, sizes, workload.rows) for run in runs] for sizes in dims)
    sums = [None if None in ns else sum(filter(None, ns)) for ns in (before, after)]
    return Times(how, gpu, str(workload), len(runs), sums[0], sums[1], before.count(None), after.count(None))


def in_table(profile: Profile) -> Latency:

    def latency(run: Run, dims: Dims, rows: int) -> int | None:
        size = np.array([run.size(dims)], dtype=np.int64)
        ns, _ = profile.latency(run.operator, {"m": rows, **run.fixed}, run.axis, size, DTYPE)
        return None if ns[0] == UNKNOWN else int(ns[0])

    return latency


def on_gpu(runs: Sequence[Run], dims: tuple[Dims, Dims], workloads: Sequence[Workload]) -> tuple[str, Latency]:
    """Time every shape once on the current CUDA device; returns its name and the latencies.

    A ProfileError says if there is no CUDA device, or if it has failed.
    """
    from gac.profiling.timing.device import fingerprint
    from gac.profiling.timing.measure import GpuMeasurer

    header = fingerprint()
    measurer = GpuMeasurer(header)
    operations = (run.operation(sizes, workload.rows) for workload in workloads for sizes in dims for run in runs)
    try:
        rows = {point: measurer.measure(point) for point in dict.fromkeys(Point(run, DTYPE) for run in operations)}
    except DeviceLostError as lost:
        raise ProfileError(f"the GPU failed: {lost}", "a GPU that runs every shape", "Run it again.") from lost

    def latency(run: Run, dims: Dims, m: int) -> int | None:
        ns = rows[Point(run.operation(dims, m), DTYPE)].median_ns
        return None if ns is None else ceil(ns)

    return header.gpu, latency


def measured_dims(profile: Profile, shared: SharedDim, workloads: Sequence[Workload]) -> dict[int, int]:
    """ns, summed over the workloads, at every dim from this one on that a table has measured for all its GEMMs.

    A ProfileError says if there is none.
    """
    runs = [run for run in shared.runs if run.factors.keys() == {shared.name}]
    tables = [
        (run, workload.rows, _sweep(profile, run, shared, workload.rows)) for run in runs for workload in workloads
    ]
    dims = set.intersection(*(set(table) for *_, table in tables))
    if not dims:
        run, rows, _ = min(tables, key=lambda entry: len(entry[2]))
        sizes = " ".join(f"{axis}={size}" for axis, size in {"m": rows, **run.fixed}.items())
        raise ProfileError(
            f"profile {profile.path.stem} has measured no dim from {shared.dim} on for {shared.name} "
            f"({run.operator} {sizes}, {run.axis})",
            "dims measured at this shape, for every workload",
            "Measure them with gac profile --model DENSE_MODEL, or use another strategy.",
        )
    return {dim: sum(table[dim] for *_, table in tables) for dim in sorted(dims)}


def _sweep(profile: Profile, run: Run, shared: SharedDim, rows: int) -> dict[int, int]:
    sweep = profile.rows_of(run.operator, {"m": rows, **run.fixed}, run.axis, DTYPE)
    factor = run.factors[shared.name]
    sizes = ((divmod(size - run.rest, factor), ns) for size, ns in zip(sweep.dims.tolist(), sweep.ns, strict=True))
    return {dim: ceil(ns) for (dim, odd), ns in sizes if not odd and dim >= shared.dim}
