"""Latency of the repaired GEMMs, before and after: from a latency table, and on the GPU at hand."""

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
from gac.repairs.shared_dims import Block, Dims, Run, SharedDim

How = Literal["predicted", "measured"]

Look = Callable[[Run, Dims, int], int | None]
"""ns of a run at these dims for a number of rows; None where unknown."""


@dataclass(frozen=True)
class Times:
    """The GEMMs of every shared dim, summed over the model, for one workload, in bf16.

    Attributes:
        how: ``predicted`` from a latency table, or ``measured`` here, shape by shape.
        before_ns, after_ns: None where a shape is unknown.
        before_unknown, after_unknown: how many of the ``gemms`` are.
    """

    how: How
    gpu: str
    workload: str
    gemms: int
    before_ns: int | None
    after_ns: int | None
    before_unknown: int
    after_unknown: int


def summed(
    how: How, gpu: str, blocks: Sequence[Block], dims: tuple[Dims, Dims], workload: Workload, look: Look
) -> Times:
    """Sum what ``look`` finds, at the dims before and after."""
    runs = [run for block in blocks for run in block.runs]
    before, after = ([look(run, side, workload.rows) for run in runs] for side in dims)
    unknown_before, unknown_after = before.count(None), after.count(None)
    return Times(how, gpu, str(workload), len(runs), _total(before), _total(after), unknown_before, unknown_after)


def _total(known: Sequence[int | None]) -> int | None:
    found = [ns for ns in known if ns is not None]
    return sum(found) if len(found) == len(known) else None


def in_table(profile: Profile) -> Look:
    """Look a run up in a latency table, as an allocation does: no guess across a cliff."""

    def look(run: Run, dims: Dims, rows: int) -> int | None:
        size = np.array([run.size(dims)], dtype=np.int64)
        ns, _ = profile.latency(run.operator, {"m": rows, **dict(run.fixed)}, run.axis, size, DTYPE)
        return None if ns[0] == UNKNOWN else int(ns[0])

    return look


def on_gpu(blocks: Sequence[Block], dims: tuple[Dims, Dims], workloads: Sequence[Workload]) -> tuple[str, Look]:
    """Time every shape once on the current CUDA device; its name, and what was found.

    Raises:
        ProfileError: there is no CUDA device, or it has failed.
    """
    from gac.profiling.timing.device import fingerprint
    from gac.profiling.timing.measure import GpuMeasurer

    header = fingerprint()
    measurer = GpuMeasurer(header)
    runs = [run for block in blocks for run in block.runs]
    points = dict.fromkeys(
        Point(run.operation(side, workload.rows), DTYPE) for workload in workloads for side in dims for run in runs
    )
    try:
        rows = {point: measurer.measure(point) for point in points}
    except DeviceLostError as lost:
        raise ProfileError(f"the GPU failed: {lost}", "a GPU that runs every shape", "Run it again.") from lost

    def look(run: Run, dims: Dims, m: int) -> int | None:
        ns = rows[Point(run.operation(dims, m), DTYPE)].median_ns
        return None if ns is None else ceil(ns)

    return header.gpu, look


def measured_dims(profile: Profile, block: Block, shared: SharedDim, workloads: Sequence[Workload]) -> dict[int, int]:
    """ns, summed over the workloads, at every dim from this one on that a table has measured for all its GEMMs.

    Raises:
        ProfileError: there is no such dim.
    """
    runs = [run for run in block.runs if run.only(shared.name)]
    asked = [(run, workload.rows) for run in runs for workload in workloads]
    found = [_along(profile, run, shared, rows) for run, rows in asked]
    dims = set.intersection(*map(set, found))
    if not dims:
        run, rows = min(zip(asked, found, strict=True), key=lambda pair: len(pair[1]))[0]
        sizes = " ".join(f"{axis}={size}" for axis, size in (("m", rows), *run.fixed))
        raise ProfileError(
            f"profile {profile.path.stem} has measured no dim from {shared.dim} on for {shared.name} "
            f"({run.operator} {sizes}, {run.axis})",
            "dims measured at this shape, for every workload",
            "Measure them with gac profile --model DENSE_MODEL, or use another strategy.",
        )
    return {dim: sum(one[dim] for one in found) for dim in sorted(dims)}


def _along(profile: Profile, run: Run, shared: SharedDim, rows: int) -> dict[int, int]:
    sweep = profile.rows_of(run.operator, {"m": rows, **dict(run.fixed)}, run.axis, DTYPE)
    (_, times), *_ = run.moved
    found = {}
    for size, ns in zip(sweep.dims.tolist(), sweep.ns.tolist(), strict=True):
        dim, odd = divmod(size - run.rest, times)
        if not odd and dim >= shared.dim:
            found[dim] = ceil(ns)
    return found
