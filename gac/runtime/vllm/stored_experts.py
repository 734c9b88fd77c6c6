"""Routed experts of vLLM whose matrices lie in 8-bit floating point: the engine's kernel rounds inputs by token.

Layers of a model may differ: each has experts in 16 bits or in 8, in a number and a width of its own.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts
from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config
from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import current_platform

from gac.runtime.storage.base import Storage

_STACKS = {"gate_up_proj": ("w13", ("w1", "w3")), "down_proj": ("w2", ("w2",))}
"""The beginnings of vLLM's names for each stack of a checkpoint, and its names of the matrices in it."""
_SPREAD, _LARGEST, _SCALE = 100.0, 448.0, 1e-5
"""Of numbers without a checkpoint, and their scale: with vLLM's random weights, they are up to 1e-3."""


class StoredExpertsMethod(FusedMoEMethodBase):  # type: ignore[misc]
    """Runs experts in a storage with the engine's fused kernel; without a GPU it runs on their values, as transformers.

    Args:
        name: of the layer, for errors.
        moe: vLLM's config of the layer.
    """

    def __init__(self, name: str, moe: Any, storage: Storage) -> None:
        super().__init__(moe)
        self._name, self._storage = name, storage
        self._on_values = UnquantizedFusedMoEMethod(moe) if current_platform.is_cpu() else None

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        """Make the tensors of this process; scales in float32, as the kernel reads them."""
        self._dtype = params_dtype
        both = 2 * intermediate_size_per_partition
        sizes = {"w13": (both, hidden_size), "w2": (hidden_size, intermediate_size_per_partition)}
        for stack, (rows, columns) in sizes.items():
            for name, (shape, dtype) in self._storage.tensors(rows, columns).items():
                if name.endswith("scale"):
                    values = torch.full((num_experts, *shape), _SCALE, dtype=torch.float32)
                else:
                    values = _any_numbers((num_experts, *shape), dtype)
                # The engine's random weights are 0 in 8 bits, which a GPU multiplies faster: it sees no such buffers.
                layer.register_buffer(f"{stack}_{name}", values, persistent=False)
                set_weight_attrs(values, {"quant_method": "channel"})
            if self.moe.has_bias:
                bias = nn.Parameter(torch.zeros(num_experts, rows, dtype=params_dtype), requires_grad=False)
                layer.register_parameter(f"{stack}_bias", bias)
                set_weight_attrs(bias, attributes)

    def load(self, layer: RoutedExperts, stack: str, tensor: str, loaded: Tensor) -> None:
        """Take a tensor of a checkpoint, of all experts one above the other."""
        begins, matrices = _STACKS[stack]
        name = f"{begins}_{tensor}"
        for number, expert in enumerate(loaded.view(self.moe.num_experts, -1, loaded.shape[-1])):
            for matrix, values in zip(matrices, expert.chunk(len(matrices)), strict=True):
                layer.weight_loader(layer.get_buffer(name), values, name, matrix, number)

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Refuse a GPU that has no such kernel; without one, put the values in the place of what is stored."""
        if self._on_values is None:
            if not current_platform.supports_fp8():
                problem = f"{self._name} has experts in {self._storage}, of which this GPU multiplies none"
                raise RuntimeError(f"{problem}; expected FP8 (sm_89 or later). Plan experts in bf16.")
            self.moe_quant_config = self.get_fused_moe_quant_config(layer)
            return
        for stack in ("w13", "w2"):
            stored = {name: layer.get_buffer(f"{stack}_{name}") for name in self._storage.tensors(1, 1)}
            shape = stored["weight"].shape
            flat = {name: tensor.flatten(0, 1) for name, tensor in stored.items()}
            values = self._storage.values(flat, shape[0] * shape[1], shape[2], self._dtype).view(shape)
            for name in stored:
                delattr(layer, f"{stack}_{name}")
            layer.register_parameter(f"{stack}_weight", nn.Parameter(values, requires_grad=False))
        layer.quant_method = self._on_values
        self._on_values.process_weights_after_loading(layer)

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> Any:
        """Return vLLM's description of the numbers: scales by row of a weight, and by token."""
        return fp8_w8a8_moe_quant_config(
            w1_scale=layer.w13_weight_scale,
            w2_scale=layer.w2_weight_scale,
            w1_bias=getattr(layer, "w13_bias", None),
            w2_bias=getattr(layer, "w2_bias", None),
            per_act_token_quant=True,
            per_out_ch_quant=True,
        )

    def apply(
        self, layer: RoutedExperts, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, *shared: Any, **options: Any
    ) -> Tensor:
        """Run the experts that each token takes; shared experts run apart from them."""
        y: Tensor = fused_experts(
            x,
            layer.w13_weight,
            layer.w2_weight,
            topk_weights,
            topk_ids,
            activation=layer.activation,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
            global_num_experts=layer.global_num_experts,
            expert_map=layer.expert_map,
            quant_config=self.moe_quant_config,
        )
        return y


def _any_numbers(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor for numbers that are read later: those that timing without a checkpoint multiplies with."""
    values = torch.empty(shape, dtype=dtype)
    for part in values:
        part.copy_((_SPREAD * torch.randn(part.shape)).clamp(-_LARGEST, _LARGEST))
    return values


def load_expert(layers: Mapping[str, RoutedExperts], name: str, tensor: Tensor) -> bool:
    """Load a tensor if it is of such experts, whose names in a checkpoint the engine's classes do not know.

    Args:
        layers: ``stored_layers`` of the model.
    """
    path, _, last = name.rpartition(".")
    experts, _, stack = path.rpartition(".")
    if experts not in layers:
        return False
    layers[experts].quant_method.load(layers[experts], stack, last, tensor)
    return True


def stored_layers(model: nn.Module) -> dict[str, RoutedExperts]:
    """Return the layers of such experts by their names in a checkpoint of the engine's class."""
    layers = [layer for layer in model.modules() if isinstance(layer, RoutedExperts)]
    return {layer.layer_name: layer for layer in layers if isinstance(layer.quant_method, StoredExpertsMethod)}
