"""Heat maps; of a plan, layers by projections."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gac.core.arguments import checked
from gac.core.arrays import Floats
from gac.plan.layers import cell_of, kinds_of, legend_of, weights_by_layer
from gac.plan.plan import Plan
from gac.plan.summary import what_is_kept
from gac.reporting.page import KEPT, Axes, panel

_TALLEST = 9.6  # inches: a page
_ROW = 0.155
_SMALLEST, _LARGEST = 3.2, 6.5  # points
_KEPT_DARK = 0.28  # kept fraction below which white words have more contrast than black ones
_EDGE = "#c9ced6"  # around cells, of which those that stay are white
_CELL, _LETTER = 0.68, 0.055  # inches: a cell, or what a letter takes where words are longer


@checked
def plan(plan: Plan | str | Path, *, title: str | None = None, ax: "Axes | None" = None) -> "Axes":
    """Every weight of a plan: layers from the top down, projections from left to right.

    Colour is the kept fraction of the weight's bytes, light for all of them, so that it can be read in black and white.
    In each cell stand form and dim: r rank, w neurons, d head_dim of values, g rank of a head group, a dash for dense,
    and the scheme where numbers are rounded; an asterisk where the dim is no multiple of 8.

    Args:
        title: None says the model, the method and what is kept.
    """
    plan = Plan.opened(plan)
    layers = weights_by_layer(plan)
    kinds = kinds_of(layers)
    height = min(_TALLEST, 1.1 + _ROW * len(layers))
    size = min(_LARGEST, 0.72 * 72 * (height - 1.0) / len(layers))
    kept = np.full((len(layers), len(kinds)), np.nan)
    words: dict[tuple[int, ...], str] = {}
    for row, weights in enumerate(layers.values()):
        for kind, each in weights.items():
            place = row, kinds.index(kind)
            kept[place] = each.bytes / each.dense_bytes
            if size >= _SMALLEST:  # colour alone, where nobody could read the words
                words[place] = f"{cell_of(each)}{'' if each.aligned else '*'}"
    width = max([_CELL, *(_LETTER * len(word) for word in words.values())])
    with panel(ax, (0.9 + width * len(kinds), height)) as ax:
        columns = [kind.removesuffix("_proj") for kind in kinds]
        bar = {"label": "kept fraction of the weight's bytes", "aspect": 40}
        draw_cells(ax, kept, words, kept < _KEPT_DARK, columns, size, bar, cmap=KEPT, vmin=0, vmax=1, edgecolors=_EDGE)
        step = max(1, round(len(layers) / 16))
        ax.set_yticks(np.arange(0, len(layers), step) + 0.5, [str(layer) for layer in layers][::step])
        ax.set_ylabel("decoder layer")
        ax.set_xlabel(fill(f"projection ({legend_of(plan)})", 16 * len(kinds)), fontsize=6.5)
        name = f"{plan.measured.model}, {plan.recipe.measure.method}"
        ax.set_title(f"{name}, to {what_is_kept(plan)}" if title is None else title, pad=6)
    return ax


def draw_cells(
    ax: "Axes",
    values: Floats,
    words: Mapping[tuple[int, ...], str],
    dark: NDArray[np.bool_],
    columns: Sequence[str],
    size: float,
    bar: Mapping[str, Any],
    **colours: Any,
) -> None:
    """Rows from the top down; NaN leaves a cell empty; words of a size in points, white in the dark cells."""
    mesh = ax.pcolormesh(values, linewidth=0.5, **colours)
    for (row, column), text in words.items():
        colour = "white" if dark[row, column] else "black"
        ax.text(column + 0.5, row + 0.5, text, ha="center", va="center_baseline", fontsize=size, color=colour)
    ax.set_xticks(np.arange(len(columns)) + 0.5, columns)
    ax.tick_params(length=0)
    ax.invert_yaxis()
    ax.figure.colorbar(mesh, ax=ax, fraction=0.04, pad=0.02, **bar)
