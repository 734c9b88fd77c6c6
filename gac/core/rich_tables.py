"""Tables for a terminal, with rich: headings and numbers stay whole at every width."""

from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

_NUMBER, _ENDLESS = 16, 10**6  # letters of a word that is not broken; more than any table is wide
_UNCUT = ("name", "digest", "study")  # columns of things to type or compare
_WIDTH = 100


class FittingTable(Table):
    """A table that breaks neither headings nor numbers: where they do not fit side by side, each row is a list."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = self._widths(console, options)
        for column, width in zip(self.columns, widths, strict=False):
            column.width = width
        yield from super().__rich_console__(console, options) if widths else self._lists()

    def _widths(self, console: Console, options: ConsoleOptions) -> list[int]:
        """Width of each column, the widest narrowed first; empty where headings or numbers would be broken."""
        for column in self.columns:
            column.width = None
        wide = options.update_width(_ENDLESS)
        needs = [[Measurement.get(console, wide, cell) for cell in (of.header, *of.cells)] for of in self.columns]
        widths = [max(need.maximum for need in column) for column in needs]
        least = [max(column[0].minimum, *(min(need.minimum, _NUMBER) for need in column)) for column in needs]
        least = [most if of.no_wrap else low for of, most, low in zip(self.columns, widths, least, strict=True)]
        room = options.max_width - (Measurement.get(console, wide, self).maximum - sum(widths))
        while sum(widths) > room:
            width, column_index = max((width if width > least[i] else 0, i) for i, width in enumerate(widths))
            if not width:
                return []
            widths[column_index] -= 1
        return widths

    def _lists(self) -> Iterator[Text]:
        for row in zip(*(column.cells for column in self.columns), strict=True):
            named = ((str(column.header), cell) for column, cell in zip(self.columns, row, strict=True))
            yield from (Text.assemble(f"{name}: " if name else "", cell) for name, cell in named if str(cell))
            yield Text()


def new_table(columns: Iterable[tuple[str, str]], rows: Iterable[Sequence[str | Text]] = ()) -> Table:
    """A table; each column has a heading and ``<`` or ``>`` for left or right."""
    table = FittingTable(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    for heading, side in columns:
        justify: JustifyMethod = "right" if side == ">" else "left"
        table.add_column(Text(heading), justify=justify, overflow="fold", no_wrap=heading in _UNCUT)
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def legend(text: str) -> Text:
    return Text(text, style="dim")


def titled(columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]], title: str, notes: str) -> Group:
    head, foot = [Text(title, style="bold")] if title else [], [legend(notes)] if notes else []
    return Group(*head, new_table(columns, rows), *foot)


def stacked(parts: Iterable[RenderableType]) -> Group:
    """Tables and lines of text, one below the other; brackets in the text are no markup."""
    return Group(*(Text(part) if isinstance(part, str) else part for part in parts))


def text_of(renderable: RenderableType) -> str:
    """The printed lines without colours, 100 columns wide."""
    console = Console(width=_WIDTH, force_terminal=False, force_jupyter=False, no_color=True)
    with console.capture() as captured:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())
