"""Kernels between the GEMMs of vLLM's models that take less time than its own, with the same numbers."""

from functools import partial
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.v1.attention.backend import AttentionType

from gac.runtime.contract import FEW_ROWS
from gac.runtime.kernels.elementwise.paged import rotate_in_place, write_to_pages
from gac.runtime.kernels.few_rows import runs_early
from gac.runtime.kernels.gpu import HAS_TRITON, SIXTEEN_BIT

_MANY_NUMBERS = 1 << 23
"""From so many on a GPU saves more than a launch by Triton takes the CPU."""


def use_kernels(model: nn.Module) -> None:
    """Let rotary embeddings and writes to the KV cache run in the kernels here, where they are vLLM's usual ones."""
    for module in model.modules():
        if isinstance(module, RotaryEmbedding):
            runs = getattr(module._forward_method, "__func__", None) is RotaryEmbedding.forward_cuda
            if runs and module.is_neox_style and module.rotary_dim == module.head_size:
                module._forward_method = partial(_rotated, module)
        elif isinstance(module, Attention):
            implementation: Any = module.impl
            if type(implementation).__name__ == "FlashAttentionImpl" and _is_plain(implementation):
                implementation.do_kv_cache_update = partial(_write, implementation)


def _is_plain(attention: Any) -> bool:
    return bool(attention.kv_cache_dtype == "auto" and attention.attn_type == AttentionType.DECODER)


def takes_many(x: Tensor) -> bool:
    """Return True if the kernels here are faster than vLLM's for this input."""
    return x.numel() >= _MANY_NUMBERS and x.is_cuda and HAS_TRITON and x.dtype in SIXTEEN_BIT


def _rotated(module: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    early = len(query) <= FEW_ROWS and runs_early(query)
    usual = key is not None and query.dim() == 2 and query.stride(1) == 1 and positions.dim() == 1
    if key is None or not usual or not (early or takes_many(query)):
        pair: tuple[Tensor, Tensor | None] = module.forward_cuda(positions, query, key)
        return pair
    angles = module._match_cos_sin_cache_dtype(query)
    rotate_in_place(positions, query, key, angles, module.head_size, early)
    return query, key


def _write(attention: Any, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
    early = len(slots) <= FEW_ROWS and runs_early(key)
    keys, values = kv_cache.transpose(1, 2).chunk(2, dim=-1)
    usual = keys.stride(3) == key.stride(2) == value.stride(2) == 1 and keys.dtype == key.dtype
    if usual and (early or takes_many(key)):
        write_to_pages(key, value, keys, values, slots, early)
    else:
        type(attention).do_kv_cache_update(attention, layer, key, value, kv_cache, slots)
