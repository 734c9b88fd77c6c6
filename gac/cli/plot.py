"""The commands that draw: one figure each, as PDF, PNG or SVG."""

from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import gac
from gac.cli.cliffs import matching_sweeps
from gac.cli.options import (
    FILE,
    Figure,
    dims_option,
    dtype_option,
    named,
    named_plans,
    output_option,
    profile_option,
    shape_option,
)
from gac.cli.verb import Answer, Verb
from gac.core.errors import GacError
from gac.core.untrusted import read_document

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Page

    import gac.reporting.plots
    from gac.reporting.figures.prediction import Outcome


@click.group()
def plot() -> None:
    """Draw profiles, plans, frontiers and predictions.

    Every figure is written to the file that -o names, as .pdf, .png or .svg. All can be read in black and white.
    """


_title = click.option("--title", help="A title instead of the figure's own.")
_plan = click.argument("file", metavar="PLAN.json", type=FILE)
_plans = click.argument("files", metavar="PLAN.json [PLAN.json ...]", nargs=-1, required=True, type=FILE)


def _figure(draw: Callable[..., "Axes | Page"]) -> click.Command:
    """The command of a figure's name; it is drawn without a window, and written."""
    kind = draw.__name__

    @output_option(Figure(), "The figure (.pdf, .png or .svg).", required=True)
    @wraps(draw)
    def run(output: Path, **given: Any) -> Answer:
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot

        import gac.reporting.plots

        try:
            gac.plots.save(draw(**given), output)
        finally:
            pyplot.close("all")
        return Answer({"figure": str(output), "kind": kind}, lambda: [f"{kind} drawn in {output}"])

    return plot.command(kind, cls=Verb)(run)


# --- a GPU ----------------------------------------------------------------------------------------------------------


@_figure
@click.argument("profile")
@click.option("--operator", required=True, metavar="NAME", help="An operator of the profile, such as linear or sdpa.")
@click.option("--axis", metavar="AXIS", help="The axis along which dims vary: k, n, m, r, d, ...")
@dtype_option
@shape_option
@dims_option
@_title
def latency(profile: str, dims: tuple[int, int] | None, title: str | None, **chosen: Any) -> "Axes":
    """Latency against the dim, with collapsed dims, staircase edges and the kernels that ran.

    Of the sweeps that fit, the one with the most dims is drawn; with --dims, with the most of them.
    """
    fitting = matching_sweeps(gac.Profile.load(profile), dims=dims, **chosen)
    ax = gac.plots.latency(max(fitting, key=lambda sweep: (sweep.inside(dims).sum(), len(sweep))), dims=dims)
    if title is not None:
        ax.set_title(title, loc="left", parse_math=False)
    return ax


@_figure
@click.argument("profile")
def atlas(profile: str) -> "Page":
    """The cliffs of a GPU on one page: linear, low_rank, attention, FP8 and INT4."""
    return gac.plots.atlas(gac.Profile.load(profile))


@_figure
@click.argument("profile")
@_title
def alignment(profile: str, title: str | None) -> "Axes":
    """What misaligned dims cost on a GPU, operator by operator."""
    return gac.plots.alignment(gac.Profile.load(profile), title=title)


@_figure
def published() -> "Axes":
    """The dims that PaLU's score gives heads, as a published study lists them."""
    from gac.lab.figures import published_heads

    return published_heads()


# --- plans ----------------------------------------------------------------------------------------------------------


@_figure
@_plan
@_title
def plan(file: Path, title: str | None) -> "Axes":
    """A plan as a heat map: layers by projections, with kept fraction, form and dim."""
    return gac.plots.plan(gac.Plan.load(file), title=title)


@_figure
@_plans
@click.option(
    "--weight", "weights", multiple=True, metavar="NAME", help="Only this projection (down_proj). Repeatable."
)
@_title
def dims(files: tuple[Path, ...], weights: Sequence[str], title: str | None) -> "Page":
    """The dims of plans for one model, layer by layer: PaLU's, ASVD's, SVD-LLM's beside GAC's.

    Hollow markers are dims that are no multiple of 8.
    """
    return gac.plots.figure_of_dims(dict(named_plans(files)), weights, title)


@_figure
@click.argument("files", metavar="TOKENS.json [TOKENS.json ...]", nargs=-1, required=True, type=FILE)
@_title
def tokens(files: tuple[Path, ...], title: str | None) -> "Page":
    """How many tokens every layer keeps under plans of gac tokens, and what that loses."""
    return gac.plots.figure_of_tokens(named(files), title)


@_figure
@_plan
def heads(file: Path) -> "Axes":
    """What each key-value head keeps under a plan."""
    return gac.plots.heads(gac.Plan.load(file))


@_figure
@_plans
@profile_option("The latency table.", required=True)
@click.option("--workload", metavar="WORKLOAD", help="The workload. Default: the first one of the plan.")
@click.option(
    "--layer", "number", type=click.IntRange(min=0), help="One decoder layer. Default: the sum over all layers."
)
@_title
def layer(files: tuple[Path, ...], profile: str, workload: str | None, number: int | None, title: str | None) -> "Axes":
    """Where the time of a layer goes: latency of every weight, dense and under each plan."""
    return gac.plots.layer_time(
        dict(named_plans(files)), gac.Profile.load(profile), workload, layer=number, title=title
    )


@_figure
@click.argument("file", metavar="FRONTIER.json", type=FILE)
@click.option(
    "--plan",
    "plans",
    multiple=True,
    type=FILE,
    metavar="PLAN.json",
    help="A plan to mark in the figure. Repeatable.",
)
@click.option(
    "--beside",
    multiple=True,
    type=FILE,
    metavar="FRONTIER.json",
    help="Another frontier of the same model, such as one without schemes. Repeatable.",
)
def frontier(file: Path, plans: tuple[Path, ...], beside: tuple[Path, ...]) -> "Page":
    """Predicted perplexity against sizes and latency for every budget, with plans and other frontiers beside."""
    return gac.plots.figure_of_frontier(gac.Frontier.load(file), dict(named_plans(plans)), named(beside))


# --- what came of them ----------------------------------------------------------------------------------------------


@_figure
@click.argument("files", metavar="REPORT.json [REPORT.json ...]", nargs=-1, required=True)
@_title
def prediction(files: tuple[str, ...], title: str | None) -> "Axes":
    """Predicted loss against measured loss, from the reports that gac eval --against wrote."""
    return gac.plots.prediction([one for file in files for one in outcomes_of(Path(file))], title=title)


def outcomes_of(path: Path) -> list["Outcome"]:
    """What was predicted and measured of each model of a report that has both.

    Raises:
        GacError: the report cannot be read, or has no such model.
    """
    from gac.reporting.figures.prediction import Outcome

    expected = "a report of gac eval DIR --against MODEL -o REPORT.json"
    report = read_document(path, "report", expected, GacError)
    models = report.get("models") if isinstance(report, dict) else None
    entries = [one for one in models if isinstance(one, dict)] if isinstance(models, list) else []
    figures = ("predicted", "log_ratio")
    told = [one for one in entries if all(isinstance(one.get(name), (int, float)) for name in figures)]
    if not told:
        given = f"report {path} has no predicted and measured loss"
        raise GacError(given, expected, "Evaluate a compressed directory against the model it was made of.")
    names = [path.stem if len(told) == 1 else f"{path.stem} {one.get('name')}" for one in told]
    return [Outcome(name, *(float(one[of]) for of in figures)) for name, one in zip(names, told, strict=True)]
