"""The tensors of a GGUF file: name, type and bytes.

A type is a block of 32 whole numbers and one scale in float16, as llama.cpp stores them: a weight is
``number * scale``, so numbers that fit are copied bit for bit.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gac.checkpoint.export import unchanged_state, weight_state
from gac.core.errors import CheckpointError
from gac.plan.plan import Plan
from gac.runtime.storage.embeddings import embeddings_of
from gac.runtime.storage.modules import Stored
from gac.schemes import DEFAULT_SCHEME, scheme_named
from gac.schemes.matrices import Grid

BLOCK = 32
REQUANTISED = "Q8_0"
"""The type of quantised weights whose numbers no type of GGUF has: their values are quantised again, to 8 bits."""
_HEAD = "lm_head.weight"
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PLAIN = {dtype: kind for kind, dtype in _DTYPES.items()}
Bytes = NDArray[np.uint8]
Rows = Callable[[Tensor], Tensor]


def gguf_package() -> Any:
    """Import the package ``gguf``, which is no dependency of GAC.

    Raises:
        CheckpointError: it is not installed.
    """
    try:
        return importlib.import_module("gguf")
    except ImportError as failure:
        remedy = "Run pip install gguf, or in GAC's checkout pip install '.[gguf]'."
        raise CheckpointError("gguf is not installed", "the package that writes GGUF files", remedy) from failure


@dataclass(frozen=True)
class BlockType:
    """A type of GGUF for numbers from ``least`` to ``most``.

    Attributes:
        pack: from numbers, int16 ``(blocks, 32)``, to the bytes behind the scale, ``(blocks, bytes)``.
    """

    least: int
    most: int
    pack: Callable[[NDArray[np.int16]], Bytes]

    def encoded(self, numbers: NDArray[np.int16], scale: NDArray[np.float16]) -> Bytes:
        """The bytes of each row, ``(rows, bytes)``.

        Args:
            numbers: shape ``(rows, columns)``, columns a multiple of 32, all from ``least`` to ``most``.
            scale: of each block, shape ``(rows, columns / 32)``.
        """
        scales = scale.astype("<f2").reshape(-1, 1).view(np.uint8)
        blocks = np.concatenate([scales, self.pack(numbers.reshape(-1, BLOCK))], axis=1)
        return blocks.reshape(len(numbers), -1)


def _nibbles(numbers: NDArray[np.int16]) -> Bytes:
    first, second = np.hsplit(numbers, 2)  # the first 16 are the low halves of the bytes
    return (first | second << 4).astype(np.uint8)


def _five_bits(numbers: NDArray[np.int16]) -> Bytes:
    shifted = numbers + 16  # first 4 bytes of fifth bits, then the other four
    fifth = np.packbits((shifted >> 4).astype(np.uint8), axis=1, bitorder="little")
    return np.concatenate([fifth, _nibbles(shifted & 15)], axis=1)


BLOCK_TYPES: Mapping[str, BlockType] = MappingProxyType(
    {
        "Q4_0": BlockType(-8, 7, lambda numbers: _nibbles(numbers + 8)),
        "Q5_0": BlockType(-16, 15, _five_bits),
        "Q8_0": BlockType(-128, 127, lambda numbers: numbers.astype(np.int8).view(np.uint8)),
    }
)
"""By GGUF's name, the smallest first."""


@dataclass(frozen=True, eq=False)
class Source:
    """A tensor of the stock model.

    Attributes:
        scheme: of the plan; ``bf16`` if it is not quantised.
        plain: the values in the model's dtype, or a function that makes them.
        stored: the module that holds them quantised; None if they are not.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    scheme: str
    plain: Tensor | partial[Tensor]
    stored: Stored | None = None

    def values(self) -> Tensor:
        """In the model's dtype."""
        return self.plain if isinstance(self.plain, Tensor) else self.plain()

    def exact(self) -> Tensor:
        """Quantised values in float32, before any cast to the model's dtype; else the values."""
        return self.values() if self.stored is None else self.stored.values(torch.float32)

    def grid(self) -> Grid | None:
        """Whole numbers and scales; None if the values have no such form."""
        if self.stored is None:
            return None
        grid = scheme_named(self.scheme).grid(self.stored.tensors, *self.stored.matrix)
        return None if grid is None or grid.levels.floating else grid


def sources(model: Any, stock: Any, plan: Plan, merge: bool) -> Iterator[Source]:
    """Every tensor of the stock model, in its order, without a tied LM head.

    Args:
        stock: from ``gac.checkpoint.export.stock_model``.
        merge: as for ``gac.export``; merged weights are not quantised any more.
    """
    same, changed = unchanged_state(model, plan), {choice.name: choice for choice in plan.weights if choice.changed}
    head = plan.measured.head.scheme if plan.measured.head else DEFAULT_SCHEME
    quantised = {name: (head, module) for name, module in embeddings_of(model).items() if isinstance(module, Stored)}
    for choice in changed.values():
        if isinstance(module := model.get_submodule(choice.name), Stored):
            quantised[choice.name] = choice.scheme, module
    for name, empty in stock.state_dict().items():
        if name == _HEAD and stock.config.tie_word_embeddings:
            continue
        owner, _, kind = name.rpartition(".")
        shape = tuple(empty.shape)
        scheme, stored = quantised.get(owner, (DEFAULT_SCHEME, None))
        if stored is None or kind != "weight" or stored.shape != shape:  # a bias, or merged
            scheme, stored = DEFAULT_SCHEME, None
        plain = same[name] if owner not in changed else partial(_part, model, stock, changed[owner], merge, name)
        yield Source(name, shape, model.dtype, scheme, plain, stored)


def _part(model: Any, stock: Any, choice: Any, merge: bool, name: str) -> Tensor:
    return weight_state(model, stock, choice, merge)[name]


@dataclass(frozen=True, eq=False)
class Content:
    """A tensor of the file.

    Attributes:
        name: in llama.cpp.
        rows: reorders rows for llama.cpp.
        kind: its type in GGUF.
        lossless: the type holds the whole numbers of the source.
        why: the source's dims need a larger type, or another quantisation; None if not.
    """

    name: str
    source: Source
    rows: Rows
    kind: str
    lossless: bool = False
    why: str | None = None

    @property
    def ggml_type(self) -> Any:
        return gguf_package().GGMLQuantizationType[self.kind]

    @property
    def nbytes(self) -> int:
        block, size = gguf_package().GGML_QUANT_SIZES[self.ggml_type]
        return int(prod(self.source.shape) // block * size)

    def values(self) -> Tensor:
        """The values to write."""
        return self.rows(self.source.exact() if self.kind in BLOCK_TYPES else self.source.values())

    def data(self) -> Bytes:
        """The bytes of each row, ``(rows, bytes)``, or of a vector."""
        if self.lossless:
            grid, columns = self.source.grid(), self.source.shape[1]
            assert grid is not None, "a type of whole numbers for a source without"
            # one scale for each block of a group
            scale = grid.scale.half().repeat_interleave(max(grid.size // BLOCK, 1), dim=1)[:, : columns // BLOCK]
            numbers = grid.signed.to(torch.int16)
            return BLOCK_TYPES[self.kind].encoded(_numpy(self.rows(numbers)), _numpy(self.rows(scale)))
        if self.kind not in BLOCK_TYPES:  # the dtype's own bytes, or those of the wider float32
            return _numpy(self.values().to(_DTYPES[self.kind]).contiguous().view(torch.uint8))
        data: Bytes = gguf_package().quants.quantize(_numpy(self.values().float()), self.ggml_type)
        return data

    def error(self, data: Bytes) -> float:
        """Relative error of the bytes, as others read them: the norm of the difference over that of the values."""
        if self.kind not in BLOCK_TYPES:
            return 0.0
        values = self.values()
        read = torch.from_numpy(gguf_package().quants.dequantize(data, self.ggml_type))
        return 0.0 if torch.equal(read, values) else float((read - values).norm() / values.norm())


def content(source: Source, name: str, rows: Rows) -> Content:
    """A tensor in the smallest type that holds it without loss; else in 8 bits.

    Args:
        name: in llama.cpp.
        rows: reorders rows for llama.cpp.
    """
    build = partial(Content, name, source, rows)
    if len(source.shape) == 1:
        return build("F32")
    if source.stored is None:
        return build(_PLAIN[source.dtype])
    columns = source.shape[1]
    if columns % BLOCK:
        return build(_PLAIN[source.dtype], why=f"{columns} columns, no multiple of {BLOCK}")
    grid = source.grid()
    if grid is None:
        return build(REQUANTISED)
    if grid.size % BLOCK and grid.size < columns:
        return build(REQUANTISED, why=f"groups of {grid.size}, no multiple of {BLOCK}")
    least, most = (int(bound) for bound in grid.signed.aminmax())
    kind = next((name for name, kind in BLOCK_TYPES.items() if kind.least <= least and most <= kind.most), None)
    return build(REQUANTISED) if kind is None else build(kind, lossless=True)


def interleaved(size: int, values: Tensor) -> Tensor:
    """Rows with the two that a rotary embedding rotates together side by side.

    Args:
        size: rows of a head, of which the first half is rotated with the second.
        values: shape ``(heads * size, ...)``.
    """
    halves = values.reshape(-1, 2, size // 2, *values.shape[1:])
    return halves.transpose(1, 2).reshape(values.shape)


def _numpy(values: Tensor) -> NDArray[Any]:
    return values.detach().contiguous().cpu().numpy()
