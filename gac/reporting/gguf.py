"""The table of a GGUF file."""

from rich.console import RenderableType

from gac.checkpoint.gguf.write import GgufFile
from gac.core.rich_tables import legend, new_table
from gac.core.words import megabytes


def gguf_tables(written: GgufFile) -> list[RenderableType]:
    """One row a scheme and type, and notes for readers of the file."""
    table = new_table([("scheme", "<"), ("type", "<"), ("tensors", ">"), ("bytes", ">"), ("moved", ">"), ("", "<")])
    for row in written.tensors:
        error = f"{row.moved:.1e}" if row.moved else "-"
        table.add_row(row.scheme, row.type, str(row.tensors), f"{row.bytes:,}", error, row.why or "")
    notes = ["moved: the largest change of a tensor, as a part of its norm; -: carried bit for bit"]
    sizes = f"{megabytes(written.planned_bytes)} in the plan, {megabytes(written.weights_bytes)} in the file"
    notes.append(f"planned weights: {sizes}")
    if written.inputs:
        notes.append(f"{', '.join(written.inputs)}: llama.cpp rounds inputs in its own way, and not as planned")
    return [
        f"saved as {written.path}, {megabytes(written.bytes)}, {written.architecture}",
        table,
        legend("\n".join(notes)),
    ]
