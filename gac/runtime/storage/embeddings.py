"""Embedding and head in a storage: rows are looked up in it, and a head is multiplied as its storage does it."""

from typing import Any

import torch
from torch import Tensor, nn

from gac.runtime.kernels.low_bit.tiles import MOST_ROWS
from gac.runtime.plain import modeling_gac
from gac.runtime.plain.modeling_gac import HEAD_ROWS
from gac.runtime.storage.base import Storage, Tensors
from gac.runtime.storage.modules import Stored, StoredLinear


class StoredEmbedding(modeling_gac.StoredEmbedding, Stored):
    """The rows of a matrix in a storage, in the model's dtype: ``(..., columns)`` for ids ``(...)``."""

    def __init__(self, storage: Storage, dense: Any) -> None:
        super().__init__(storage, dense)
        self.num_embeddings, self.embedding_dim = self.matrix
        self.padding_idx = dense.padding_idx
        self.train(dense.training)

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.storage.rows(self.tensors, ids.flatten(), *self.matrix, self.dtype).view(*ids.shape, -1)
        return rows if self.factor == 1 else rows * torch.full((), self.factor, dtype=rows.dtype, device=rows.device)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.storage}"


class StoredHead(StoredLinear):
    """A head in a storage of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return multiply_rows(x, self.storage, self.counted, slice(0, self.out_features), self.in_features, self.bias)


class TiedHead(nn.Module):
    """A head that multiplies with what an embedding holds, or a ``part`` of its rows; it has a bias at most."""

    def __init__(self, embedding: StoredEmbedding, plain: Any) -> None:
        super().__init__()
        self._link = (embedding,)  # no submodule: the tensors are the embedding's
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.part = slice(0, plain.out_features)
        self.bias: nn.Parameter | None = plain.bias
        self.train(plain.training)

    def forward(self, x: Tensor) -> Tensor:
        (embedding,) = self._link
        return multiply_rows(x, embedding.storage, embedding.counted, self.part, self.in_features, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, tied"


def multiply_rows(
    x: Tensor, storage: Storage, tensors: Tensors, part: slice, columns: int, bias: Tensor | None
) -> Tensor:
    """``x @ matrix[part].T + bias``, ``HEAD_ROWS`` rows at a time, since a head in the model's dtype takes much memory.

    Of few inputs it is one product, where the storage has a kernel.
    """
    rows, tensors = part.stop - part.start, {name: item.to(x.device) for name, item in tensors.items()}
    single = x.numel() <= MOST_ROWS * columns and storage.unsupported_reason(x.device, x.dtype, rows, columns) is None
    step, parts = rows if single else HEAD_ROWS, []
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        some = storage.slice_rows(tensors, slice(part.start + start, part.start + stop))
        local_bias = None if bias is None else bias[start:stop]
        parts.append(storage.multiply(x, some, stop - start, columns, local_bias))
    return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]


def embeddings_of(model: Any) -> dict[str, Any]:
    """Embedding and head by their names in the model; a model without a head has the embedding alone."""
    names = {module: name for name, module in model.named_modules()}
    modules = (model.get_input_embeddings(), model.get_output_embeddings())
    return {names[module]: module for module in modules if module is not None}


def unusual(module: Any) -> str | None:
    """Return what keeps an embedding or a head from being stored; None where nothing does."""
    if type(module) is nn.Linear:
        return None
    if isinstance(module, nn.Embedding) and (type(module) is nn.Embedding or hasattr(module, "scalar_embed_scale")):
        return None if module.max_norm is None else "an Embedding with max_norm"
    return f"a {type(module).__name__}"


def replace_embeddings(model: Any, storage: Storage, tied: bool) -> dict[str, nn.Module]:
    """Return quantised modules for embedding and head, by their names in the model; they hold zeros as yet.

    ``tied``: the head multiplies with the embedding. A ValueError says if one of them is no plain embedding or weight.
    """
    dense = embeddings_of(model)
    for name, module in dense.items():
        if reason := unusual(module):
            raise ValueError(f"{name} is {reason}; expected a plain embedding and a linear head.")
    (name, module), *heads = dense.items()
    embedding = StoredEmbedding(storage, module)
    result: dict[str, nn.Module] = {name: embedding}
    for name, head in heads:
        result[name] = TiedHead(embedding, head) if tied else StoredHead(storage, head)
    return result
