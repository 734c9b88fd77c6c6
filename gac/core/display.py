"""Results that show themselves: a table in a terminal, HTML in a notebook, a pandas DataFrame. rich is loaded late."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from gac.core.errors import GacError

if TYPE_CHECKING:
    from pandas import DataFrame
    from rich.console import RenderableType

Row = dict[str, Any]
_TALLEST = "30em"


def fields(record: object, *names: str) -> Row:
    return {name: getattr(record, name) for name in names}


@dataclass(frozen=True)
class Table:
    """Cells of text under headings."""

    columns: Sequence[tuple[str, str]]  # a heading each, and ``<`` or ``>`` for left or right
    rows: Sequence[Sequence[str]]
    title: str = ""  # the line above it
    notes: str = ""  # lines below it that explain the columns

    def __rich__(self) -> "RenderableType":
        from gac.core.rich_tables import titled

        return titled(self.columns, self.rows, self.title, self.notes)

    def html(self) -> str:
        """HTML with every word escaped; the page decides the colours, and a large table scrolls."""
        sides = [{"<": "left", ">": "right"}[side] for _, side in self.columns]
        head = _cells('th scope="col"', sides, [heading for heading, _ in self.columns])
        body = "".join(f"<tr>{_cells('td', sides, row)}</tr>" for row in self.rows)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        scrolled = f'<div style="max-height: {_TALLEST}; overflow: auto">{table}</div>'
        parts = (_paragraph(self.title), scrolled, _paragraph(self.notes))
        return "\n".join(part for part in parts if part)


class Shown(ABC):
    """A result that shows itself; a subclass is a dataclass with ``repr=False``."""

    @abstractmethod
    def tables(self) -> Sequence[Table | str]:
        """The tables for a reader, and lines of text between them."""

    @abstractmethod
    def rows(self) -> Sequence[Row]:
        """The rows of the DataFrame, values by column name."""

    def __rich__(self) -> "RenderableType":
        from gac.core.rich_tables import stacked

        return stacked(self.tables())

    def __repr__(self) -> str:
        """The tables as text, at most 100 columns wide."""
        from gac.core.rich_tables import stacked, text_of

        return text_of(stacked(self.tables()))

    def _repr_html_(self) -> str:
        parts = (part.html() if isinstance(part, Table) else _paragraph(part) for part in self.tables())
        return "\n".join(parts)

    def to_dataframe(self) -> "DataFrame":
        """The result as a pandas DataFrame.

        A plan has one row a weight; what is known of a site alone (``site_loss``, ``site_latency_ns WORKLOAD``) stands
        in each row of its weights. A plan of tokens has one row a layer, a profile one a measurement, a frontier one a
        point, cliffs one a collapsed dim or sweet spot, a perplexity is one row.
        """
        try:
            from pandas import DataFrame
        except ImportError as failure:
            raise GacError("pandas is not installed", "it, for a DataFrame", "Run pip install pandas.") from failure
        return DataFrame(self.rows())


def _paragraph(text: str) -> str:
    return f'<pre style="white-space: pre-wrap">{_escaped(text)}</pre>' if text else ""


def _cells(tag: str, sides: Sequence[str], cells: Sequence[str]) -> str:
    pairs = zip(sides, cells, strict=True)
    return "".join(f'<{tag} style="text-align: {side}">{_escaped(cell)}</{tag[:2]}>' for side, cell in pairs)


def _escaped(text: str) -> str:
    return escape(text).replace("\n", "<br>")
