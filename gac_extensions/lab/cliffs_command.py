"""The command that shows where a GPU is slow."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import gac
from gac.cli.command import Answer, Command, note
from gac.cli.options import Figure, dims_option, dtype_option, option, shape_option
from gac.core.display import fields
from gac.core.errors import ProfileError

if TYPE_CHECKING:
    from gac.profiling.table import Profile, Sweep
    from gac_extensions.lab.sweep_tables import ExplainedSweep

Dims = tuple[int, int] | None


@click.command(cls=Command)
@click.argument("name", metavar="PROFILE")
@option("--operator", "Only this operator, such as linear or sdpa.", metavar="NAME")
@option("--axis", "Only sweeps along this axis: k, n, m, r, d, ...", metavar="AXIS")
@dtype_option
@shape_option
@dims_option
@option(
    "--plot",
    "Draw the chosen sweeps; without a choice, all cliffs of the GPU on one page (.png, .pdf or .svg).",
    Figure(),
    "FILE",
)
def cliffs(name: str, dims: Dims, plot: Path | None, **chosen: Any) -> Answer:
    """Show where a GPU collapses, and why.

    A dim is collapsed if some larger dim is faster, by more than the measurement's own noise. The cause is read from
    the kernels that were recorded at both.

    PROFILE is a path or a name that `gac profiles` lists.
    """
    from gac_extensions.lab.sweep_tables import alignment_table, cliffs_table, points_table

    profile = gac.Profile.load(name)
    gpu = profile.header.gpu
    rows = [_with_causes(profile, sweep) for sweep in matching_sweeps(profile, dims=dims, **chosen)]
    if plot is not None:
        from gac.reporting.page import save
        from gac_extensions.lab.sweep_figures import atlas, figure_of_sweeps

        pairs = [(row.sweep, row.cliffs) for row in rows]
        save(figure_of_sweeps(pairs, gpu, dims) if dims or any(chosen.values()) else atlas(profile), plot)
        note(f"drawn in {plot}")
    sweeps = [_sweep_document(row, dims) for row in rows]
    document = {"profile": profile.path.stem, "gpu": gpu, "digest": profile.digest, "sweeps": sweeps}
    if dims is not None:
        return Answer(document, lambda: [points_table(row, *dims) for row in rows])
    return Answer(document, lambda: [cliffs_table(gpu, rows), alignment_table(rows)])


def _with_causes(profile: "Profile", sweep: "Sweep") -> "ExplainedSweep":
    from gac_extensions.lab.cliffs import find_cliffs
    from gac_extensions.lab.mechanisms import causes_of, edge_causes
    from gac_extensions.lab.sweep_tables import ExplainedSweep

    edges, header = find_cliffs(sweep), profile.header
    return ExplainedSweep(sweep, edges, causes_of(sweep, edges, header), edge_causes(sweep, edges, header))


def matching_sweeps(
    profile: "Profile",
    operator: str | None,
    axis: str | None,
    dtype: str | None,
    shape: Mapping[str, int],
    dims: Dims = None,
) -> list["Sweep"]:
    """The sweeps of a profile with this operator, axis, dtype and shape, and one of these dims; or a ProfileError."""
    every = profile.sweeps()
    if not every:
        raise ProfileError(
            f"profile {profile.path.stem} has no sweep",
            "at least 8 dims along one axis with all else fixed",
            "Measure them with gac profile.",
        )
    of_operator = [sweep for sweep in every if operator in (None, sweep.operator)]
    matching = [
        sweep
        for sweep in of_operator
        if axis in (None, sweep.axis)
        and dtype in (None, sweep.dtype)
        and sweep.inside(dims).any()
        and shape.items() <= dict(sweep.fixed).items()
    ]
    if not matching:
        words = [operator or "any operator", *([dtype] if dtype else []), *([f"along {axis}"] if axis else [])]
        words += [f"{name}={size}" for name, size in shape.items()] + ([f"dims {dims[0]}:{dims[1]}"] if dims else [])
        operators = f"operators {', '.join(sorted({sweep.operator for sweep in every}))}"
        near = "; ".join(sweep.label for sweep in sorted(of_operator, key=len)[-5:])
        raise ProfileError(
            f"no sweep of {profile.path.stem} is of {' '.join(words)}",
            f"one of its {len(every)} sweeps, such as {near}" if near else f"one of its {len(every)}, of {operators}",
            "Run gac cliffs on it without filters to see them, or measure it with gac profile"
            + (" --scheme." if dtype and dtype not in {sweep.dtype for sweep in every} else "."),
        )
    return matching


def _sweep_document(row: "ExplainedSweep", dims: Dims) -> dict[str, Any]:
    sweep, cliffs = row.sweep, row.cliffs
    causes, edges = ([cause and vars(cause) for cause in column] for column in (row.causes, row.edges))
    document: dict[str, Any] = {
        **fields(sweep, "operator", "dtype", "cache", "axis"),
        "fixed": dict(sweep.fixed),
        "points": len(sweep),
        **fields(cliffs, "noise", "period"),
        "alignment": [asdict(kind) | {"keeps_up": kind.keeps_up} for kind in cliffs.classes],
        "collapsed": _rows(dims, dim=cliffs.collapsed, rescue=cliffs.rescue, slowdown=cliffs.slowdown, cause=causes),
        "staircase": _rows(dims, sweet_spot=cliffs.sweet_spots, edge=cliffs.edges, jump=cliffs.jumps, cause=edges),
    }
    if dims is not None:
        launches = [[asdict(launch) for launch in kernels] for kernels in sweep.launches]
        document["measured"] = _rows(dims, dim=sweep.dims, ns=sweep.ns, iqr_ns=sweep.iqr, launches=launches)
    return document


def _rows(dims: Dims, **columns: Any) -> list[dict[str, Any]]:
    """One entry a dim, which is the first column; only those inside ``dims``."""
    plain = [column.tolist() if hasattr(column, "tolist") else column for column in columns.values()]
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*plain, strict=True)]
    return [row for row in rows if dims is None or dims[0] <= next(iter(row.values())) <= dims[1]]
