"""Attentions with fewer heads, in vLLM's Transformers backend: it alone has numbers of heads by layer."""

import re
from collections.abc import Mapping
from typing import Any

import vllm

from gac.runtime.header import Module, header_of
from gac.runtime.modules import empty_linear

BACKEND = "TransformersForCausalLM"
"""vLLM's class of its Transformers backend."""


class FewerHeads:
    """A mixin before vLLM's class of the Transformers backend, whose layers then have the heads of the plan."""

    quant_config: Any

    def recursive_replace(self) -> None:
        """Make projections narrower, on the meta device, before vLLM puts its layers in their place."""
        for name, module in with_fewer_heads(self.quant_config.modules).items():
            holder, _, attribute = name.rpartition(".")
            attention: Any = self.get_submodule(holder)  # type: ignore[attr-defined]
            dense = getattr(attention, attribute)
            weight = dense.weight
            linear = empty_linear(**module.sizes, bias=dense.bias is not None, device=weight.device, dtype=weight.dtype)
            setattr(attention, attribute, linear)
        super().recursive_replace()  # type: ignore[misc]


def set_heads(vllm_config: Any) -> None:
    """Tell vLLM the heads of each layer; a RuntimeError where it has one number for all, or cannot divide them."""
    model_config, processes = vllm_config.model_config, vllm_config.parallel_config.tensor_parallel_size
    header = header_of(model_config.hf_config)
    modules = with_fewer_heads(header.modules if header else {})
    if not modules:
        return
    arch = model_config.model_arch_config
    if not hasattr(arch, "per_layer_overrides"):
        problem = f"{next(iter(modules))} has fewer heads, and vLLM {vllm.__version__} has one number for all layers"
        raise RuntimeError(f"{problem}; expected vLLM 0.32 or newer. Install it, or leave the form 'heads' out.")
    overrides: list[dict[str, int]] = [{} for _ in range(arch.total_num_hidden_layers)]
    for name, module in modules.items():
        match = re.search(r"\.(\d+)\..*\.([qk])_proj$", name)
        if match is None:
            continue
        kind = {"q": "total_num_attention_heads", "k": "total_num_kv_heads"}[match[2]]
        heads = module.sizes["out_features"] // arch.head_size
        if kind == "total_num_attention_heads" and heads % processes:
            problem = f"{name} has {heads} heads; expected a multiple of {processes} processes"
            raise RuntimeError(f"{problem}. Make the plan with tensor_parallel={processes}, or serve it on one GPU.")
        overrides[int(match[1])][kind] = heads
    object.__setattr__(arch, "per_layer_overrides", overrides)


def with_fewer_heads(modules: Mapping[str, Module]) -> dict[str, Module]:
    """Return the projections that have fewer heads than the dense model's."""
    return {name: module for name, module in modules.items() if module.form == "heads"}
