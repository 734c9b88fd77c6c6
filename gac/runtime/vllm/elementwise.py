"""Kernels between the GEMMs of vLLM's models that take less time than its own, with the same numbers."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm import envs
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.v1.attention.backend import AttentionType

from gac.runtime.contract import FEW_ROWS
from gac.runtime.kernels.elementwise.engine import add_norm, gate, rotate_in_place, write_to_pages
from gac.runtime.kernels.few_rows import runs_early
from gac.runtime.kernels.gpu import HAS_TRITON, SIXTEEN_BIT

_MANY_KEYS, _MANY_QUERIES, _MANY_GATES = 1 << 23, 1 << 25, 1 << 27
"""Numbers from which a kernel saves the GPU more than its launch by Triton takes the CPU."""


def use_kernels(model: nn.Module) -> None:
    """Let vLLM's usual norms, rotary embeddings and writes to the KV cache run in the kernels here."""
    if envs.VLLM_BATCH_INVARIANT:
        return
    for module in model.modules():
        function = getattr(getattr(module, "_forward_method", None), "__func__", None)
        if isinstance(module, RMSNorm) and function is RMSNorm.forward_cuda:
            if module.has_weight and module.variance_size_override is None:
                module._forward_method = partial(_normed, module)
        elif isinstance(module, RotaryEmbedding) and function is RotaryEmbedding.forward_cuda:
            if module.is_neox_style and module.rotary_dim == module.head_size:
                module._forward_method = partial(_rotated, module)
        elif isinstance(module, Attention):
            implementation: Any = module.impl
            if type(implementation).__name__ == "FlashAttentionImpl" and _is_plain(implementation):
                implementation.do_kv_cache_update = partial(_write, implementation)


def _is_plain(attention: Any) -> bool:
    return bool(attention.kv_cache_dtype == "auto" and attention.attn_type == AttentionType.DECODER)


def silu_and_mul(x: Tensor, out: Tensor) -> None:
    """Write ``silu(gate) * up`` to ``out`` ``(tokens, n)``, of gate and up in x ``(tokens, 2 n)``."""
    early = len(x) <= FEW_ROWS and runs_early(x)
    if early or _are_many(x, _MANY_GATES):
        gate(x, out, early)
    else:
        torch.ops._C.silu_and_mul(out, x)


def _are_many(x: Tensor, least: int) -> bool:
    return x.numel() >= least and x.is_cuda and HAS_TRITON and x.dtype in SIXTEEN_BIT


def _normed(module: Any, x: Tensor, residual: Tensor | None = None) -> Any:
    if residual is None or x.dim() != 2 or module.weight.dtype != x.dtype:
        return module.forward_cuda(x, residual)
    if len(x) <= FEW_ROWS and runs_early(x) and x.is_contiguous() and residual.is_contiguous():
        add_norm(x, residual, module.weight, module.variance_epsilon, early=True)
    else:
        torch.ops._C.fused_add_rms_norm(x, residual, module.weight, module.variance_epsilon)
    return x, residual


def _rotated(module: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    early = len(query) <= FEW_ROWS and runs_early(query)
    if not (early or _are_many(query, _MANY_QUERIES)) or key is None or query.stride() != (query.stride(0), 1):
        pair: tuple[Tensor, Tensor | None] = module.forward_cuda(positions, query, key)
        return pair
    angles = module._match_cos_sin_cache_dtype(query)
    rotate_in_place(positions, query, key, angles, module.head_size, early)
    return query, key


def _write(attention: Any, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
    early = len(slots) <= FEW_ROWS and runs_early(key)
    if (early or _are_many(key, _MANY_KEYS)) and kv_cache.dim() == 4:
        keys, values = kv_cache.transpose(1, 2).chunk(2, dim=-1)
        write_to_pages(key, value, keys, values, slots, early)
    else:
        type(attention).do_kv_cache_update(attention, layer, key, value, kv_cache, slots)
