"""The commands that say where a GPU collapses, and which constraints a dim breaks."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import gac
from gac.cli.options import LARGEST, dims_option, dtype_option, plot_option, profile_option, shape_option
from gac.cli.verb import Answer, Verb, note
from gac.core.errors import ProfileError

if TYPE_CHECKING:
    from gac.lab.mechanisms import Explanation, Finding, Run
    from gac.profiling.table import Profile, Sweep
    from gac.reporting.gpu_tables import ExplainedSweep

Dims = tuple[int, int] | None


@click.command(cls=Verb)
@click.argument("name", metavar="PROFILE")
@click.option("--operator", metavar="NAME", help="Only this operator, such as linear or sdpa.")
@click.option("--axis", metavar="AXIS", help="Only sweeps along this axis: k, n, m, r, d, ...")
@dtype_option
@shape_option
@dims_option
@plot_option("Draw the chosen sweeps; without a choice, all cliffs of the GPU on one page")
def cliffs(
    name: str,
    operator: str | None,
    axis: str | None,
    dtype: str | None,
    shape: dict[str, int],
    dims: Dims,
    plot: Path | None,
) -> Answer:
    """Show where a GPU collapses, and why.

    A dim is collapsed if some larger dim is faster, by more than the measurement's own noise. The cause is read from
    the kernels that were recorded at both.

    PROFILE is a path or a name that `gac profiles` lists.
    """
    from gac.reporting.gpu_tables import alignment_table, cliffs_table, points_table

    measured = gac.Profile.load(name)
    gpu = measured.header.gpu
    found = [_with_causes(measured, sweep) for sweep in matching_sweeps(measured, operator, axis, dtype, shape, dims)]
    if plot is not None:
        from gac.reporting.figures.sweeps import atlas, figure_of_sweeps
        from gac.reporting.page import save

        pairs = [(one.sweep, one.cliffs) for one in found]
        chosen = operator or axis or dtype or shape or dims
        save(figure_of_sweeps(pairs, gpu, dims) if chosen else atlas(measured), plot)
        note(f"drawn in {plot}")
    sweeps = [_sweep_document(one, dims) for one in found]
    document = {"profile": measured.path.stem, "gpu": gpu, "digest": measured.digest, "sweeps": sweeps}
    if dims is not None:
        return Answer(document, lambda: [points_table(one, *dims) for one in found])
    return Answer(document, lambda: [cliffs_table(gpu, found), alignment_table(found)])


def _with_causes(measured: "Profile", sweep: "Sweep") -> "ExplainedSweep":
    from gac.lab.mechanisms import causes_of, edge_causes
    from gac.profiling.cliffs import find_cliffs
    from gac.reporting.gpu_tables import ExplainedSweep

    found = find_cliffs(sweep)
    header = measured.header
    return ExplainedSweep(sweep, found, causes_of(sweep, found, header), edge_causes(sweep, found, header))


def matching_sweeps(
    measured: "Profile",
    operator: str | None,
    axis: str | None,
    dtype: str | None,
    shape: dict[str, int],
    dims: Dims = None,
) -> list["Sweep"]:
    """The sweeps of a profile that are of this operator, axis, dtype and shape, and hold one of these dims.

    Raises:
        ProfileError: there is none.
    """
    every = measured.sweeps()
    if not every:
        raise ProfileError(
            f"profile {measured.path.stem} has no sweep",
            "at least 8 dims along one axis with all else fixed",
            "Measure them with gac profile.",
        )
    of_operator = [sweep for sweep in every if operator in (None, sweep.operator)]
    of_kind = [sweep for sweep in of_operator if axis in (None, sweep.axis) and dtype in (None, sweep.dtype)]
    found = [sweep for sweep in of_kind if _has(sweep, shape, dims)]
    if not found:
        words = [operator or "any operator", *([dtype] if dtype else []), *([f"along {axis}"] if axis else [])]
        words += [f"{name}={size}" for name, size in shape.items()] + ([f"dims {dims[0]}:{dims[1]}"] if dims else [])
        operators = f"operators {', '.join(sorted({sweep.operator for sweep in every}))}"
        near = "; ".join(sweep.label for sweep in sorted(of_operator, key=len)[-5:])
        raise ProfileError(
            f"no sweep of {measured.path.stem} is of {' '.join(words)}",
            f"one of its {len(every)} sweeps, such as {near}" if near else f"one of its {len(every)}, of {operators}",
            "Run gac cliffs on it without filters to see them, or measure it with gac profile"
            + (" --scheme." if dtype and dtype not in {sweep.dtype for sweep in every} else "."),
        )
    return found


def _has(sweep: "Sweep", shape: dict[str, int], dims: Dims) -> bool:
    return bool(sweep.inside(dims).any()) and shape.items() <= dict(sweep.fixed).items()


def _sweep_document(one: "ExplainedSweep", dims: Dims) -> dict[str, Any]:
    sweep, found = one.sweep, one.cliffs
    causes, edges = ([cause and vars(cause) for cause in row] for row in (one.causes, one.edges))
    document: dict[str, Any] = {
        "operator": sweep.operator,
        "dtype": sweep.dtype,
        "cache": sweep.cache,
        "axis": sweep.axis,
        "fixed": dict(sweep.fixed),
        "points": len(sweep),
        "noise": found.noise,
        "period": found.period,
        "alignment": [asdict(one) | {"keeps_up": one.keeps_up} for one in found.classes],
        "collapsed": _rows(dims, dim=found.collapsed, rescue=found.rescue, slowdown=found.slowdown, cause=causes),
        "staircase": _rows(dims, sweet_spot=found.sweet_spots, edge=found.edges, jump=found.jumps, cause=edges),
    }
    if dims is not None:
        launches = [[asdict(launch) for launch in at] for at in sweep.launches]
        document["measured"] = _rows(dims, dim=sweep.dims, ns=sweep.ns, iqr_ns=sweep.iqr, launches=launches)
    return document


def _rows(dims: Dims, **columns: Any) -> list[dict[str, Any]]:
    """One entry a dim, by the first of the columns; those inside ``dims``."""
    plain = [column.tolist() if hasattr(column, "tolist") else column for column in columns.values()]
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*plain, strict=True)]
    return [row for row in rows if dims is None or dims[0] <= next(iter(row.values())) <= dims[1]]


@click.command(cls=Verb)
@click.argument("operator")
@click.argument("dim", type=click.IntRange(min=1, max=LARGEST))
@click.option(
    "--axis", metavar="AXIS", help="The axis that the dim belongs to. Default: the one that compression changes."
)
@shape_option
@click.option("--dtype", default="bf16", show_default=True, help="bf16, fp16, fp8, or what tables call a scheme.")
@profile_option("Take costs and kernels from this latency table.")
def explain(
    operator: str, dim: int, axis: str | None, shape: dict[str, int], dtype: str, profile: str | None
) -> Answer:
    """Say which constraints a dim breaks, what each costs, and what ran there.

    OPERATOR is linear, low_rank, sdpa, ...; DIM is the size of one of its axes: a rank, a head_dim, a width. Without
    --profile the rules of every architecture are listed, with costs that others published.
    """
    from gac.lab.mechanisms.explain import explain as look_up
    from gac.lab.tables import explanation_tables

    measured = None if profile is None else gac.Profile.load(profile)
    told = look_up(operator, dim, measured, axis, shape or None, dtype)
    return Answer(_explained(told), lambda: explanation_tables(told))


def _explained(told: "Explanation") -> dict[str, Any]:
    document = asdict(told)
    del document["findings"]
    ran = [_ran(run) for run in told.ran]
    rules = [_rule(finding) for finding in told.findings]
    return document | {"fixed": dict(told.fixed), "ran": ran, "rules": rules}


def _ran(run: "Run") -> dict[str, Any]:
    waves = run.waves
    counts = (None, None, None, True) if waves is None else (waves.tiles, waves.count, waves.last, waves.exact)
    named = zip(("tiles", "waves", "last_wave", "exact"), counts, strict=True)
    return asdict(run.kernel) | {"grid": run.launch.grid} | dict(named)


def _rule(finding: "Finding") -> dict[str, Any]:
    rule = finding.rule
    stated = {name: getattr(rule, name) for name in ("level", "constraint", "since", "before")}
    sources = [asdict(source) for source in rule.sources]
    return asdict(finding) | {"rule": rule.name} | stated | {"sources": sources}
