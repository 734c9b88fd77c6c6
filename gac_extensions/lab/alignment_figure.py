"""The cost of misalignment on a GPU as a heat map: operators by alignment classes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gac.core.arguments import checked
from gac.core.arrays import class_name
from gac.core.errors import ProfileError
from gac.profiling.cliffs import CLASSES, MUCH_SLOWER
from gac.profiling.table import Profile, Sweep
from gac.reporting.figures.heatmaps import draw_cells
from gac.reporting.page import MAP, Axes, panel
from gac_extensions.lab.cliffs import find_cliffs

_MOST_ROWS = 40
_TOP = 4.0  # times: darker shades would tell no more
_TIMES_DARK = 2.6  # times above which white words have more contrast


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
        draw_cells(ax, times, words, times > _TIMES_DARK, list(map(class_name, CLASSES)), 6.5, bar, **colours)
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
