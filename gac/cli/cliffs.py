"""The command that shows where a GPU collapses: a table, a document, a figure."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gac.cli.checks import check_file
from gac.cli.options import dims_option, shape_option
from gac.cli.verb import Answer, Verb, note
from gac.errors import GacError, ProfileError

if TYPE_CHECKING:
    from gac.profiling.table import Profile, Sweep
    from gac.reporting.gpu_tables import Told

Dims = tuple[int, int] | None


@click.command(cls=Verb, resume="Nothing was written; run it again.")
@click.argument("name", metavar="PROFILE")
@click.option("--operator", metavar="NAME", help="Only this operator: linear, low_rank, sdpa, ...")
@click.option("--axis", metavar="AXIS", help="Only sweeps along this axis: k, n, m, r, d, ...")
@shape_option
@dims_option
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Draw the chosen sweeps, or without a choice the GPU's cliffs on one page (.png, .pdf or .svg).",
)
def cliffs(
    name: str, operator: str | None, axis: str | None, shape: dict[str, int], dims: Dims, plot: Path | None
) -> Answer:
    """Show where a GPU collapses, and why.

    A dim is collapsed if some larger dim is faster, by more than the measurement's own noise. The cause is read from
    the kernels that were recorded at both.

    PROFILE is a path or a name that `gac profiles` lists.
    """
    if plot is not None:
        _check_plot(plot)
    from gac.profiling.table import Profile

    measured = Profile.load(name)
    found = [_told(measured, sweep) for sweep in _matching(measured, operator, axis, shape, dims)]
    if plot is not None:
        _draw(measured, found, dims, plot, chosen=bool(operator or axis or shape or dims))
        note(f"drawn in {plot}")
    document = {
        "profile": measured.path.stem,
        "gpu": measured.header.gpu,
        "digest": measured.digest,
        "sweeps": [_document(told, dims) for told in found],
    }
    return Answer(document, lambda: _tables(measured.header.gpu, found, dims))


def _check_plot(plot: Path) -> None:
    from gac.reporting.page import check_figure

    check_figure(plot)
    check_file(plot, GacError)


def _told(measured: "Profile", sweep: "Sweep") -> "Told":
    from gac.lab.mechanisms import causes_of, edge_causes
    from gac.profiling.cliffs import find_cliffs
    from gac.reporting.gpu_tables import Told

    found = find_cliffs(sweep)
    header = measured.header
    return Told(sweep, found, causes_of(sweep, found, header), edge_causes(sweep, found, header))


def _matching(
    measured: "Profile", operator: str | None, axis: str | None, shape: dict[str, int], dims: Dims
) -> list["Sweep"]:
    every = measured.sweeps()
    found = [
        sweep
        for sweep in every
        if operator in (None, sweep.operator) and axis in (None, sweep.axis) and _has(sweep, shape, dims)
    ]
    if not every:
        raise ProfileError(
            f"profile {measured.path.stem} has no sweep",
            "at least 8 dims along one axis with all else fixed",
            "Measure them with gac profile.",
        )
    if not found:
        words = [operator or "any operator"] + ([f"along {axis}"] if axis else [])
        words += [f"{name}={size}" for name, size in shape.items()] + ([f"dims {dims[0]}:{dims[1]}"] if dims else [])
        raise ProfileError(
            f"no sweep of {measured.path.stem} is of {' '.join(words)}",
            f"one of its {len(every)} sweeps",
            "Run gac cliffs on it without filters to see them.",
        )
    return found


def _has(sweep: "Sweep", shape: dict[str, int], dims: Dims) -> bool:
    inside = dims is None or any(dims[0] <= dim <= dims[1] for dim in sweep.dims)
    return inside and shape.items() <= dict(sweep.fixed).items()


def _draw(measured: "Profile", found: Sequence["Told"], dims: Dims, plot: Path, *, chosen: bool) -> None:
    from gac.reporting.page import save_figure
    from gac.reporting.plots import atlas, figure_of_sweeps

    pairs = [(told.sweep, told.cliffs) for told in found]
    save_figure(figure_of_sweeps(pairs, measured.header.gpu, dims) if chosen else atlas(measured), plot)


def _tables(gpu: str, found: Sequence["Told"], dims: Dims) -> list[Any]:
    from gac.reporting.gpu_tables import alignment_table, cliffs_table, points_table

    if dims is not None:
        return [points_table(told, *dims) for told in found]
    return [cliffs_table(gpu, found), alignment_table(found)]


def _document(told: "Told", dims: Dims) -> dict[str, Any]:
    sweep, found = told.sweep, told.cliffs
    first, last = dims or (int(sweep.dims[0]), int(sweep.dims[-1]))
    rescues = zip(found.collapsed.tolist(), found.rescue.tolist(), found.slowdown.tolist(), told.causes, strict=True)
    steps = zip(found.sweet_spots.tolist(), found.edges.tolist(), found.jumps.tolist(), told.edges, strict=True)
    document: dict[str, Any] = {
        "operator": sweep.operator,
        "dtype": sweep.dtype,
        "cache": sweep.cache,
        "axis": sweep.axis,
        "fixed": dict(sweep.fixed),
        "points": len(sweep),
        "noise": found.noise,
        "period": found.period,
        "alignment": [asdict(evidence) | {"keeps_up": evidence.keeps_up} for evidence in found.evidence],
        "collapsed": [
            {"dim": dim, "rescue": rescue, "slowdown": slowdown, "cause": None if cause is None else vars(cause)}
            for dim, rescue, slowdown, cause in rescues
            if first <= dim <= last
        ],
        "staircase": [
            {"sweet_spot": dim, "edge": edge, "jump": jump, "cause": None if cause is None else vars(cause)}
            for dim, edge, jump, cause in steps
            if first <= dim <= last
        ],
    }
    return document if dims is None else document | {"measured": _points(sweep, first, last)}


def _points(sweep: "Sweep", first: int, last: int) -> list[dict[str, Any]]:
    columns = zip(sweep.dims.tolist(), sweep.ns.tolist(), sweep.iqr.tolist(), sweep.launches, strict=True)
    return [
        {"dim": dim, "ns": ns, "iqr_ns": iqr, "launches": [asdict(launch) for launch in launches]}
        for dim, ns, iqr, launches in columns
        if first <= dim <= last
    ]
