"""The commands that draw: one figure each, as PDF, PNG or SVG."""

from collections.abc import Callable, Sequence
from functools import wraps
from math import log
from pathlib import Path
from typing import Any

import click

import gac
from gac.cli.command import Answer, Command
from gac.cli.options import (
    FILE,
    Figure,
    dims_option,
    dtype_option,
    named,
    option,
    profile_option,
    several,
    shape_option,
)
from gac.core.errors import GacError
from gac.core.untrusted import read_document
from gac_extensions.lab.cliffs_command import matching_sweeps


@click.group()
def plot() -> None:
    """Draw profiles, plans, frontiers and predictions.

    Every figure is written to the file that -o names, as .pdf, .png or .svg. All can be read in black and white.
    """


_title = option("--title", "A title instead of the figure's own.")


def _files(metavar: str) -> Callable[..., Any]:
    return click.argument("files", metavar=f"{metavar} [{metavar} ...]", nargs=-1, required=True, type=FILE)


def _figure(draw: Callable[..., Any]) -> click.Command:
    """Make the command that draws a figure without a window, and writes it."""
    kind = draw.__name__

    @option("-o --output", "The figure (.pdf, .png or .svg).", Figure(), required=True)
    @wraps(draw)
    def run(output: Path, **arguments: Any) -> Answer:
        write_figure(lambda: draw(**arguments), output)
        return Answer({"figure": str(output), "kind": kind}, lambda: [f"{kind} drawn in {output}"])

    return plot.command(kind, cls=Command)(run)


def write_figure(draw: Callable[[], Any], output: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    try:
        gac.plots.save(draw(), output)
    finally:
        pyplot.close("all")


def _figure_of_file(kind: str, metavar: str, help: str, titled: bool = True) -> None:
    """Add the command that draws one file by the function of ``gac.plots`` of this name."""

    def draw(file: str, **title: Any) -> Any:
        return getattr(gac.plots, kind)(file, **title)

    draw.__name__, draw.__doc__ = kind, help
    _figure(click.argument("file", metavar=metavar)(_title(draw) if titled else draw))


for _row in (
    ("atlas", "PROFILE", "The cliffs of a GPU on one page: linear, low_rank, attention, FP8 and INT4.", False),
    ("alignment", "PROFILE", "The cost of misaligned dims on a GPU, operator by operator."),
    ("plan", "PLAN.json", "A plan as a heat map: layers by projections, with kept fraction, form and dim."),
    ("heads", "PLAN.json", "The rank or head_dim of each key-value head under a plan.", False),
    (
        "speeds",
        "BENCH.json",
        "Speeds in an engine over the dense model at every workload, from the document of gac bench --engine vllm.",
    ),
):
    _figure_of_file(*_row)


@_figure
@click.argument("profile")
@option("--operator", "An operator of the profile, such as linear or sdpa.", metavar="NAME", required=True)
@option("--axis", "The axis along which dims vary: k, n, m, r, d, ...", metavar="AXIS")
@dtype_option
@shape_option
@dims_option
@_title
def latency(profile: str, dims: tuple[int, int] | None, title: str | None, **chosen: Any) -> Any:
    """Latency against the dim, with collapsed dims, staircase edges and the kernels that ran.

    Of the sweeps that match, the one with the most dims is drawn; with --dims, with the most of them.
    """
    matching = matching_sweeps(gac.Profile.load(profile), dims=dims, **chosen)
    ax = gac.plots.latency(max(matching, key=lambda sweep: (sweep.inside(dims).sum(), len(sweep))), dims=dims)
    if title is not None:
        ax.set_title(title, loc="left", parse_math=False)
    return ax


@_figure
def published() -> Any:
    """The dims that PaLU's score gives heads, as a published study lists them."""
    return gac.published_heads()


@_figure
@_files("PLAN.json")
@several("--weight weights", "Only this projection (down_proj).", None, "NAME")
@_title
def dims(files: tuple[Path, ...], weights: Sequence[str], title: str | None) -> Any:
    """The dims of plans for one model, layer by layer, such as PaLU's, ASVD's, SVD-LLM's and GAC's.

    Hollow markers are dims that are no multiple of 8.
    """
    return gac.plots.figure_of_dims(named(files), weights, title)


@_figure
@_files("TOKENS.json")
@_title
def tokens(files: tuple[Path, ...], title: str | None) -> Any:
    """The tokens that every layer keeps under plans of gac tokens, and the loss of that."""
    return gac.plots.figure_of_tokens(named(files), title)


@_figure
@_files("PLAN.json")
@profile_option("The latency table.", required=True)
@option("--workload", "The workload. Default: the first one of the plan.", metavar="WORKLOAD")
@option("--layer number", "One decoder layer. Default: the sum over all layers.", click.IntRange(min=0))
@_title
def layer(files: tuple[Path, ...], profile: str, workload: str | None, number: int | None, title: str | None) -> Any:
    """The time of a layer by weight: latency of every weight, dense and under each plan."""
    return gac.plots.layer_time(named(files), profile, workload, layer=number, title=title)


@_figure
@click.argument("file", metavar="FRONTIER.json", type=FILE)
@several("--plan plans", "A plan to mark in the figure.", FILE, "PLAN.json")
@several("--beside others", "Another frontier of the same model, such as one without schemes.", FILE, "FRONTIER.json")
def frontier(file: Path, plans: tuple[Path, ...], others: tuple[Path, ...]) -> Any:
    """Predicted perplexity against sizes and latency for every budget, with plans and other frontiers."""
    return gac.plots.figure_of_frontier(file, named(plans), named(others))


@_figure
@click.argument("files", metavar="REPORT.json [REPORT.json ...]", nargs=-1, required=True)
@_title
def prediction(files: tuple[str, ...], title: str | None) -> Any:
    """Predicted loss against measured loss, from the reports of gac eval --against."""
    return gac.plots.prediction([outcome for file in files for outcome in outcomes_of(Path(file))], title=title)


def outcomes_of(path: Path) -> list[Any]:
    """The predicted and the measured loss of each model of a report, on each text that has both.

    Raises:
        GacError: no text has.
    """
    expected = "a report of gac eval DIR --against MODEL -o REPORT.json"
    report = read_document(path, "report", expected, GacError)
    models = report.get("models") if isinstance(report, dict) else None
    entries = [model for model in models if isinstance(model, dict)] if isinstance(models, list) else []
    outcomes = []
    for entry in entries:
        plan, also = entry.get("plan"), entry.get("also")
        name = path.stem if len(entries) == 1 else f"{path.stem} {entry.get('name')}"
        name += ", healed since" if isinstance(plan, dict) and plan.get("healed") else ""
        losses = filter(None, map(_losses, (entry, *(also if isinstance(also, list) else ()))))
        outcomes += [gac.plots.Outcome(f"{name}, {text}", *both) for text, *both in losses]
    if not outcomes:
        problem = f"report {path} has no predicted and measured loss"
        raise GacError(problem, expected, "Evaluate a compressed directory against the model it was made of.")
    return outcomes


def _losses(figures: Any) -> tuple[str, float, float] | None:
    """A text, with the predicted and the measured loss on it; None where one of them is unknown."""
    try:
        measured, perplexity = figures["log_ratio"], figures["perplexity"]
        predicted = log(figures["predicted_perplexity"] / perplexity["value"]) + measured
        return Path(perplexity["text"]).name, predicted, float(measured)
    except (KeyError, TypeError, ValueError, ArithmeticError):
        return None
