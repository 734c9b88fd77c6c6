"""Commands about the GPU: measure it, list what was measured, show where it collapses."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gac.cli.checks import check_file
from gac.cli.verb import Answer, Verb
from gac.errors import GacError, ProfileError
from gac.models.shapes import SHAPES

if TYPE_CHECKING:
    from gac.profiling.cliffs import Cliffs
    from gac.profiling.table import Profile, Sweep

_NOTHING_KEPT = "Nothing was written; run it again."


def _numbers(_ctx: click.Context, _option: click.Parameter, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as failure:
        raise click.BadParameter(f"{text!r} is not like 1,1024,4096.") from failure


def _axes(_ctx: click.Context, _option: click.Parameter, text: str | None) -> dict[str, int]:
    pairs = [part.partition("=") for part in text.split(",")] if text else []
    try:
        return {axis: int(size) for axis, _, size in pairs}
    except ValueError as failure:
        raise click.BadParameter(f"{text!r} is not like m=1024,k=4096.") from failure


def _range(_ctx: click.Context, _option: click.Parameter, text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    first, _, last = text.partition(":")
    try:
        return int(first), int(last)
    except ValueError as failure:
        raise click.BadParameter(f"{text!r} is not like 1016:1040.") from failure


@click.command(
    cls=Verb, resume="Every timing that was taken is in the file; the same command goes on where this one stopped."
)
@click.option(
    "--model",
    "models",
    multiple=True,
    default=tuple(SHAPES),
    show_default=True,
    help="Profile the shapes of this model: a known name, a directory, or a hub id (no weights are read). Repeatable.",
)
@click.option(
    "--rows", default="1,1024,4096", show_default=True, callback=_numbers, help="Numbers of tokens that run at once."
)
@click.option("--dtype", default="bf16", show_default=True, help="bf16 or fp16.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The file; by default this GPU's own place.")
@click.option("--seconds", type=click.FloatRange(min=0), help="Stop after about this long; the next run goes on.")
@click.option("--estimate", "only_estimate", is_flag=True, help="Say what there is to do, and stop.")
def profile(
    models: Sequence[str],
    rows: tuple[int, ...],
    dtype: str,
    output: Path | None,
    seconds: float | None,
    only_estimate: bool,
) -> Answer:
    """Measure this machine's GPU.

    Times dense and low-rank linear layers at a model's own shapes, at dims around and between the multiples
    of 8. A second run on the same file goes on where the first one stopped.
    """
    if output is not None:
        check_file(output, ProfileError)
    from gac.profiling.device import require_gpu
    from gac.profiling.sweep import estimate, profile_gpu, summary
    from gac.profiling.table import Profile

    require_gpu()
    shapes = [_shapes(model) for model in models]
    if only_estimate:
        ahead = estimate(shapes, rows, dtype, output)
        document = {"path": str(ahead.path), "shapes": ahead.shapes, "timings": ahead.remaining}
        return Answer(document | {"seconds": round(ahead.seconds, 1)}, lambda: [str(ahead)])
    path = profile_gpu(shapes, rows, dtype, output, seconds=seconds)
    return _profiled(path, Profile.load(path), summary)


def _profiled(path: Path, measured: "Profile", summary: Any) -> Answer:
    document = {
        "path": str(path),
        "gpu": measured.header.gpu,
        "shapes": len(measured.measurements),
        "failed": len(measured.failed),
        "converged_fraction": measured.converged_fraction,
        "spread": measured.spread,
        "drift": measured.drift,
        "digest": measured.digest,
    }
    return Answer(document, lambda: [summary(measured), f"saved as {path}"])


def _shapes(model: str) -> Any:
    """A known name as it is (so that a misspelt one is recognised), else the model's config."""
    from gac.models.loading import load_config

    return load_config(model) if "/" in model or Path(model).is_dir() else model


@click.command(cls=Verb, resume=_NOTHING_KEPT)
def profiles() -> Answer:
    """List the latency tables on this machine.

    Those shipped with GAC, and those that `gac profile` saved; a saved one hides a shipped one of the same name.
    """
    from gac.profiling.folders import saved_profiles, shipped_profiles
    from gac.reporting.tables import profiles_table

    entries = [_entry(path, "shipped") for path in shipped_profiles()]
    entries += [_entry(path, "saved") for path in saved_profiles()]
    return Answer({"profiles": entries}, lambda: [profiles_table(entries)])


def _entry(path: Path, where: str) -> dict[str, Any]:
    """One line of the list; a file that cannot be read is listed with what is wrong with it."""
    from gac.profiling.table import Profile

    entry: dict[str, Any] = {"name": path.stem, "where": where, "path": str(path)}
    try:
        read = Profile.load(path)
    except GacError as failure:
        return entry | {"problem": str(failure)}
    header = read.header
    rows = sorted({row.shape["m"] for row in read.measurements if "m" in row.shape})
    counts = {"shapes": len(read.measurements), "rows": rows}
    return entry | {"gpu": header.gpu, **counts, "torch": header.torch, "date": header.date, "digest": read.digest}


@click.command(cls=Verb, resume=_NOTHING_KEPT)
@click.argument("name", metavar="PROFILE")
@click.option("--operator", help="Only this operator: linear or low_rank.")
@click.option("--shape", callback=_axes, metavar="AXIS=SIZE,...", help="Only sweeps with these sizes: m=1024,k=4096.")
@click.option("--dims", callback=_range, metavar="FIRST:LAST", help="Show every measured dim from FIRST to LAST.")
def cliffs(name: str, operator: str | None, shape: dict[str, int], dims: tuple[int, int] | None) -> Answer:
    """Show where a GPU collapses.

    A dim is collapsed if some larger dim is faster, by more than the measurement's own noise.

    PROFILE is a path or a name that `gac profiles` lists.
    """
    from gac.profiling.cliffs import find_cliffs
    from gac.profiling.table import Profile
    from gac.reporting.tables import cliffs_table, points_table

    measured = Profile.load(name)
    sweeps = _matching(measured, operator, shape, dims)
    found = [(sweep, find_cliffs(sweep)) for sweep in sweeps]
    document = {
        "profile": measured.path.stem,
        "gpu": measured.header.gpu,
        "digest": measured.digest,
        "sweeps": [_sweep_document(sweep, cliff, dims) for sweep, cliff in found],
    }
    if dims is None:
        return Answer(document, lambda: [cliffs_table(measured.header.gpu, found)])
    return Answer(document, lambda: [points_table(sweep, cliff, *dims) for sweep, cliff in found])


def _matching(
    measured: "Profile", operator: str | None, shape: dict[str, int], dims: tuple[int, int] | None
) -> list["Sweep"]:
    every = measured.sweeps()
    found = [sweep for sweep in every if operator in (None, sweep.operator) and _has(sweep, shape, dims)]
    if not found:
        sizes = [f"{axis}={size}" for axis, size in shape.items()] + ([f"dims {dims[0]}:{dims[1]}"] if dims else [])
        raise ProfileError(
            f"no sweep of {measured.path.stem} is of {' '.join([operator or 'any operator', *sizes])}",
            f"one of its {len(every)} sweeps",
            "Run gac cliffs on it without filters to see them.",
        )
    return found


def _has(sweep: "Sweep", shape: dict[str, int], dims: tuple[int, int] | None) -> bool:
    inside = dims is None or any(dims[0] <= dim <= dims[1] for dim in sweep.dims)
    return inside and shape.items() <= dict(sweep.fixed).items()


def _sweep_document(sweep: "Sweep", found: "Cliffs", dims: tuple[int, int] | None) -> dict[str, Any]:
    first, last = dims or (int(sweep.dims[0]), int(sweep.dims[-1]))
    rescues = zip(found.collapsed.tolist(), found.rescue.tolist(), found.slowdown.tolist(), strict=True)
    columns = zip(sweep.dims.tolist(), sweep.ns.tolist(), sweep.iqr.tolist(), sweep.kernels, strict=True)
    document: dict[str, Any] = {
        "operator": sweep.operator,
        "dtype": sweep.dtype,
        "axis": sweep.axis,
        "fixed": dict(sweep.fixed),
        "points": len(sweep),
        "period": found.period,
        "class_slowdown": {str(step): ratio for step, ratio in found.class_slowdown.items()},
        "collapsed": [
            {"dim": dim, "rescue": rescue, "slowdown": slowdown}
            for dim, rescue, slowdown in rescues
            if first <= dim <= last
        ],
        "sweet_spots": [dim for dim in found.sweet_spots.tolist() if first <= dim <= last],
    }
    if dims is not None:
        document["measured"] = [
            {"dim": dim, "ns": ns, "iqr_ns": iqr, "kernels": list(kernels)}
            for dim, ns, iqr, kernels in columns
            if first <= dim <= last
        ]
    return document
