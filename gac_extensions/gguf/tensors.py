"""The tensors of a GGUF file: name, type and bytes.

A type is a block of 32 whole numbers and one scale in float16, as llama.cpp stores them: a weight is
``number * scale``, so numbers that fit are copied bit for bit.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
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
from gac.core.progress import progress_bar
from gac.plan.plan import Plan
from gac.runtime.storage.embeddings import embeddings_of
from gac.runtime.storage.modules import Stored
from gac.schemes import DEFAULT_SCHEME, scheme_named
from gac.schemes.matrices import Grid
from gac_extensions.gguf.header import Architecture, head_dim

BLOCK = 32
REQUANTISED = "Q8_0"
"""The type of quantised weights whose numbers no type of GGUF has: their values are quantised again, to 8 bits."""
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PLAIN = {dtype: kind for kind, dtype in _DTYPES.items()}
Bytes = NDArray[np.uint8]


def gguf_package() -> Any:
    """Import the package ``gguf``, which is no dependency of GAC; a CheckpointError if it is not installed."""
    try:
        return importlib.import_module("gguf")
    except ImportError as failure:
        remedy = "Run pip install gguf, or in GAC's checkout pip install '.[gguf]'."
        raise CheckpointError("gguf is not installed", "the package that writes GGUF files", remedy) from failure


@dataclass(frozen=True)
class BlockType:
    """A type of GGUF for numbers from ``least`` to ``most``."""

    least: int
    most: int
    pack: Callable[[NDArray[np.int16]], Bytes]  # numbers (blocks, 32) to the bytes behind the scale (blocks, bytes)

    def encoded(self, numbers: NDArray[np.int16], scale: NDArray[np.float16]) -> Bytes:
        """The bytes ``(rows, bytes)`` of numbers ``(rows, columns)`` and of scales ``(rows, columns / 32)``."""
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
class SourceTensor:
    """A tensor of the stock model."""

    name: str
    shape: tuple[int, ...]
    model_values: Callable[[], Tensor]  # makes the values in the model's dtype
    scheme: str = DEFAULT_SCHEME  # of the plan; ``bf16`` if it is not quantised
    stored: Stored | None = None  # the module that holds it quantised


@dataclass(frozen=True, eq=False)
class FileTensor:
    """A tensor of the stock model as the file has it."""

    name: str  # in llama.cpp
    source: SourceTensor
    reorder_rows: Callable[[Tensor], Tensor]
    kind: str  # the type in GGUF
    lossless: bool  # the type holds the whole numbers of the source
    why: str | None  # the source's dims need a larger type, or another quantisation

    @property
    def ggml_type(self) -> Any:
        return gguf_package().GGMLQuantizationType[self.kind]

    @property
    def nbytes(self) -> int:
        block, size = gguf_package().GGML_QUANT_SIZES[self.ggml_type]
        return int(prod(self.source.shape) // block * size)

    def values(self) -> Tensor:
        """Of a block type in float32, before any cast to the model's dtype; else the model's values."""
        if self.source.stored is None or self.kind not in BLOCK_TYPES:
            return self.reorder_rows(self.source.model_values())
        return self.reorder_rows(self.source.stored.values(torch.float32))

    def data(self) -> Bytes:
        """The bytes of each row, ``(rows, bytes)``, or of a vector."""
        if self.lossless:
            grid, columns = _grid_of(self.source.stored, self.source.scheme), self.source.shape[1]
            assert grid is not None, "a type of whole numbers for a source without"
            # one scale for each block of a group
            scale = grid.scale.half().repeat_interleave(max(grid.size // BLOCK, 1), dim=1)[:, : columns // BLOCK]
            numbers, scale = self.reorder_rows(grid.signed.to(torch.int16)), self.reorder_rows(scale)
            return BLOCK_TYPES[self.kind].encoded(_numpy(numbers), _numpy(scale))
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


def file_tensors(model: Any, stock: Any, plan: Plan, merge: bool, architecture: Architecture) -> list[FileTensor]:
    """Every tensor of the stock model (of ``gac.checkpoint.export.stock_model``), without a tied LM head.

    A CheckpointError names a tensor for which llama.cpp has no name.
    """
    same, changed = unchanged_state(model, plan), {choice.name: choice for choice in plan.weights if choice.changed}
    head = plan.measured.head.scheme if plan.measured.head else DEFAULT_SCHEME
    modules = {name: (head, module) for name, module in embeddings_of(model).items()}
    modules |= {name: (choice.scheme, model.get_submodule(name)) for name, choice in changed.items()}
    empty = stock.state_dict()

    def source(name: str) -> SourceTensor:
        owner, _, parameter = name.rpartition(".")
        shape = tuple(empty[name].shape)
        scheme, stored = modules.get(owner, (DEFAULT_SCHEME, None))
        if not isinstance(stored, Stored) or parameter != "weight" or stored.shape != shape:  # a bias, or merged
            scheme, stored = DEFAULT_SCHEME, None
        if owner in changed:
            values = partial(_changed_values, model, stock, changed[owner], merge, name)
        else:
            values = partial(same.__getitem__, name)
        return SourceTensor(name, shape, values, scheme, stored)

    return named_tensors([source(name) for name in empty], stock.config, model.dtype, architecture)


def named_tensors(
    sources: Sequence[SourceTensor], config: Any, dtype: torch.dtype, architecture: Architecture
) -> list[FileTensor]:
    """The tensors of a stock model with this config and dtype as a file has them; errors as of ``file_tensors``."""
    gguf = gguf_package()
    graph = next(graph for graph, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.name)
    names = gguf.get_tensor_name_map(graph, config.num_hidden_layers)
    tensors = []
    for source in progress_bar("choosing types", "tensor", len(sources), sources):
        if config.tie_word_embeddings and source.name == "lm_head.weight":
            continue
        file_name = names.get_name(source.name, try_suffixes=(".weight", ".bias"))
        if file_name is None:
            value = f"{source.name} of a {config.model_type} model"
            remedy = "Export the model without --gguf (gac.export)."
            raise CheckpointError(value, "tensors that llama.cpp has a name for", remedy)
        rotated = architecture.paired and (".q_proj." in source.name or ".k_proj." in source.name)
        reorder = partial(interleaved, head_dim(config)) if rotated else lambda rows: rows
        kind, lossless, why = _type_of(source.shape, dtype, source.stored, source.scheme)
        tensors.append(FileTensor(file_name, source, reorder, kind, lossless, why))
    return tensors


def _changed_values(model: Any, stock: Any, choice: Any, merge: bool, name: str) -> Tensor:
    return weight_state(model, stock, choice, merge)[name]


def _grid_of(stored: Stored | None, scheme: str) -> Grid | None:
    """Whole numbers and scales; None if the values have no such form."""
    grid = None if stored is None else scheme_named(scheme).grid(stored.tensors, *stored.matrix)
    return None if grid is None or grid.levels.floating else grid


def _type_of(
    shape: tuple[int, ...], dtype: torch.dtype, stored: Stored | None, scheme: str
) -> tuple[str, bool, str | None]:
    """The smallest type that holds a tensor without loss, else that of 8 bits; if it is lossless; and why it is not."""
    if len(shape) == 1:
        return "F32", False, None
    if stored is None:
        return _PLAIN[dtype], False, None
    columns = shape[1]
    if columns % BLOCK:
        return _PLAIN[dtype], False, f"{columns} columns, no multiple of {BLOCK}"
    grid = _grid_of(stored, scheme)
    if grid is None:
        return REQUANTISED, False, None
    if grid.size % BLOCK and grid.size < columns:
        return REQUANTISED, False, f"groups of {grid.size}, no multiple of {BLOCK}"
    least, most = (int(bound) for bound in grid.signed.aminmax())
    kind = next((name for name, kind in BLOCK_TYPES.items() if kind.least <= least and most <= kind.most), None)
    exact = torch.equal(grid.scale.half().float(), grid.scale.float())  # scales in bfloat16 may leave float16's range
    return (kind, True, None) if kind is not None and exact else (REQUANTISED, False, None)


def interleaved(size: int, values: Tensor) -> Tensor:
    """Rows ``(heads * size, ...)`` with the two that a rotary embedding rotates together side by side."""
    halves = values.reshape(-1, 2, size // 2, *values.shape[1:])
    return halves.transpose(1, 2).reshape(values.shape)


def _numpy(values: Tensor) -> NDArray[Any]:
    return values.detach().contiguous().cpu().numpy()
