"""Rich tables as HTML: every word is escaped, colours are left to the page."""

from collections.abc import Iterator
from html import escape
from itertools import repeat

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

_TALLEST = "30em"


def html_of(renderable: RenderableType) -> str:
    """A table, words, or a group of them; tables scroll where they are tall or wide."""
    return "\n".join(_parts(renderable))


def _parts(renderable: RenderableType) -> Iterator[str]:
    if isinstance(renderable, Group):
        for one in renderable.renderables:
            yield from _parts(one)
    elif isinstance(renderable, Table):
        yield f'<div style="max-height: {_TALLEST}; overflow: auto">{_table(renderable)}</div>'
    else:
        yield f'<pre style="white-space: pre-wrap">{_escaped(renderable)}</pre>'


def _table(table: Table) -> str:
    sides = [column.justify if column.justify in ("left", "right") else "left" for column in table.columns]
    heads = "".join(_cell("th", side, column.header) for side, column in zip(sides, table.columns, strict=True))
    rows = zip(*(column.cells for column in table.columns), strict=True)
    body = "".join(f"<tr>{''.join(map(_cell, repeat('td'), sides, row))}</tr>" for row in rows)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"


def _cell(tag: str, side: str, cell: RenderableType) -> str:
    scope = ' scope="col"' if tag == "th" else ""
    return f'<{tag}{scope} style="text-align: {side}">{_escaped(cell)}</{tag}>'


def _escaped(cell: RenderableType) -> str:
    return escape(cell.plain if isinstance(cell, Text) else str(cell)).replace("\n", "<br>")
