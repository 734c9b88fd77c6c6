"""Heat maps: a plan, layers by projections; the cost of misalignment on a GPU, operators by alignment classes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gac.core.arguments import checked
from gac.core.arrays import Floats, class_name
from gac.core.errors import ProfileError
from gac.plan.layers import cell_of, kinds_of, legend_of, weights_by_layer
from gac.plan.plan import Plan
from gac.profiling.cliffs import CLASSES, MUCH_SLOWER, find_cliffs
from gac.profiling.table import Profile, Sweep
from gac.reporting.page import MAP, Axes, panel

_TALLEST = 9.6  # inches: a page
_ROW = 0.155
_SMALLEST, _LARGEST = 3.2, 6.5  # points
_KEPT_DARK = 0.47  # kept fraction below which white words have more contrast than black ones

_MOST_ROWS = 40
_CELL, _LETTER = 0.68, 0.055  # inches: a cell, or what a letter takes where words are longer
_TOP = 4.0  # times: darker shades would tell no more
_TIMES_DARK = 2.6  # times above which white words have more contrast


@checked
def plan(plan: Plan | str | Path, *, title: str | None = None, ax: "Axes | None" = None) -> "Axes":
    """Every weight of a plan: layers from the top down, projections from left to right.

    Colour is the kept fraction of the weight's parameters, light for all of them, so that it can be read in black and
    white. In each cell stand form and dim: r rank, w neurons, d head_dim of values, g rank of a head group, a dash for
    dense, and the scheme where numbers are rounded; an asterisk where the dim is no multiple of 8.

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
            kept[place] = each.params / each.weight.params
            if size >= _SMALLEST:  # colour alone, where nobody could read the words
                words[place] = f"{cell_of(each)}{'' if each.aligned else '*'}"
    width = max([_CELL, *(_LETTER * len(word) for word in words.values())])
    with panel(ax, (0.9 + width * len(kinds), height)) as ax:
        columns = [kind.removesuffix("_proj") for kind in kinds]
        bar = {"label": "kept fraction of the weight's parameters", "aspect": 40}
        _draw(ax, kept, words, kept < _KEPT_DARK, columns, size, bar, cmap=MAP, vmin=0, vmax=1, linewidth=0.4)
        step = max(1, round(len(layers) / 16))
        ax.set_yticks(np.arange(0, len(layers), step) + 0.5, [str(layer) for layer in layers][::step])
        ax.set_ylabel("decoder layer")
        ax.set_xlabel(fill(f"projection ({legend_of(plan)})", 16 * len(kinds)), fontsize=6.5)
        name = f"{plan.measured.model}, {plan.recipe.measure.method}"
        default = f"{name}: {plan.budget.kept:.3f} of the targeted parameters"
        ax.set_title(default if title is None else title, pad=6)
    return ax


@checked
def alignment(
    profile: Profile | str | Path,
    sweeps: Sequence[Sweep] | None = None,
    *,
    title: str | None = None,
    ax: "Axes | None" = None,
) -> "Axes":
    """The slowdown of each alignment class against the coarser dims that padding makes of its dims.

    One row a sweep, one column for each largest power of two that divides a dim. In the cells stands the median
    slowdown, with an asterisk where the class does not keep up (over 1.10x); empty cells: fewer than three dims.

    Args:
        sweeps: some of the profile's; None takes for each operator, dtype and axis the one with the most dims.

    Raises:
        ProfileError: there is no sweep, or there are more than 40.
    """
    profile = Profile.opened(profile)
    known = {}
    for sweep in _longest_sweeps(profile) if sweeps is None else sweeps:
        slowdown = find_cliffs(sweep).class_slowdown
        if slowdown or sweeps is not None:
            known[sweep] = [slowdown.get(step, np.nan) for step in CLASSES]
    if not 1 <= len(known) <= _MOST_ROWS:
        problem = f"{len(known)} sweeps of {profile.path.stem} to draw"
        raise ProfileError(problem, f"1 to {_MOST_ROWS}", "Choose by operator or axis.")
    times = np.array(list(known.values()))
    words = {
        place: f"{ratio:.2f}x{'*' if ratio > MUCH_SLOWER else ''}"
        for place, ratio in np.ndenumerate(times)
        if np.isfinite(ratio)
    }
    with panel(ax, (6.2, 1.2 + 0.2 * len(known))) as ax:
        colours: dict[str, Any] = {"cmap": f"{MAP}_r", "vmin": 1, "vmax": _TOP, "linewidth": 0.5}
        bar = {"label": "latency over the padded dim's (times)", "extend": "max"}
        _draw(ax, times, words, times > _TIMES_DARK, list(map(class_name, CLASSES)), 6.5, bar, **colours)
        ax.set_yticks(np.arange(len(known)) + 0.5, [f"{each.operator} {each.dtype}, {each.axis}" for each in known])
        ax.set(xlabel="alignment class: the largest power of two that divides the dim", ylabel="operator and axis")
        ax.set_title(f"{profile.header.gpu}: what misaligned dims cost" if title is None else title, pad=6)
    return ax


def _longest_sweeps(profile: Profile) -> list[Sweep]:
    best: dict[tuple[str, str, str], Sweep] = {}
    for sweep in (sweep for sweep in profile.sweeps() if sweep.cache == "cold"):
        key = sweep.operator, sweep.dtype, sweep.axis
        best[key] = max(best.get(key, sweep), sweep, key=len)
    return list(best.values())


def _draw(
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
    mesh = ax.pcolormesh(values, edgecolors="white", **colours)
    for (row, column), text in words.items():
        colour = "white" if dark[row, column] else "black"
        ax.text(column + 0.5, row + 0.5, text, ha="center", va="center_baseline", fontsize=size, color=colour)
    ax.set_xticks(np.arange(len(columns)) + 0.5, columns)
    ax.tick_params(length=0)
    ax.invert_yaxis()
    ax.figure.colorbar(mesh, ax=ax, fraction=0.04, pad=0.02, **bar)
