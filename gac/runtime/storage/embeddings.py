"""Embedding and head in a storage: rows are looked up in it, and a head is multiplied as its storage does it."""

from typing import Any

import torch
from torch import Tensor, nn

from gac.runtime.kernels.low_bit import MOST_ROWS
from gac.runtime.storage.base import Storage
from gac.runtime.storage.modules import Stored, StoredLinear

ROWS = 2**13
"""Rows of a head that are in the model's dtype at a time."""


class StoredEmbedding(Stored):
    """The rows of a matrix in a storage, in the model's dtype: ``(..., columns)`` for ids ``(...)``.

    Args:
        storage: what holds the matrix.
        plain: the ``nn.Embedding`` that it stands for, which may multiply what it has looked up by a number.
    """

    def __init__(self, storage: Storage, plain: Any) -> None:
        super().__init__(storage, plain)
        self.num_embeddings, self.embedding_dim = self.matrix
        self.padding_idx = plain.padding_idx
        self.factor = float(getattr(plain, _FACTOR, 1.0))
        self.dtype: torch.dtype = plain.weight.dtype

    def forward(self, ids: Tensor) -> Tensor:
        result = self.storage.rows(self.tensors, ids.flatten(), *self.matrix, self.dtype).view(*ids.shape, -1)
        if self.factor == 1:
            return result
        return result * torch.full((), self.factor, dtype=self.dtype, device=result.device)

    def _apply(self, fn: Any, recurse: bool = True) -> "StoredEmbedding":
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=next(self.buffers()).device)).dtype
        super()._apply(fn, recurse)
        return self

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.storage}"


class StoredHead(StoredLinear):
    """A head in a storage of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return _multiplied(x, self, slice(0, self.out_features), self.bias)


class TiedHead(nn.Module):
    """A head that multiplies with what an embedding holds; of its own it has a bias at most.

    Args:
        embedding: what holds the matrix.
        plain: the module that it stands for; its bias becomes this one's.

    Attributes:
        part: the rows that it multiplies with.
    """

    def __init__(self, embedding: StoredEmbedding, plain: Any) -> None:
        super().__init__()
        self._link = (embedding,)  # no submodule: the tensors are the embedding's
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.part = slice(0, plain.out_features)
        self.bias: nn.Parameter | None = plain.bias
        self.train(plain.training)

    def forward(self, x: Tensor) -> Tensor:
        (embedding,) = self._link
        return _multiplied(x, embedding, self.part, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, tied"


def _multiplied(x: Tensor, matrix: Stored, part: slice, bias: Tensor | None) -> Tensor:
    """``x @ matrix[part].T + bias``: of few inputs in one kernel, where the storage has one.

    Else some rows at a time, for all of a head in the model's dtype would take much memory.

    Args:
        bias: of these rows.
    """
    storage, columns = matrix.storage, matrix.matrix[1]
    stored = {name: item.to(x.device) for name, item in matrix.counted.items()}
    full = part.stop - part.start
    in_one = x.numel() <= MOST_ROWS * columns and storage.unsupported_reason(x.device, x.dtype, full, columns) is None
    step, result = full if in_one else ROWS, []
    for start in range(part.start, part.stop, step):
        some = slice(start, min(start + step, part.stop))
        local = None if bias is None else bias[some.start - part.start : some.stop - part.start]
        result.append(storage.multiply(x, storage.slice_rows(stored, some), some.stop - some.start, columns, local))
    return torch.cat(result, dim=-1) if len(result) > 1 else result[0]


_FACTOR = "scalar_embed_scale"
"""The name of the factor of Gemma's embeddings."""


def embeddings_of(model: Any) -> dict[str, Any]:
    """Embedding and head by their names in the model; a model without a head has the embedding alone."""
    ends = [end for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None]
    names = {id(module): name for name, module in model.named_modules()}
    return {names[id(end)]: end for end in ends}


def unusual(module: Any) -> str | None:
    """Return what keeps an embedding or a head from being stored; None where nothing does."""
    if type(module) is nn.Linear:
        return None
    if isinstance(module, nn.Embedding) and (type(module) is nn.Embedding or hasattr(module, _FACTOR)):
        return None if module.max_norm is None else "an Embedding with max_norm"
    return f"a {type(module).__name__}"


def replace_embeddings(model: Any, storage: Storage, tied: bool) -> dict[str, nn.Module]:
    """Return quantised modules for embedding and head, by their names in the model; they hold zeros as yet.

    Args:
        tied: whether the head multiplies with the embedding.

    Raises:
        ValueError: one of them is no plain embedding or linear weight.
    """
    ends = embeddings_of(model)
    for name, plain in ends.items():
        if said := unusual(plain):
            raise ValueError(f"{name} is {said}; expected a plain embedding and a linear head.")
    result: dict[str, nn.Module] = {}
    embedding = None
    for name, plain in ends.items():
        if embedding is None:
            result[name] = embedding = StoredEmbedding(storage, plain)
        else:
            result[name] = TiedHead(embedding, plain) if tied else StoredHead(storage, plain)
    return result
