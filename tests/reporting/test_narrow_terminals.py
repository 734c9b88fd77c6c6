"""Tables at 40 columns: headings and numbers stay whole, whatever the table."""

import pytest
from rich.console import Console
from rich.table import Table

from gac.core.rich_tables import new_table

HEADINGS = ("layer", "kept", "perplexity", "parameters", "prefill:1x1024", "collapsed dims")
NUMBERS = ("0", "0.8000", "1,234.5678", "134,515,008", "30.4 µs", "1017")


def _lines(columns: int, width: int, name: str = "a") -> list[str]:
    headings = [("plan", "<"), *((heading, ">") for heading in HEADINGS[:columns])]
    return _printed(new_table(headings, [(name, *NUMBERS[:columns])] * 2), width)


def _printed(table: Table, width: int) -> list[str]:
    console = Console(width=width, markup=False, highlight=False)
    with console.capture() as capture:
        console.print(table)
    return [line.rstrip() for line in capture.get().splitlines()]


@pytest.mark.parametrize(("columns", "width"), [(0, 20), (2, 20), (6, 20), (3, 40), (6, 40), (6, 60), (6, 100)])
def test_headings_and_numbers_are_whole_and_within_the_width(columns: int, width: int) -> None:
    lines = _lines(columns, width, name="model.layers.0.self_attn.q_proj")
    words = {word.rstrip(":") for line in lines for word in line.split()}
    wanted = {word for text in (*HEADINGS[:columns], *NUMBERS[:columns]) for word in text.split()}
    assert wanted <= words
    assert max(map(len, lines)) <= width


def test_a_row_becomes_a_list_where_its_columns_do_not_fit() -> None:
    assert _lines(3, 20) == ["plan: a", "layer: 0", "kept: 0.8000", "perplexity:", "1,234.5678", ""] * 2


def test_the_widest_column_gives_way_first() -> None:
    head, _, first, *_ = _lines(3, 50, name="model.layers.0.self_attn.q_proj")
    assert head.split() == ["plan", "layer", "kept", "perplexity"]
    assert first.split()[1:] == ["0", "0.8000", "1,234.5678"]


def test_the_same_table_fits_again_where_there_is_room() -> None:
    table = new_table([("plan", "<"), ("perplexity", ">")], [("a" * 30, "271.36")])
    heights = [len(_printed(table, width)) for width in (20, 30, 60)]
    assert heights[0] > heights[1] > heights[2] == 3
