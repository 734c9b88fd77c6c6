"""Which dims a choice moves, as a rich table; nothing is printed here."""

from collections.abc import Sequence

from rich.console import Group

from gac.forms import form_named
from gac.reporting.dims_moved import Choice, Moved
from gac.reporting.layout import legend, new_table

_LEGEND = (
    "a GEMM is x[M, K] @ W[N, K].T; M, the number of tokens, moves with every token that is kept or batched\n"
    "d is a multiple of 8 where dims are aligned, and every dim what the profile shows to be sound"
)


def graph_table(choices: Sequence[Choice]) -> Group:
    """One row a choice: its site, form and dims, and every axis that it moves."""
    table = new_table([("site", "<"), ("layers", ">"), ("form", "<"), ("dim", "<"), ("moves", "<")])
    for one in choices:
        symbol = form_named(one.form).symbol
        moves = "\n".join(_told(moved, symbol) for moved in one.moved)
        table.add_row(one.kind, str(one.layers), one.form, f"{symbol} 1 to {one.largest:,}", moves)
    return Group(table, legend(_LEGEND))


def _told(moved: Moved, symbol: str) -> str:
    size = symbol if moved.per_dim == 1 else f"{moved.per_dim} {symbol}"
    if moved.axis is None:
        return f"KV cache: {size} values a token"
    fixed = ", ".join(f"{axis.upper()} = {length:,}" for axis, length in moved.fixed.items())
    if moved.operator == "sdpa":
        return f"attention: value vectors of {size}"
    return f"{moved.weight}: {moved.axis.upper()} = {size} ({fixed})"
