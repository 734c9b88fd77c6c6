"""A table as a reader of a file sees it."""

from rich.console import Console, RenderableType


def shown(table: RenderableType) -> list[str]:
    """The lines of a table in a file, without the space around them."""
    console = Console(width=100, markup=False, highlight=False, file=None)
    with console.capture() as capture:
        console.print(table)
    return [" ".join(line.split()) for line in capture.get().splitlines()]
