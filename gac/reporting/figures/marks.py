"""How things are told apart without colour: markers, hatches, and the palette of Okabe and Ito beside them."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gac.arrays import Floats
from gac.errors import GacError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

MARKERS = ("o", "s", "^", "D", "v", "P")
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#000000")
HATCHES = ("", "////", "....", "\\\\\\\\", "xxxx", "----", "oooo", "++++")
MAP = "cividis"

ALIGNED = 8

DOTTED: Any = {"color": "#999999", "lw": 0.6, "ls": (0, (1, 2)), "zorder": 1}
"""Lines to read the data by."""


def check_many(number: int, what: str) -> None:
    """Refuse more things in one panel than there are markers, or none.

    Raises:
        GacError: there are none, or more than 6.
    """
    if not 1 <= number <= len(MARKERS):
        raise GacError(f"{number} {what} in one figure", f"1 to {len(MARKERS)}", "Draw fewer at a time.")


def marker(number: int, *, hollow: bool = False, size: float = 4.0) -> dict[str, Any]:
    """The look of the points of one thing among several; hollow ones are not aligned."""
    colour, shape = COLOURS[number], MARKERS[number]
    return {"marker": shape, "mec": colour, "mfc": "none" if hollow else colour, "mew": 0.9, "ms": size, "ls": "none"}


def proxy(label: str, **style: Any) -> "Line2D":
    """An entry of a legend that stands for no line of the panel."""
    from matplotlib.lines import Line2D

    return Line2D([], [], label=entry(label), **style)


def entry(label: str) -> str:
    """A label that a legend shows: matplotlib leaves out those that begin with an underscore."""
    return f" {label}" if label.startswith("_") else label


def draw_cells(
    ax: "Axes",
    values: Floats,
    words: Mapping[tuple[int, int], str],
    dark: NDArray[np.bool_],
    columns: Sequence[str],
    size: float,
    bar: Mapping[str, Any],
    **colours: Any,
) -> None:
    """A heat map, rows from the top down; NaN leaves a cell empty.

    Args:
        words: what stands in a cell, by row and column.
        dark: the cells whose words are white.
        size: of the words, points.
        bar: the label of the colours, and how their bar differs from others.
    """
    mesh = ax.pcolormesh(values, edgecolors="white", **colours)
    for (row, column), text in words.items():
        colour = "white" if dark[row, column] else "black"
        ax.text(column + 0.5, row + 0.5, text, ha="center", va="center_baseline", fontsize=size, color=colour)
    ax.set_xticks(np.arange(len(columns)) + 0.5, columns)
    ax.tick_params(length=0)
    ax.invert_yaxis()
    ax.figure.colorbar(mesh, ax=ax, fraction=0.04, pad=0.02, **bar)
