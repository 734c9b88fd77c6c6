"""The plan as a heat map: layers by projections, the kept fraction as colour, form and dim in words."""

from typing import TYPE_CHECKING

import numpy as np

from gac.arrays import Floats
from gac.plan import Plan, WeightChoice
from gac.reporting.figures.marks import ALIGNED, MAP
from gac.reporting.page import panel
from gac.reporting.tables import cell_of, kinds_of, weights_by_layer

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TALLEST = 9.6  # inches: a page
_ROW = 0.155
_SMALLEST, _LARGEST = 3.2, 6.5  # points
_DARK = 0.47  # kept fraction below which white words have more contrast than black ones


def plan(plan: Plan, *, title: str | None = None, ax: "Axes | None" = None) -> "Axes":
    """Every weight of a plan: layers from the top down, projections from left to right.

    Colour is the kept fraction of the weight's parameters, light for all of them, so that it can be read in black and
    white. In each cell stand form and dim: r rank, w neurons, d head_dim of values, g rank of a head group, a dash for
    dense; an asterisk where the dim is no multiple of 8.

    Args:
        title: None says the model, the method and what is kept.

    Raises:
        GacError: matplotlib is missing.
    """
    layers = weights_by_layer(plan)
    kinds = kinds_of(layers)
    height = min(_TALLEST, 1.1 + _ROW * len(layers))
    with panel(ax, (0.9 + 0.68 * len(kinds), height)) as ax:
        choices = [[weights.get(kind) for kind in kinds] for _, weights in layers]
        kept = np.array([[_kept(choice) for choice in row] for row in choices])
        mesh = ax.pcolormesh(kept, cmap=MAP, vmin=0, vmax=1, edgecolors="white", linewidth=0.4)
        _write_cells(ax, choices, kept, height)
        _label(ax, plan, [layer for layer, _ in layers], kinds, title)
        bar = ax.figure.colorbar(mesh, ax=ax, fraction=0.04, pad=0.02, aspect=40)
        bar.set_label("kept fraction of the weight's parameters")
    return ax


def _kept(choice: WeightChoice | None) -> float:
    return np.nan if choice is None else choice.params / choice.weight.params


def _write_cells(ax: "Axes", rows: list[list[WeightChoice | None]], kept: Floats, height: float) -> None:
    size = min(_LARGEST, 0.72 * 72 * (height - 1.0) / len(rows))
    if size < _SMALLEST:  # colour alone, where nobody could read the words
        return
    for row, choices in enumerate(rows):
        for column, choice in enumerate(choices):
            if choice is not None:
                colour = "white" if kept[row, column] < _DARK else "black"
                where = column + 0.5, row + 0.5
                ax.text(*where, _words(choice), ha="center", va="center_baseline", fontsize=size, color=colour)


def _words(choice: WeightChoice) -> str:
    words = cell_of(choice)
    return words if words == "-" or choice.dim % ALIGNED == 0 else f"{words}*"


def _label(ax: "Axes", plan: Plan, layers: list[int], kinds: list[str], title: str | None) -> None:
    step = max(1, round(len(layers) / 16))
    ax.set_yticks(np.arange(0, len(layers), step) + 0.5, [str(layer) for layer in layers[::step]])
    ax.set_xticks(np.arange(len(kinds)) + 0.5, [kind.removesuffix("_proj") for kind in kinds])
    ax.tick_params(length=0)
    ax.invert_yaxis()
    ax.set_ylabel("decoder layer")
    ax.set_xlabel("projection (r: rank, w: neurons, d: head_dim, g: rank of a head group, -: dense)", fontsize=6.5)
    kept = f"{plan.budget.kept:.3f} of the targeted parameters"
    ax.set_title(f"{plan.model}, {plan.method}: {kept}" if title is None else title, pad=6)
