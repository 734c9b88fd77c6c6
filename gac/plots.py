"""Figures, with matplotlib: each function draws on the ``ax`` it is given, or on new axes, and returns them.

They can be read in black and white: what colour tells is told by markers, hatches or words as well.

    from gac import Frontier, Plan, Profile, plots

    ax = plots.plan(Plan.load("plan.json"))
    plots.save(ax, "plan.pdf")

``atlas``, ``figure_of_dims``, ``figure_of_tokens`` and ``figure_of_frontier`` make a page of several panels, and return
the figure.
"""

from gac.reporting.figures.dims import dims, figure_of_dims, heads, layer_time
from gac.reporting.figures.heatmaps import plan
from gac.reporting.figures.losses import Outcome, prediction
from gac.reporting.figures.speeds import speeds
from gac.reporting.frontier import figure_of_frontier
from gac.reporting.frontier import plot_frontier as frontier
from gac.reporting.page import save
from gac_extensions.lab.sweep_figures import alignment, atlas, latency
from gac_extensions.tokens.figures import figure_of_tokens, token_losses, tokens

__all__ = [
    "Outcome",
    "alignment",
    "atlas",
    "dims",
    "figure_of_dims",
    "figure_of_frontier",
    "figure_of_tokens",
    "frontier",
    "heads",
    "latency",
    "layer_time",
    "plan",
    "prediction",
    "save",
    "speeds",
    "token_losses",
    "tokens",
]
