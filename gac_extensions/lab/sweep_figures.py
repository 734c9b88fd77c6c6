"""Latency along sweeps, with their cliffs: one panel, some, or those of a GPU on one page; the cost of misalignment.

Classes of dims differ by the shape of their markers as well as by colour (the palette of Okabe and Ito, told apart by
the colour blind), so that a panel can be read in black and white.
"""

from collections import Counter
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gac.core.arguments import checked
from gac.core.arrays import Floats, Ints, alignment_class, class_name
from gac.core.errors import GacError, ProfileError
from gac.profiling.cliffs import CLASSES, MUCH_SLOWER
from gac.profiling.table import Profile, Sweep
from gac.reporting.figures.heatmaps import draw_cells
from gac.reporting.page import DOTTED, MAP, Axes, Figure, log_scale, page, panel, time_unit
from gac_extensions.lab.cliffs import Cliffs, find_cliffs
from gac_extensions.lab.kernel_names import Kernel, describe

Mask = NDArray[np.bool_]

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
_ATLAS = (  # operators, dtypes, axes: the first of each that was measured
    (("linear",), ("bf16", "fp16"), ("k",)),
    (("linear",), ("bf16", "fp16"), ("n",)),
    (("linear",), ("bf16", "fp16"), ("m",)),
    (("low_rank",), ("bf16", "fp16"), ("r",)),
    (("sdpa",), ("bf16", "fp16"), ("d",)),
    (("sdpa_flash",), ("bf16", "fp16"), ("d",)),
    (("linear", "linear_rowwise"), ("fp8",), ("k", "n", "m")),
    (("int4_linear", "int4_linear_dequantised"), ("bf16",), ("n", "k", "m")),
)
# So narrow that the longest legends of two panels fit a page's width.
_NARROW: Any = {"fontsize": 6, "handlelength": 1.2, "handletextpad": 0.5, "columnspacing": 0.8}

# Small words along a vertical line, below the data: words may be crossed, points may not be hidden.
_BOX = {"boxstyle": "square,pad=0.1", "fc": "white", "ec": "none", "alpha": 0.8}
_ALONG: Any = {"fontsize": 6, "rotation": 90, "color": "#333333", "bbox": _BOX, "zorder": 1.5}

_FEW = 40  # so few points of the line are told from one another
_MOST_PANELS, _MOST_EDGES, _MOST_SWITCHES = 12, 8, 3

_MOST_ROWS = 40
_TOP = 4.0  # times: darker shades would tell no more
_TIMES_DARK = 2.6  # times above which white words have more contrast


@checked
def atlas(profile: Profile | str | Path) -> "Figure":
    """The cliffs of a GPU on one page: linear along k, n and m, low_rank along r, attention along d, FP8, INT4.

    Each panel is the longest of its kind among the profile's sweeps; kinds that were not measured are left out. A
    ProfileError if none was.
    """
    profile = Profile.opened(profile)
    longest = [_longest(profile, *kind) for kind in _ATLAS]
    sweeps = [(sweep, find_cliffs(sweep)) for sweep in longest if sweep is not None]
    if not sweeps:
        raise ProfileError(
            f"profile {profile.path.stem} has no sweep to draw",
            "at least 8 dims along k, n, m, r or d with all else fixed",
            "Measure them with gac profile.",
        )
    header = profile.header
    return figure_of_sweeps(sweeps, f"{header.gpu}, PyTorch {header.torch}, CUDA {header.cuda}")


def _longest(profile: Profile, operators: Sequence[str], dtypes: Sequence[str], axes: Sequence[str]) -> Sweep | None:
    """The sweep of the first measured kind with the most points, then with the most work."""
    cold = [sweep for sweep in profile.sweeps() if sweep.cache == "cold" and sweep.dtype in dtypes]
    for kind in ((operator, axis) for operator in operators for axis in axes):
        if sweeps := [sweep for sweep in cold if (sweep.operator, sweep.axis) == kind]:
            return max(sweeps, key=lambda sweep: (len(sweep), prod(size for _, size in sweep.fixed)))
    return None


def figure_of_sweeps(
    sweeps: Sequence[tuple[Sweep, Cliffs]], title: str, dims: tuple[int, int] | None = None
) -> "Figure":
    """One panel a sweep, two in a row, each with its own legend; a ProfileError for more than 12."""
    if len(sweeps) > _MOST_PANELS:
        problem = f"{len(sweeps)} sweeps to plot"
        raise ProfileError(problem, f"at most {_MOST_PANELS}", "Choose fewer by operator, axis and shape.")
    with page(len(sweeps), title) as (figure, panels):
        for ax, (sweep, cliffs) in zip(panels, sweeps, strict=True):
            latency(sweep, cliffs, dims=dims, ax=ax)
    return figure


@checked
def latency(
    sweep: Sweep, cliffs: Cliffs | None = None, *, dims: tuple[int, int] | None = None, ax: "Axes | None" = None
) -> "Axes":
    """Latency against the dim: collapsed dims, the largest steps of the staircase, and the kernels that ran.

    Aligned dims are a line, collapsed ones hollow markers.

    Args:
        cliffs: of the sweep, where they were found already.
        dims: the first and the last dim to show; by default all. A GacError if the sweep has none of them.
    """
    cliffs = find_cliffs(sweep) if cliffs is None else cliffs
    shown = sweep.inside(dims)
    if not shown.any():
        problem = "dims" if dims is None else f"dims from {dims[0]} to {dims[1]}"
        expected = f"some from {sweep.dims[0]} to {sweep.dims[-1]}"
        raise GacError(f"{problem} of {sweep.label}", expected, "Show others, or leave dims out.")
    scale, unit = time_unit(sweep.ns[shown].max())
    scaled = sweep.ns / scale
    with panel(ax, (5.6, 3.4)) as ax:
        _draw_dims(ax, sweep, scaled, cliffs, shown)
        if scaled[shown].max() > 30 * scaled[shown].min():
            log_scale(ax)
        else:
            ax.set_ylim(0, 1.12 * float(scaled[shown].max()))
        _draw_staircase(ax, sweep, scaled, cliffs, shown)
        _label(ax, sweep, unit)
    return ax


def _draw_dims(ax: "Axes", sweep: Sweep, scaled: Floats, cliffs: Cliffs, shown: Mask) -> None:
    """Aligned dims; one marker a class of misaligned dims, hollow where collapsed; a dot where not."""
    aligned, fallen = sweep.dims % cliffs.period == 0, np.isin(sweep.dims, cliffs.collapsed)
    classes = alignment_class(sweep.dims)

    def draw(chosen: Mask, label: str, *form: str, **style: Any) -> None:
        if chosen.any():
            ax.plot(sweep.dims[chosen], scaled[chosen], *form, label=label, **style)

    line = shown & aligned
    label = (f"multiples of {cliffs.period}" if cliffs.period > 1 else "all dims") + _main_kernel(sweep, line)
    dots = "." if line.sum() < _FEW else ""
    ax.plot(sweep.dims[line], scaled[line], label=label, color="black", lw=0.9, marker=dots, ms=4, zorder=2)
    for step, (marker, colour, size) in _CLASSES.items():
        ours = shown & ~aligned & fallen & (classes == step)
        style: dict[str, Any] = {"marker": marker, "mec": colour, "mfc": "none", "ms": size, "mew": 0.8, "ls": "none"}
        draw(ours, class_name(step) + _main_kernel(sweep, ours), zorder=3, **style)
    draw(shown & ~aligned & ~fallen, "misaligned, not collapsed", ".", color="#999999", ms=2.2, zorder=2)
    draw(line & fallen, "collapsed, though aligned", "x", color="#888888", ms=2.4, mew=0.6, zorder=3)


def _draw_staircase(ax: "Axes", sweep: Sweep, scaled: Floats, cliffs: Cliffs, shown: Mask) -> None:
    """The largest steps: a dotted line at each edge, a filled triangle on each sweet spot, the new kernel's tile."""
    visible = np.flatnonzero(np.isin(cliffs.sweet_spots, sweep.dims[shown]) & np.isin(cliffs.edges, sweep.dims[shown]))
    largest = sorted(visible[np.argsort(-cliffs.jumps[visible], kind="stable")][:_MOST_EDGES].tolist())
    if not largest:
        return
    before = np.searchsorted(sweep.dims, cliffs.sweet_spots[largest])
    after = np.searchsorted(sweep.dims, cliffs.edges[largest])
    edges = ((sweep.dims[before] + sweep.dims[after]) / 2).tolist()
    for edge in edges:
        ax.axvline(edge, **DOTTED)
    some = f"{len(largest)} largest of {len(visible)}" if len(largest) < len(visible) else f"all {len(visible)}"
    ax.plot(sweep.dims[before], scaled[before], "v", color="black", ms=4, label=f"sweet spots ({some})", zorder=4)
    room, last, named = 0.08 * float(np.ptp(sweep.dims[shown])), -np.inf, 0
    for left, right, edge in zip(before.tolist(), after.tolist(), edges, strict=True):
        words = _kernel_switch(sweep, left, right)
        if words and edge - last >= room and named < _MOST_SWITCHES:
            low = _emptier_below(ax, sweep.dims[shown], scaled[shown], edge)
            place = (edge, 0.02 if low else 0.99), (1, 0), ("data", "axes fraction")
            ax.annotate(words, *place, "offset points", va="bottom" if low else "top", **_ALONG)
            last, named = edge, named + 1


def _emptier_below(ax: "Axes", dims: Ints, scaled: Floats, where: float) -> bool:
    """True if fewer points lie in the lower third of the panel than in the upper one, just right of a dim."""
    ax.autoscale_view()
    to_panel = ax.transData + ax.transAxes.inverted()
    places = to_panel.transform(np.column_stack((dims, scaled)))
    begin = to_panel.transform((where, scaled[0]))[0]
    heights = places[np.abs(places[:, 0] - begin - 0.02) < 0.05, 1]
    return bool((heights < 1 / 3).sum() < (heights > 2 / 3).sum())


def _label(ax: "Axes", sweep: Sweep, unit: str) -> None:
    from matplotlib.ticker import MaxNLocator

    sizes = " ".join(f"{axis}={size}" for axis, size in sweep.fixed)
    cache = "" if sweep.cache == "cold" else f" {sweep.cache}"
    ax.set_title(f"{sweep.operator} {sweep.dtype}{cache}, {sizes}", pad=4)
    ax.xaxis.set_major_locator(MaxNLocator(6))
    ax.set_xlabel(_AXES.get(f"{sweep.operator} {sweep.axis}", _AXES.get(sweep.axis, sweep.axis)))
    ax.set_ylabel(f"latency ({unit})")
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.24), ncols=2, **_NARROW)


def _mains(sweep: Sweep, place: int) -> list[Kernel]:
    kernels = (describe(launch.name) for launch in sweep.launches[place])
    return [kernel for kernel in kernels if kernel.main]


def _main_kernel(sweep: Sweep, chosen: Mask) -> str:
    kinds: Counter[str] = Counter()
    for kernel in (kernel for place in np.flatnonzero(chosen).tolist() for kernel in _mains(sweep, place)):
        architecture = f" sm{kernel.architecture}" if kernel.architecture else ""
        tier = f" align{kernel.tier}" if kernel.tier and kernel.family in {"cutlass", "cublas", "xmma"} else ""
        kinds[f"{kernel.family}{architecture}{tier}"] += 1
    return f": {kinds.most_common(1)[0][0]}" if kinds else ""


def _kernel_switch(sweep: Sweep, before: int, after: int) -> str:
    pairs = zip(_mains(sweep, before), _mains(sweep, after), strict=False)
    new = next((new for old, new in pairs if old.name != new.name), None)
    if new is None:
        return ""
    if new.template_d is not None:
        return f"to d \N{LESS-THAN OR EQUAL TO} {new.template_d}"
    return f"to {'x'.join(map(str, new.tile)) if new.tile else new.family}"


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
        colours: dict[str, Any] = {"cmap": f"{MAP}_r", "vmin": 1, "vmax": _TOP, "edgecolors": "white"}
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
