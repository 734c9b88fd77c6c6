"""The tensors of a GGUF file as a table."""

from typing import TYPE_CHECKING

from gac.core.display import Table
from gac.core.words import megabytes
from gac_extensions.gguf.write import GgufFile

if TYPE_CHECKING:
    from rich.console import RenderableType


def gguf_tables(written: GgufFile) -> list["RenderableType"]:
    columns = [("scheme", "<"), ("type", "<"), ("tensors", ">"), ("bytes", ">"), ("moved", ">"), ("", "<")]
    rows = [
        (
            row.scheme,
            row.type,
            str(row.tensors),
            f"{row.bytes:,}",
            f"{row.moved:.1e}" if row.moved else "-",
            row.why or "",
        )
        for row in written.tensors
    ]
    sizes = f"{megabytes(written.planned_bytes)} in the plan, {megabytes(written.weights_bytes)} in the file"
    notes = "moved: the largest change of a tensor, as a part of its norm; -: carried bit for bit"
    notes += f"\nplanned weights: {sizes}"
    if written.inputs:
        notes += f"\n{', '.join(written.inputs)}: llama.cpp rounds inputs in its own way, and not as planned"
    saved = f"saved as {written.path}, {megabytes(written.bytes)}, {written.architecture}"
    return [saved, Table(columns, rows, notes=notes)]
