"""Tables and legends as a reader sees them."""

from matplotlib.axes import Axes
from rich.console import Console, RenderableType


def shown(table: RenderableType) -> list[str]:
    """The lines of a table in a file, without the space around them."""
    console = Console(width=100, markup=False, highlight=False, file=None)
    with console.capture() as capture:
        console.print(table)
    return [" ".join(line.split()) for line in capture.get().splitlines()]


def legend(ax: Axes) -> list[str]:
    box = ax.get_legend()
    assert box is not None
    return [text.get_text() for text in box.get_texts()]
