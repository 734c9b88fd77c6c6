"""What misalignment costs on a GPU: operators and axes by alignment class, in one look."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gac.arrays import Floats
from gac.errors import ProfileError
from gac.profiling.cliffs import CLASSES, MUCH_SLOWER, find_cliffs
from gac.profiling.table import Profile, Sweep
from gac.reporting.figures.marks import MAP, draw_cells
from gac.reporting.layout import class_name
from gac.reporting.page import panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_ROWS = 40
_TOP = 4.0  # times: darker shades would tell no more
_DARK = 2.6  # times above which white words have more contrast than black ones


def alignment(
    profile: Profile, sweeps: Sequence[Sweep] | None = None, *, title: str | None = None, ax: "Axes | None" = None
) -> "Axes":
    """How many times slower the dims of each alignment class are than the coarser dims that padding makes of them.

    One row a sweep, one column for each largest power of two that divides a dim. In the cells stands the median
    slowdown, with an asterisk where the class does not keep up (over 1.10x); empty cells: fewer than three dims.

    Args:
        sweeps: some of the profile's; None takes for each operator, dtype and axis the one with the most dims.

    Raises:
        ProfileError: there is no sweep, or there are more than 40.
        GacError: matplotlib is missing.
    """
    known = longest_sweeps(profile) if sweeps is None else {sweep: _slowdown(sweep) for sweep in sweeps}
    if not 1 <= len(known) <= _MOST_ROWS:
        given = f"{len(known)} sweeps of {profile.path.stem} to draw"
        raise ProfileError(given, f"1 to {_MOST_ROWS}", "Choose by operator or axis.")
    slowdown = np.array(list(known.values()))
    words = {
        place: f"{times:.2f}x{'*' if times > MUCH_SLOWER else ''}"
        for place, times in np.ndenumerate(slowdown)
        if np.isfinite(times)
    }
    with panel(ax, (6.2, 1.2 + 0.2 * len(known))) as ax:
        colours: dict[str, Any] = {"cmap": f"{MAP}_r", "vmin": 1, "vmax": _TOP, "linewidth": 0.5}
        bar: dict[str, Any] = {"label": "latency over the padded dim's (times)", "extend": "max"}
        draw_cells(ax, slowdown, words, slowdown > _DARK, list(map(class_name, CLASSES)), 6.5, bar, **colours)
        ax.set_yticks(np.arange(len(known)) + 0.5, [f"{one.operator} {one.dtype}, {one.axis}" for one in known])
        ax.set_xlabel("alignment class: the largest power of two that divides the dim")
        ax.set_ylabel("operator and axis")
        ax.set_title(f"{profile.header.gpu}: what misaligned dims cost" if title is None else title, pad=6)
    return ax


def longest_sweeps(profile: Profile) -> dict[Sweep, Floats]:
    """For each operator, dtype and axis with evidence about alignment, the cold sweep with the most dims."""
    best: dict[tuple[str, str, str], Sweep] = {}
    for sweep in (sweep for sweep in profile.sweeps() if sweep.cache == "cold"):
        key = sweep.operator, sweep.dtype, sweep.axis
        best[key] = max(best.get(key, sweep), sweep, key=len)
    known = {sweep: _slowdown(sweep) for sweep in best.values()}
    return {sweep: times for sweep, times in known.items() if np.isfinite(times).any()}


def _slowdown(sweep: Sweep) -> Floats:
    known = find_cliffs(sweep).class_slowdown
    return np.array([known.get(step, np.nan) for step in CLASSES])
