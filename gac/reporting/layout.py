"""What the tables share: their look, a legend's, and what an alignment class is called."""

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import JustifyMethod
from rich.table import Table
from rich.text import Text

_WHOLE = ("name", "digest", "study")  # columns of things to type or compare: never cut


def new_table(columns: Iterable[tuple[str, str]], rows: Iterable[Sequence[str | Text]] = ()) -> Table:
    """A table; each column has a heading and ``<`` or ``>`` for left or right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    for heading, side in columns:
        justify: JustifyMethod = "right" if side == ">" else "left"
        table.add_column(Text(heading), justify=justify, overflow="fold", no_wrap=heading in _WHOLE)
    for row in rows:
        table.add_row(*row)
    return table


def legend(text: str) -> Text:
    """What stands below a table to read it by."""
    return Text(text, style="dim")


def class_name(step: int) -> str:
    """What an alignment class is called: ``odd``, ``8 x odd``."""
    return "odd" if step == 1 else f"{step} x odd"
