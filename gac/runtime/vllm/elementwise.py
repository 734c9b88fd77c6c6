"""Kernels between the GEMMs of vLLM's models that take less time than its own, with the same numbers."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm import envs
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.backend import AttentionType

from gac.runtime.contract import FEW_ROWS
from gac.runtime.kernels.elementwise.engine import add_norm, apply_rotary, gate, write_to_pages
from gac.runtime.kernels.elementwise.rows import AddNorm
from gac.runtime.kernels.few_rows import runs_early
from gac.runtime.kernels.gpu import HAS_TRITON, SIXTEEN_BIT
from gac.runtime.vllm.operator import layer_of, number_of

_MANY_KEYS, _MANY_QUERIES, _MANY_GATES = 1 << 23, 1 << 25, 1 << 27
"""Numbers from which a kernel saves the GPU more than its launch by Triton takes the CPU."""


def use_kernels(model: nn.Module, readers: Mapping[nn.Module, nn.Module]) -> None:
    """Let vLLM's usual norms, rotary embeddings and writes to the KV cache run in the kernels here.

    In compiled graphs, which fuse what they can, norms and rotary embeddings do so where they are launched early.

    Args:
        readers: stored layers by the norms that they alone read, which prepare their inputs.
    """
    if envs.VLLM_BATCH_INVARIANT:
        return
    module: Any
    for module in model.modules():
        if isinstance(module, Attention):
            implementation = module.impl
            if type(implementation).__name__ == "FlashAttentionImpl" and _is_plain(implementation):
                implementation.do_kv_cache_update = partial(_write, implementation)
        elif (forward := _forward_of(module)) is not None:
            module._forward_method = partial(forward, module)
            if isinstance(module, RMSNorm):
                module.reader = number_of(readers.get(module, module))


def _forward_of(module: Any) -> Callable[..., Any] | None:
    """Return what takes the place of a module's own way to run; None where that stays."""
    function = getattr(getattr(module, "_forward_method", None), "__func__", None)
    if isinstance(module, RMSNorm) and module.has_weight and module.variance_size_override is None:
        # Over several GPUs vLLM may fuse norms of its own with the sums before them.
        early = runs_early(module.weight) and _is_alone()
        return {RMSNorm.forward_cuda: _normed, RMSNorm.forward_native: _normed_in_graph if early else None}.get(
            function
        )
    if isinstance(module, RotaryEmbedding) and module.is_neox_style and module.rotary_dim == module.head_size:
        in_graph = _rotated_in_graph if runs_early(module.cos_sin_cache) else None
        return {RotaryEmbedding.forward_cuda: _rotated, RotaryEmbedding.forward_native: in_graph}.get(function)
    return None


def _is_alone() -> bool:
    return bool(get_tensor_model_parallel_world_size() == 1)


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
    if _is_prepared(module.reader, x, AddNorm(residual, module.weight, module.variance_epsilon, (x, residual), False)):
        return x, residual
    if len(x) <= FEW_ROWS and runs_early(x) and x.is_contiguous() and residual.is_contiguous():
        add_norm(x, residual, module.weight, module.variance_epsilon, early=True)
    else:
        torch.ops._C.fused_add_rms_norm(x, residual, module.weight, module.variance_epsilon)
    return x, residual


def _normed_in_graph(module: Any, x: Tensor, residual: Tensor | None = None) -> Any:
    if residual is None or x.dim() != 2 or module.weight.dtype != x.dtype:
        return module.forward_native(x, residual)
    return torch.ops.vllm.gac_add_norm(x, residual, module.weight, module.variance_epsilon, module.reader)


def _add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, reader: Tensor) -> tuple[Tensor, Tensor]:
    x, residual = x.contiguous(), residual.contiguous()
    into = torch.empty_like(x), torch.empty_like(residual)
    if _is_prepared(reader, x, AddNorm(residual, weight, eps, into, True)):  # a graph may copy what it hands on
        return into
    add_norm(x, residual, weight, eps, len(x) <= FEW_ROWS and runs_early(x), into)
    return into


def _add_norm_shapes(x: Tensor, residual: Tensor, weight: Tensor, eps: float, _: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), residual.new_empty(residual.shape)


def _is_prepared(reader: Tensor, x: Tensor, norm: AddNorm) -> bool:
    """Run a norm for the layer of that number, where it is a stored layer with a kernel that takes it."""
    layer: Any = layer_of(reader)
    can_run = x.is_contiguous() and norm.residual.is_contiguous() and not isinstance(layer, RMSNorm)
    return can_run and layer.quant_method.prepare(layer, x, norm)


def _rotated(module: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    early = len(query) <= FEW_ROWS and runs_early(query)
    if not (early or _are_many(query, _MANY_QUERIES)) or key is None or query.stride() != (query.stride(0), 1):
        pair: tuple[Tensor, Tensor | None] = module.forward_cuda(positions, query, key)
        return pair
    angles = module._match_cos_sin_cache_dtype(query)
    apply_rotary(positions, query, key, angles, module.head_size, early)
    return query, key


def _rotated_in_graph(module: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
    angles = module.cos_sin_cache
    if key is None or query.dim() != 2 or angles.dtype != query.dtype:
        return module.forward_native(positions, query, key)
    return torch.ops.vllm.gac_rotary(positions, query, key, angles, module.head_size)


def _rotary(positions: Tensor, query: Tensor, key: Tensor, angles: Tensor, size: int) -> tuple[Tensor, Tensor]:
    into = _rotary_shapes(positions, query, key, angles, size)
    query, key = (x if x.stride(1) == 1 else x.contiguous() for x in (query, key))
    apply_rotary(positions, query, key, angles, size, len(query) <= FEW_ROWS and runs_early(query), into)
    return into


def _rotary_shapes(positions: Tensor, query: Tensor, key: Tensor, angles: Tensor, size: int) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape)


def _write(attention: Any, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
    early = len(slots) <= FEW_ROWS and runs_early(key)
    if (early or _are_many(key, _MANY_KEYS)) and kv_cache.dim() == 4:
        keys, values = kv_cache.transpose(1, 2).chunk(2, dim=-1)
        write_to_pages(key, value, keys, values, slots, early)
    else:
        type(attention).do_kv_cache_update(attention, layer, key, value, kv_cache, slots)


direct_register_custom_op("gac_add_norm", _add_norm, fake_impl=_add_norm_shapes)
direct_register_custom_op("gac_rotary", _rotary, fake_impl=_rotary_shapes)
