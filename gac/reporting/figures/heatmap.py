"""The plan as a heat map: layers by projections, the kept fraction as colour, form and dim in words."""

from typing import TYPE_CHECKING

import numpy as np

from gac.plan import Plan
from gac.reporting.figures.marks import ALIGNED, MAP, draw_cells
from gac.reporting.page import panel
from gac.reporting.tables import cell_of, kinds_of, legend_of, weights_by_layer

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
    size = min(_LARGEST, 0.72 * 72 * (height - 1.0) / len(layers))
    kept = np.full((len(layers), len(kinds)), np.nan)
    words: dict[tuple[int, int], str] = {}
    for row, weights in enumerate(layers.values()):
        for kind, one in weights.items():
            place = row, kinds.index(kind)
            kept[place] = one.params / one.weight.params
            if size >= _SMALLEST:  # colour alone, where nobody could read the words
                words[place] = f"{cell_of(one)}{'' if one.form == 'dense' or one.dim % ALIGNED == 0 else '*'}"
    with panel(ax, (0.9 + 0.68 * len(kinds), height)) as ax:
        columns = [kind.removesuffix("_proj") for kind in kinds]
        bar = {"label": "kept fraction of the weight's parameters", "aspect": 40}
        draw_cells(ax, kept, words, kept < _DARK, columns, size, bar, cmap=MAP, vmin=0, vmax=1, linewidth=0.4)
        step = max(1, round(len(layers) / 16))
        ax.set_yticks(np.arange(0, len(layers), step) + 0.5, [str(layer) for layer in layers][::step])
        ax.set_ylabel("decoder layer")
        ax.set_xlabel(f"projection ({legend_of(plan)})", fontsize=6.5)
        own = f"{plan.measured.model}, {plan.recipe.measure.method}: {plan.budget.kept:.3f} of the targeted parameters"
        ax.set_title(own if title is None else title, pad=6)
    return ax
