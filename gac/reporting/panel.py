"""One panel: latency along a sweep, with its cliffs.

Classes of dims differ by the shape of their markers as well as by colour (the palette of Okabe and Ito, told apart by
the colour blind), so that the panel can be read in black and white.
"""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gac.arrays import Floats, Ints
from gac.profiling.cliffs import Cliffs
from gac.profiling.kernel_names import Kernel, describe
from gac.profiling.table import Sweep, alignment_class
from gac.reporting.figures.marks import DOTTED
from gac.reporting.layout import class_name
from gac.reporting.page import log_scale, time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CLASSES = {  # alignment class: marker, colour, size
    1: ("o", "#D55E00", 3.6),
    2: ("^", "#E69F00", 3.8),
    4: ("s", "#009E73", 3.2),
    8: ("D", "#56B4E9", 3.2),
    16: ("v", "#CC79A7", 3.6),
    32: ("p", "#0072B2", 3.6),
    64: ("h", "#000000", 3.6),
}
_AXES = {
    "m": "m, rows (tokens)",
    "k": "k, input features",
    "n": "n, output features",
    "r": "r, rank",
    "d": "d, dim of a head",
    "s": "s, query tokens",
    "t": "t, key tokens",
    "b": "b, batch",
    "h": "h, heads",
    "copy n": "n, elements",
    "low": "low, smallest head",
    "high": "high, largest head",
}
_NARROW: Any = {"fontsize": 6, "handlelength": 1.2, "handletextpad": 0.5, "columnspacing": 0.8}
"""So narrow that the longest legends of two panels fit a page's width."""

_FEW = 40
"""So few points of the line are told from one another."""

_MOST_EDGES = 8
_MOST_SWITCHES = 3


def plot_sweep(ax: "Axes", sweep: Sweep, cliffs: Cliffs, dims: tuple[int, int] | None = None) -> "Axes":
    """Latency against the dim: aligned dims as a line, collapsed ones as hollow markers, the largest steps marked.

    Args:
        dims: the first and the last dim to show; by default all.
    """
    shown = _window(sweep, dims)
    step = cliffs.period if cliffs.period > 1 else 1
    scale, unit = time_unit(sweep.ns[shown].max())
    latency = sweep.ns / scale
    line = shown & (sweep.dims % step == 0)
    dots = "." if line.sum() < _FEW else ""
    look: dict[str, Any] = {"color": "black", "lw": 0.9, "marker": dots, "ms": 4}
    ax.plot(sweep.dims[line], latency[line], label=_line_label(sweep, line, step), zorder=2, **look)
    _draw_classes(ax, sweep, latency, shown & (sweep.dims % step != 0), cliffs.collapsed)
    on_line = line & np.isin(sweep.dims, cliffs.collapsed)
    if on_line.any():
        where = sweep.dims[on_line], latency[on_line]
        ax.plot(*where, "x", color="#888888", ms=2.4, mew=0.6, label="collapsed, though aligned", zorder=3)
    _scale(ax, latency[shown])
    _draw_staircase(ax, sweep, latency, cliffs, shown)
    _label(ax, sweep, unit)
    return ax


def _window(sweep: Sweep, dims: tuple[int, int] | None) -> NDArray[np.bool_]:
    if dims is None:
        return np.ones(len(sweep), dtype=np.bool_)
    inside: NDArray[np.bool_] = (sweep.dims >= dims[0]) & (sweep.dims <= dims[1])
    return inside


def _draw_classes(ax: "Axes", sweep: Sweep, latency: Floats, misaligned: NDArray[np.bool_], collapsed: Ints) -> None:
    """One marker a class of misaligned dims: hollow where collapsed, a dot where not."""
    classes = alignment_class(sweep.dims)
    fallen = np.isin(sweep.dims, collapsed)
    for step, (marker, colour, size) in _CLASSES.items():
        ours = misaligned & (classes == step) & fallen
        if ours.any():
            style: dict[str, Any] = {"mec": colour, "mfc": "none", "ms": size, "mew": 0.8, "ls": "none"}
            label = class_name(step) + _ran(sweep, ours)
            ax.plot(sweep.dims[ours], latency[ours], marker=marker, label=label, zorder=3, **style)
    rest = misaligned & ~fallen
    if rest.any():
        ax.plot(
            sweep.dims[rest], latency[rest], ".", color="#999999", ms=2.2, label="misaligned, not collapsed", zorder=2
        )


def _draw_staircase(ax: "Axes", sweep: Sweep, latency: Floats, cliffs: Cliffs, shown: NDArray[np.bool_]) -> None:
    """The largest steps: a dotted line at each edge, a filled triangle on each sweet spot, the new kernel's tile."""
    visible = np.flatnonzero(np.isin(cliffs.sweet_spots, sweep.dims[shown]) & np.isin(cliffs.edges, sweep.dims[shown]))
    largest = sorted(visible[np.argsort(-cliffs.jumps[visible], kind="stable")][:_MOST_EDGES].tolist())
    if not largest:
        return
    place = {dim: index for index, dim in enumerate(sweep.dims.tolist())}
    before = [place[dim] for dim in cliffs.sweet_spots[largest].tolist()]
    after = [place[dim] for dim in cliffs.edges[largest].tolist()]
    for left, right in zip(before, after, strict=True):
        ax.axvline(float(sweep.dims[left] + sweep.dims[right]) / 2, **DOTTED)
    some = f"{len(largest)} largest of {len(visible)}" if len(largest) < len(visible) else f"all {len(visible)}"
    spots = [int(dim) for dim in sweep.dims[before]], latency[before]
    ax.plot(*spots, "v", color="black", ms=4, label=f"sweet spots ({some})", zorder=4)
    _name_switches(ax, sweep, latency, shown, list(zip(before, after, strict=True)))


def _name_switches(
    ax: "Axes", sweep: Sweep, latency: Floats, shown: NDArray[np.bool_], steps: Sequence[tuple[int, int]]
) -> None:
    """Beside at most three edges, far enough apart to be read, what the kernel became."""
    room = 0.08 * float(np.ptp(sweep.dims[shown]))
    last, named = -np.inf, 0
    for left, right in steps:
        words, where = _changed(sweep, left, right), float(sweep.dims[left] + sweep.dims[right]) / 2
        if words and where - last >= room and named < _MOST_SWITCHES:
            _write_along(ax, where, words, low=_emptier_below(ax, sweep.dims[shown], latency[shown], where))
            last, named = where, named + 1


def _emptier_below(ax: "Axes", dims: Ints, latency: Floats, where: float) -> bool:
    """Whether fewer points lie in the lower third of the panel than in the upper one, just right of a dim."""
    ax.autoscale_view()
    places = ax.transAxes.inverted().transform(ax.transData.transform(np.column_stack((dims, latency))))
    begin = ax.transAxes.inverted().transform(ax.transData.transform((where, latency[0])))[0]
    heights = places[np.abs(places[:, 0] - begin - 0.02) < 0.05, 1]
    return bool((heights < 1 / 3).sum() < (heights > 2 / 3).sum())


def _write_along(ax: "Axes", where: float, words: str, low: bool) -> None:
    """Small text along a vertical line, at its lower or its upper end."""
    ax.annotate(
        words,
        (where, 0.02 if low else 0.99),
        xycoords=("data", "axes fraction"),
        xytext=(1, 0),
        textcoords="offset points",
        fontsize=6,
        rotation=90,
        va="bottom" if low else "top",
        color="#333333",
        bbox={"boxstyle": "square,pad=0.1", "fc": "white", "ec": "none", "alpha": 0.8},
        zorder=1.5,  # below the data: words may be crossed, points may not be hidden
    )


def _changed(sweep: Sweep, before: int, after: int) -> str:
    old, new = (_mains(sweep, place) for place in (before, after))
    changed = [_configuration(to) for was, to in zip(old, new, strict=False) if was.name != to.name]
    return f"to {changed[0]}" if changed and changed[0] else ""


def _scale(ax: "Axes", latency: Floats) -> None:
    """From zero, but logarithmic where the slowest dim is over 30 times the fastest."""
    if latency.max() > 30 * latency.min():
        log_scale(ax)
    else:
        ax.set_ylim(0, 1.12 * float(latency.max()))


def _label(ax: "Axes", sweep: Sweep, unit: str) -> None:
    """Labels, and the legend below the panel, where it hides nothing."""
    from matplotlib.ticker import MaxNLocator

    sizes = " ".join(f"{axis}={size}" for axis, size in sweep.fixed)
    cache = "" if sweep.cache == "cold" else f" {sweep.cache}"
    ax.set_title(f"{sweep.operator} {sweep.dtype}{cache}, {sizes}", pad=4)
    ax.xaxis.set_major_locator(MaxNLocator(6))
    ax.set_xlabel(_AXES.get(f"{sweep.operator} {sweep.axis}", _AXES.get(sweep.axis, sweep.axis)))
    ax.set_ylabel(f"latency ({unit})")
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.24), ncols=2, **_NARROW)


def _line_label(sweep: Sweep, line: NDArray[np.bool_], step: int) -> str:
    return (f"multiples of {step}" if step > 1 else "all dims") + _ran(sweep, line)


def _ran(sweep: Sweep, chosen: NDArray[np.bool_]) -> str:
    """The kind of kernel that did most of the arithmetic at these points; nothing where none is recorded."""
    kinds = Counter(_kind(kernel) for place in np.flatnonzero(chosen) for kernel in _mains(sweep, int(place)))
    return f": {kinds.most_common(1)[0][0]}" if kinds else ""


def _mains(sweep: Sweep, place: int) -> list[Kernel]:
    kernels = (describe(launch.name) for launch in sweep.launches[place])
    return [kernel for kernel in kernels if kernel.main]


def _kind(kernel: Kernel) -> str:
    architecture = f" sm{kernel.architecture}" if kernel.architecture else ""
    tier = f" align{kernel.tier}" if kernel.tier and kernel.family in {"cutlass", "cublas", "xmma"} else ""
    return f"{kernel.family}{architecture}{tier}"


def _configuration(kernel: Kernel) -> str:
    if kernel.template_d is not None:
        return f"d \N{LESS-THAN OR EQUAL TO} {kernel.template_d}"
    return "x".join(map(str, kernel.tile)) if kernel.tile else kernel.family
