"""What a GGUF file holds of each tensor: its name, its type and its bytes."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from gac.checkpoint.gguf.blocks import BLOCK, BLOCK_TYPES, Bytes, smallest_type
from gac.checkpoint.gguf.package import gguf_package
from gac.checkpoint.gguf.sources import Source
from gac.schemes.matrices import Scaled

ROUNDED = "Q8_0"
"""What rounded weights become whose numbers no type of GGUF has: their values are rounded once more, to 8 bits."""
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PLAIN = {dtype: kind for kind, dtype in _DTYPES.items()}
Rows = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Content:
    """A tensor of the file.

    Attributes:
        name: as llama.cpp has it.
        source: where its numbers come from.
        rows: puts its rows in llama.cpp's order.
        kind: its type in GGUF.
        whole: whether the type holds the whole numbers of the source as they are.
        why: the source's dims need a larger type, or a rounding; None where they do not.
    """

    name: str
    source: Source
    rows: Rows
    kind: str
    whole: bool = False
    why: str | None = None

    @property
    def nbytes(self) -> int:
        """That it takes."""
        block, size = gguf_package().GGML_QUANT_SIZES[self.ggml_type]
        return int(prod(self.source.shape) // block * size)

    @property
    def ggml_type(self) -> Any:
        """The package's name of the type."""
        return gguf_package().GGMLQuantizationType[self.kind]

    def values(self) -> Tensor:
        """What it is to stand for."""
        return self.rows(self.source.exact() if self.kind in BLOCK_TYPES else self.source.values())

    def data(self) -> Bytes:
        """The bytes of each row, ``(rows, bytes)``, or those of a vector."""
        if self.whole:
            return _encoded(self.kind, self.source.scaled(), self.rows, self.source.shape[1])
        if self.kind not in BLOCK_TYPES:  # the dtype's own bytes, or those of the wider float32
            return _numpy(self.values().to(_DTYPES[self.kind]).contiguous().view(torch.uint8))
        data: Bytes = gguf_package().quants.quantize(_numpy(self.values().float()), self.ggml_type)
        return data

    def moved(self, data: Bytes) -> float:
        """How far the bytes, read as others read them, are from the values: the norm of the difference over theirs."""
        if self.kind not in BLOCK_TYPES:
            return 0.0
        values = self.values()
        read = torch.from_numpy(gguf_package().quants.dequantize(data, self.ggml_type))
        return 0.0 if torch.equal(read, values) else float((read - values).norm() / values.norm())


def content(source: Source, name: str, rows: Rows) -> Content:
    """A tensor in the smallest type that carries it as it is; where none does, rounded to 8 bits.

    Args:
        name: as llama.cpp has it.
        rows: puts rows in llama.cpp's order.
    """
    made = partial(Content, name, source, rows)
    if len(source.shape) == 1:
        return made("F32")
    if source.stored is None:
        return made(_PLAIN[source.dtype])
    columns = source.shape[1]
    if columns % BLOCK:
        return made(_PLAIN[source.dtype], why=f"{columns} columns, no multiple of {BLOCK}")
    found = source.scaled()
    if found is None:
        return made(ROUNDED)
    if found.size % BLOCK and found.size < columns:
        return made(ROUNDED, why=f"groups of {found.size}, no multiple of {BLOCK}")
    kind = smallest_type(int(found.numbers.min()), int(found.numbers.max()))
    return made(ROUNDED) if kind is None else made(kind, whole=True)


def _encoded(kind: str, found: Scaled | None, rows: Rows, columns: int) -> Bytes:
    """Numbers and scales as they are, each scale for all blocks of its group."""
    assert found is not None, "a type of whole numbers for a source without"
    scale = found.scale.repeat_interleave(max(found.size // BLOCK, 1), dim=1)[:, : columns // BLOCK]
    return BLOCK_TYPES[kind].encoded(_numpy(rows(found.numbers)), _numpy(rows(scale)))


def as_they_are(values: Tensor) -> Tensor:
    """Rows in the stock model's order."""
    return values


def in_pairs(size: int, values: Tensor) -> Tensor:
    """Rows so that those which a rotary embedding turns together stand side by side.

    Args:
        size: rows of a head, of which the first half is turned with the second.
        values: shape ``(heads * size, ...)``.
    """
    halves = values.reshape(-1, 2, size // 2, *values.shape[1:])
    return halves.transpose(1, 2).reshape(values.shape)


def _numpy(values: Tensor) -> NDArray[Any]:
    return values.detach().contiguous().cpu().numpy()
