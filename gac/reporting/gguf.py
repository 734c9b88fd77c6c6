"""What a GGUF file holds, as a rich table."""

from typing import TYPE_CHECKING

from rich.console import RenderableType

from gac.core.rich_tables import legend, new_table
from gac.core.words import megabytes

if TYPE_CHECKING:
    from gac.checkpoint.gguf.record import GgufFile


def gguf_tables(found: "GgufFile") -> list[RenderableType]:
    """What was written, by scheme and type, and what a reader of the file has to know."""
    table = new_table([("scheme", "<"), ("type", "<"), ("tensors", ">"), ("bytes", ">"), ("moved", ">"), ("", "<")])
    for one in found.tensors:
        moved = f"{one.moved:.1e}" if one.moved else "-"
        table.add_row(one.scheme, one.type, str(one.tensors), f"{one.bytes:,}", moved, one.why or "")
    told = ["moved: the largest change of a tensor, as a part of its norm; -: carried bit for bit"]
    told.append(
        f"planned weights: {megabytes(found.planned_bytes)} in the plan, {megabytes(found.weights_bytes)} in the file"
    )
    if found.inputs:
        told.append(f"{', '.join(found.inputs)}: llama.cpp rounds inputs in its own way, and not as planned")
    return [f"saved as {found.path}, {megabytes(found.bytes)}, {found.architecture}", table, legend("\n".join(told))]
