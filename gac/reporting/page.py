"""A page of panels: size, style, and the file it is written to. matplotlib is loaded late; a GacError if it is missing.

Curves and bars differ without colour: by markers and hatches, and by the palette of Okabe and Ito.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gac.core.arguments import checked
from gac.core.errors import GacError
from gac.core.io import complete_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure as Figure
    from matplotlib.lines import Line2D as Line2D
else:  # for annotations here and in the modules that draw
    Axes = Figure = Line2D = Any

MARKERS = ("o", "s", "^", "D", "v", "P")
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#000000")
HATCHES = ("", "////", "....", "\\\\\\\\", "xxxx", "----", "oooo", "++++")
MAP = "cividis"
KEPT = "Blues_r"  # of a weight, light where all of it stays: the colours of the report page
ALIGNED = 8
DOTTED: Any = {"color": "#999999", "lw": 0.6, "ls": (0, (1, 2)), "zorder": 1}  # lines to read the data by

_ENDINGS = (".png", ".pdf", ".svg")
_BELOW = 0.42  # inches below the axes: ticks and the label of the x axis
_SCREEN = 110  # dots an inch in a notebook, where the smallest words are to be read
_STYLE = Path(__file__).with_name("page.mplstyle")


@contextmanager
def page(panels: int, title: str) -> Iterator[tuple["Figure", Sequence["Axes"]]]:
    """A figure of some panels, two in a row, to draw on inside the block."""
    require_matplotlib()
    from matplotlib import style
    from matplotlib.figure import Figure

    columns = min(2, panels)
    rows = -(-panels // columns)
    with style.context(_STYLE):
        figure = Figure(figsize=(3.65 * columns if columns > 1 else 5.6, 2.75 * rows + 0.35), layout="constrained")
        figure.suptitle(title, fontsize=9, fontweight="bold", x=0.01, ha="left", parse_math=False)
        axes = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
        for ax in axes[panels:]:
            ax.set_axis_off()
        yield figure, axes[:panels]
        for text in (text for legend in figure.legends for text in legend.get_texts()):
            text.set_parse_math(False)
        for ax in axes[:panels]:
            _disable_math(ax)


@contextmanager
def panel(ax: "Axes | None", size: tuple[float, float]) -> Iterator["Axes"]:
    """The axes to draw on inside the block: the argument, or new ones (of a size in inches) that a notebook shows.

    Text on them is literal: a dollar sign in a model's name begins no formula.
    """
    require_matplotlib()
    from matplotlib import pyplot, style

    # Outside the style's context: with the first figure a notebook sets parameters that are to stay.
    figure = pyplot.figure(figsize=size, dpi=_SCREEN, layout="constrained") if ax is None else None
    with style.context(_STYLE):
        drawn = ax if figure is None else figure.subplots()
        assert drawn is not None
        yield drawn
        _disable_math(drawn)


def _disable_math(ax: "Axes") -> None:
    from matplotlib.text import Text

    legend = ax.get_legend()
    words = [child for child in ax.get_children() if isinstance(child, Text)]
    for text in (*words, ax.xaxis.label, ax.yaxis.label, *(legend.get_texts() if legend else ())):
        text.set_parse_math(False)


def time_unit(longest_ns: float) -> tuple[float, str]:
    """The divisor of latencies in ns that makes the longest readable, and the resulting unit."""
    return (1e6, "ms") if longest_ns >= 1e7 else (1e3, "µs")


def log_scale(ax: "Axes") -> None:
    """A logarithmic y axis with plain numbers at 1, 2 and 5 of every decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _place: f"{value:,g}"))


def legend_below(ax: "Axes", **options: Any) -> None:
    """Place the legend under the label of the x axis, at a distance that the height of the axes does not change."""
    from matplotlib.transforms import ScaledTranslation

    place = ax.transAxes + ScaledTranslation(0, -_BELOW, ax.figure.dpi_scale_trans)
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, 0), bbox_transform=place, **options)


def check_figure(path: Path) -> None:
    """Refuse, before any work, a figure whose ending is not .png, .pdf or .svg."""
    require_matplotlib()
    if path.suffix.lower() not in _ENDINGS:
        problem = f"figure {path} ends in {repr(path.suffix) if path.suffix else 'nothing'}"
        raise GacError(problem, f"one of {', '.join(_ENDINGS)}", "Change the ending.")


@checked
def save(drawn: "Axes | Figure", path: str | Path) -> None:
    """Write a figure, or the figure of some axes, as PDF, PNG or SVG; an interrupted write leaves no file."""
    path = Path(path)
    check_figure(path)
    from matplotlib import style
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    if not isinstance(drawn, (Axes, Figure)):
        raise GacError(f"a {type(drawn).__name__} to save", "a figure, or axes of one", "Pass what gac.plots returned.")
    figure = drawn if isinstance(drawn, Figure) else drawn.get_figure()
    assert isinstance(figure, Figure), "axes of a subfigure are saved by their figure"
    with style.context(_STYLE), complete_file(path, "figure") as temporary:
        figure.savefig(temporary, format=path.suffix.lower()[1:], dpi=200)


def require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as failure:
        raise GacError("matplotlib is not installed", "it, for a figure", "Run pip install matplotlib.") from failure


def check_many(number: int, what: str) -> None:
    """Refuse no curves, or more than there are markers: 6."""
    if not 1 <= number <= len(MARKERS):
        raise GacError(f"{number} {what} in one figure", f"1 to {len(MARKERS)}", "Draw fewer at a time.")


def marker(number: int, *, hollow: bool = False, size: float = 4.0) -> dict[str, Any]:
    """The style of the points of one curve among several; hollow points are not aligned."""
    colour, shape = COLOURS[number], MARKERS[number]
    return {"marker": shape, "mec": colour, "mfc": "none" if hollow else colour, "mew": 0.9, "ms": size, "ls": "none"}


def proxy(label: str, **style: Any) -> "Line2D":
    from matplotlib.lines import Line2D

    return Line2D([], [], label=entry(label), **style)


def entry(label: str) -> str:
    """A label that a legend shows: matplotlib skips those that begin with an underscore."""
    return f" {label}" if label.startswith("_") else label
