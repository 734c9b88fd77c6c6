"""Figures, with matplotlib: each function draws on the ``ax`` it is given, or on new axes, and returns them.

They can be read in black and white: what colour tells is told by markers, hatches or words as well.

    from gac import Frontier, Plan, Profile, plots

    ax = plots.plan(Plan.load("plan.json"))
    plots.save(ax, "plan.pdf")

``atlas``, ``figure_of_dims`` and ``figure_of_frontier`` make a page of several panels, and return the figure.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from gac.profiling.cliffs import Cliffs, find_cliffs
from gac.profiling.table import Sweep
from gac.reporting.figures.alignment import alignment
from gac.reporting.figures.dims import dims, figure_of_dims, heads
from gac.reporting.figures.heatmap import plan
from gac.reporting.figures.layer_time import layer_time
from gac.reporting.figures.prediction import Outcome, prediction
from gac.reporting.frontier import figure_of_frontier
from gac.reporting.frontier import plot_frontier as frontier
from gac.reporting.page import panel, require_matplotlib, save_figure
from gac.reporting.panel import plot_sweep
from gac.reporting.plots import atlas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "Outcome",
    "alignment",
    "atlas",
    "dims",
    "figure_of_dims",
    "figure_of_frontier",
    "frontier",
    "heads",
    "latency",
    "layer_time",
    "plan",
    "prediction",
    "save",
]


def latency(
    sweep: Sweep, cliffs: Cliffs | None = None, *, dims: tuple[int, int] | None = None, ax: "Axes | None" = None
) -> "Axes":
    """Latency against the dim: collapsed dims, the largest steps of the staircase, and the kernels that ran.

    Args:
        cliffs: of the sweep, where they were found already.
        dims: the first and the last dim to show; by default all.

    Raises:
        GacError: matplotlib is missing.
    """
    with panel(ax, (5.6, 3.4)) as ax:
        return plot_sweep(ax, sweep, find_cliffs(sweep) if cliffs is None else cliffs, dims)


def save(drawn: "Axes | Figure", path: str | Path) -> None:
    """Write a figure, or the figure that axes are of, as PDF, PNG or SVG, whole or not at all.

    Raises:
        GacError: the ending is another one, or the path cannot be written.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = drawn if isinstance(drawn, Figure) else drawn.get_figure()
    assert isinstance(figure, Figure), "axes of a subfigure are saved by their figure"
    save_figure(figure, Path(path))
