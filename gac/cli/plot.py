"""The commands that draw: one figure each, as PDF, PNG or SVG."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gac.cli.checks import check_file
from gac.cli.documents import names_of
from gac.cli.options import dims_option, shape_option
from gac.cli.verb import Answer, Verb
from gac.errors import GacError, ProfileError
from gac.io import read_document

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from gac.plan import Plan
    from gac.profiling.table import Profile, Sweep
    from gac.reporting.figures.prediction import Outcome

Drawn = Callable[[], "Axes | Figure"]


@click.group()
def plot() -> None:
    """Draw profiles, plans, frontiers and predictions.

    Every figure is written to the file that -o names, as .pdf, .png or .svg. All can be read in black and white.
    """


_output = click.option(
    "-o", "--output", type=click.Path(path_type=Path), required=True, help="The figure (.pdf, .png or .svg)."
)
_title = click.option("--title", help="A title instead of the figure's own.")
_plans = click.argument(
    "files", metavar="PLAN.json [PLAN.json ...]", nargs=-1, required=True, type=click.Path(path_type=Path)
)


def _command(name: str | None = None) -> Callable[[Callable[..., Answer]], click.Command]:
    """One figure."""
    return lambda callback: plot.command(name, cls=Verb, resume="Nothing was written; run it again.")(_output(callback))


def _drawn(kind: str, output: Path, draw: Drawn) -> Answer:
    """Make one figure, without a window, and write it."""
    from gac.reporting.page import check_figure

    check_figure(output)
    check_file(output, GacError)
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    from gac import plots

    try:
        plots.save(draw(), output)
    finally:
        pyplot.close("all")
    return Answer({"figure": str(output), "kind": kind}, lambda: [f"{kind} drawn in {output}"])


# --- a GPU ----------------------------------------------------------------------------------------------------------


@_command()
@click.argument("profile")
@click.option("--operator", required=True, metavar="NAME", help="linear, low_rank, sdpa, ...")
@click.option("--axis", metavar="AXIS", help="The axis along which dims vary: k, n, m, r, d, ...")
@shape_option
@dims_option
@_title
def latency(
    profile: str,
    operator: str,
    axis: str | None,
    shape: dict[str, int],
    dims: tuple[int, int] | None,
    title: str | None,
    output: Path,
) -> Answer:
    """Latency against the dim, with collapsed dims, staircase edges and the kernels that ran.

    Of the sweeps that fit, the one with the most dims is drawn.
    """

    def draw() -> "Axes":
        from gac import plots
        from gac.profiling.table import Profile

        ax = plots.latency(_sweep(Profile.load(profile), operator, axis, shape), dims=dims)
        if title is not None:
            ax.set_title(title, loc="left", parse_math=False)
        return ax

    return _drawn("latency", output, draw)


def _sweep(measured: "Profile", operator: str, axis: str | None, shape: dict[str, int]) -> "Sweep":
    of_operator = [one for one in measured.sweeps() if one.operator == operator]
    if not of_operator:
        known = ", ".join(sorted({one.operator for one in measured.sweeps()}))
        given = f"profile {measured.path.stem} has no sweep of operator {operator}"
        raise ProfileError(given, f"one of {known or 'none'}", "Name another one, or measure it with gac profile.")
    fitting = [one for one in of_operator if axis in (None, one.axis) and shape.items() <= dict(one.fixed).items()]
    if not fitting:
        given = f"no sweep of {operator} in {measured.path.stem} is of the axis and shape asked for"
        labels = sorted(of_operator, key=len)[-5:]
        raise ProfileError(given, f"one like {'; '.join(one.label for one in labels)}", "Ask for one of these.")
    return max(fitting, key=len)


@_command()
@click.argument("profile")
def atlas(profile: str, output: Path) -> Answer:
    """The cliffs of a GPU on one page: linear, low_rank, attention, FP8 and INT4."""

    def draw() -> "Figure":
        from gac import plots
        from gac.profiling.table import Profile

        return plots.atlas(Profile.load(profile))

    return _drawn("atlas", output, draw)


@_command()
@click.argument("profile")
@_title
def alignment(profile: str, title: str | None, output: Path) -> Answer:
    """What misaligned dims cost on a GPU, operator by operator."""

    def draw() -> "Axes":
        from gac import plots
        from gac.profiling.table import Profile

        return plots.alignment(Profile.load(profile), title=title)

    return _drawn("alignment", output, draw)


@_command("published")
def published(output: Path) -> Answer:
    """The dims that PaLU's score gives heads, as a published study lists them."""

    def draw() -> "Axes":
        from gac.lab.figures import published_heads

        return published_heads()

    return _drawn("published", output, draw)


# --- plans ----------------------------------------------------------------------------------------------------------


@_command("plan")
@click.argument("file", metavar="PLAN.json", type=click.Path(path_type=Path))
@_title
def plan_figure(file: Path, title: str | None, output: Path) -> Answer:
    """A plan as a heat map: layers by projections, with kept fraction, form and dim."""

    def draw() -> "Axes":
        from gac import plots
        from gac.plan import Plan

        return plots.plan(Plan.load(file), title=title)

    return _drawn("plan", output, draw)


@_command()
@_plans
@click.option(
    "--weight", "weights", multiple=True, metavar="NAME", help="Only this projection (down_proj). Repeatable."
)
@_title
def dims(files: tuple[Path, ...], weights: Sequence[str], title: str | None, output: Path) -> Answer:
    """The dims of plans for one model, layer by layer: PaLU's, ASVD's, SVD-LLM's beside GAC's.

    Hollow markers are dims that are no multiple of 8.
    """

    def draw() -> "Figure":
        from gac import plots

        return plots.figure_of_dims(_loaded(files), weights, title)

    return _drawn("dims", output, draw)


@_command()
@click.argument("file", metavar="PLAN.json", type=click.Path(path_type=Path))
def heads(file: Path, output: Path) -> Answer:
    """What each key-value head keeps under a plan."""

    def draw() -> "Axes":
        from gac import plots
        from gac.plan import Plan

        return plots.heads(Plan.load(file))

    return _drawn("heads", output, draw)


@_command("layer")
@_plans
@click.option("--profile", "name", required=True, metavar="NAME|FILE", help="The latency table.")
@click.option("--workload", metavar="WORKLOAD", help="The workload. Default: the first one of the plan.")
@click.option(
    "--layer", "number", type=click.IntRange(min=0), help="One decoder layer. Default: the sum over all layers."
)
@_title
def layer(
    files: tuple[Path, ...], name: str, workload: str | None, number: int | None, title: str | None, output: Path
) -> Answer:
    """Where the time of a layer goes: latency of every weight, dense and under each plan."""

    def draw() -> "Axes":
        from gac import plots
        from gac.profiling.table import Profile

        return plots.layer_time(_loaded(files), Profile.load(name), workload, layer=number, title=title)

    return _drawn("layer", output, draw)


@_command()
@click.argument("file", metavar="FRONTIER.json", type=click.Path(path_type=Path))
@click.option(
    "--plan",
    "plans",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="PLAN.json",
    help="A plan to mark in the figure. Repeatable.",
)
def frontier(file: Path, plans: tuple[Path, ...], output: Path) -> Answer:
    """Predicted perplexity against parameters and latency for every budget, with plans among them."""

    def draw() -> "Figure":
        from gac import plots
        from gac.allocation.frontier import Frontier

        return plots.figure_of_frontier(Frontier.load(file), _loaded(plans))

    return _drawn("frontier", output, draw)


def _loaded(files: Sequence[Path]) -> dict[str, "Plan"]:
    from gac.plan import Plan

    return dict(zip(names_of(files), map(Plan.load, files), strict=True))


# --- what came of them ----------------------------------------------------------------------------------------------


@_command()
@click.argument("files", metavar="REPORT.json [REPORT.json ...]", nargs=-1, required=True)
@_title
def prediction(files: tuple[str, ...], title: str | None, output: Path) -> Answer:
    """Predicted loss against measured loss, from the reports that gac eval --against wrote."""

    def draw() -> "Axes":
        from gac import plots

        return plots.prediction([outcome_of(Path(file)) for file in files], title=title)

    return _drawn("prediction", output, draw)


def outcome_of(path: Path) -> "Outcome":
    from gac.reporting.figures.prediction import Outcome

    expected = "a report of gac eval DIR --against MODEL -o REPORT.json"
    report = read_document(path, "report", expected, GacError)
    names = ("predicted_log_ratio", "log_ratio")
    values: list[Any] = [report.get(name) if isinstance(report, dict) else None for name in names]
    if not all(isinstance(value, (int, float)) for value in values):
        given = f"report {path} has no predicted and measured loss"
        raise GacError(given, expected, "Evaluate a compressed directory against the model it was made of.")
    return Outcome(path.stem, float(values[0]), float(values[1]))
