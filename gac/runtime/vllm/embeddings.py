"""Embedding and LM head of vLLM in a storage: rows are looked up in it, and it multiplies a head."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from gac.runtime.header import HEAD, Head, storage_of
from gac.runtime.storage.base import Storage
from gac.runtime.storage.embeddings import multiply_rows
from gac.runtime.vllm.operator import number_of, stored_rows
from gac.runtime.vllm.stored import Gemm, add_name, aligned, all_read


class StoredEmbeddingMethod(QuantizeMethodBase):  # type: ignore[misc]
    """Looks up and multiplies by the rows of an embedding or a head in a storage."""

    def __init__(self, storage: Storage, dtype: torch.dtype) -> None:
        self._storage, self._dtype = storage, dtype
        self._read: dict[str, Tensor] = {}

    def create_weights(self, layer: Any, *sizes: Any, **options: Any) -> None:
        """Make the parameters of this process, which has a part of the vocabulary."""
        layer.number = number_of(layer)
        self._gemm = Gemm(layer, "gemm", self._storage, [layer.num_embeddings_per_partition], layer.embedding_dim)
        for name in self._storage.tensors(1, 1):
            add_name(layer, name, partial(self._load, layer, name))

    def _load(self, layer: Any, tensor: str, shard: Any, loaded: Tensor) -> None:
        self._read[tensor] = loaded
        if (tensors := all_read(self._storage, self._read)) is None:
            return
        indices, self._read = layer.shard_indices, {}
        rows = slice(indices.org_vocab_start_index, indices.org_vocab_end_index)
        sliced = self._storage.slice_rows(tensors, aligned(layer, self._storage, rows))
        self._gemm.fill(layer, slice(0, rows.stop - rows.start), sliced)

    def process_weights_after_loading(self, layer: Any) -> None:
        self._gemm.check(layer, self._dtype)

    def embedding(self, layer: Any, ids: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return stored_rows(ids, layer.number, layer.embedding_dim, self._dtype)
        return self.rows(layer, ids)

    def rows(self, layer: Any, ids: Tensor) -> Tensor:
        sizes = self._gemm.rows, layer.embedding_dim
        values = self._storage.rows(self._gemm.tensors(layer), ids.flatten(), *sizes, self._dtype)
        return values.view(*ids.shape, -1)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        tensors, rows = self._gemm.tensors(layer), slice(0, self._gemm.rows)
        return multiply_rows(x, self._storage, tensors, rows, layer.embedding_dim, bias)


def store_embeddings(model: nn.Module, head: Head, dtype: torch.dtype) -> None:
    """Put embedding and head in the storage that a checkpoint has them in; a tied head is the embedding itself."""
    modules = {name: module for name, module in model.named_modules() if isinstance(module, VocabParallelEmbedding)}
    embedding = next(module for module in modules.values() if not isinstance(module, ParallelLMHead))
    storage = storage_of(HEAD, head)
    if storage is None:
        raise ValueError(f"config.json, key gac: {HEAD} has no storage; expected one.")
    for name, module in modules.items():
        if head.tied and module is not embedding:
            model.set_submodule(name, embedding)
            continue
        del module.weight
        module.quant_method = StoredEmbeddingMethod(storage, dtype)
        module.quant_method.create_weights(module)
