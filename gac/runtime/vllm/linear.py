"""Linear layers of vLLM whose weights are low-rank pairs, or narrower than the dense model's.

The layer stays of the engine's own class. What a plan changes is its *linear method*, which makes the parameters,
loads them and multiplies by them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from gac.runtime.header import Module
from gac.runtime.vllm.project import first_rows, gated_linear, linear, project

_SHARDS = {"q": 0, "k": 1, "v": 2, None: 0}
"""Positions of siblings by the names that vLLM loads them with; gate and up are 0 and 1."""


class PlannedConfig(QuantizationConfig):  # type: ignore[misc]
    """The linear methods of a plan. It takes the place of a quantisation config, through which vLLM chooses them.

    Attributes:
        used: names of the modules that a layer of vLLM has taken.

    Args:
        modules: the modules of the plan, by the name of the weight in transformers' model.
        packed: names of the siblings of a layer of vLLM, by its own: ``{"qkv_proj": ["q_proj", ...]}``.
    """

    def __init__(self, modules: Mapping[str, Module], packed: Mapping[str, Sequence[str]]) -> None:
        super().__init__()
        self.modules, self.packed = modules, packed
        self.used: set[str] = set()

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if not isinstance(layer, LinearBase):
            return None
        block, _, name = prefix.rpartition(".")
        stacked = prefix in self.modules  # in transformers too
        names = [prefix] if stacked else [f"{block}.{sibling}" for sibling in self.packed.get(name, [name])]
        modules = [self.modules.get(sibling) for sibling in names]
        self.used |= self.modules.keys() & set(names)
        if not any(modules):
            return DenseLinearMethod()
        absent = [module is not None and module.module in ("Absent", "Constant") for module in modules]
        return AbsentLinearMethod() if all(absent) else PlannedLinearMethod(modules)

    def get_name(self) -> Any:
        return "gac"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 70

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "PlannedConfig":
        """Refuse: the model makes it from the key ``gac`` of its config."""
        raise ValueError("quantization is 'gac'; expected none. Leave --quantization out: config.json says it all.")


class AbsentLinearMethod(LinearMethodBase):  # type: ignore[misc]
    """Stands for the weights of a block that is left out: it has no parameters, and never runs."""

    def create_weights(self, layer: Any, *sizes: Any, **options: Any) -> None:
        """Make nothing."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        raise RuntimeError(f"{layer.prefix} was run; it is left out.")


@dataclass(frozen=True)
class _Sibling:
    """A weight of a layer, as this process has it.

    Attributes:
        rank: of a low-rank pair; None: one matrix.
        out_features: rows of the (second) matrix here.
        in_features: columns of the (first) matrix here.
    """

    rank: int | None
    out_features: int
    in_features: int

    @property
    def rows(self) -> int:
        """Rows that it has in the first GEMM."""
        return self.out_features if self.rank is None else self.rank


class DenseLinearMethod(UnquantizedLinearMethod):  # type: ignore[misc]
    """Multiplies as the engine does, but on a GPU with the kernels for few rows.

    Attributes:
        activation: the module ``silu(gate) * up`` that follows, where this runs it too.
    """

    activation: nn.Module | None = None

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.is_cuda and self.activation is not None and bias is None:
            gated: Tensor = gated_linear(x, layer.weight)
            return gated
        y: Tensor = linear(x, layer.weight, bias) if x.is_cuda else super().apply(layer, x, bias)
        return y if self.activation is None else self.activation(y)


class PlannedLinearMethod(DenseLinearMethod):
    """Multiplies by the weights of a layer, of which some are low-rank pairs or narrower.

    ``layer.weight`` holds what reads the input: first factors and dense weights, in the order of ``first_rows``.
    ``layer.second`` holds second factors, one after the other.

    Args:
        modules: of the siblings; None: dense as they were.
    """

    def __init__(self, modules: Sequence[Module | None]) -> None:
        super().__init__()
        self._modules = modules

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **options: Any,
    ) -> None:
        """Make the parameters of this process, and tell the layer its new sizes."""
        self._by_input = isinstance(layer, RowParallelLinear)
        sizes = output_partition_sizes
        if len(self._modules) < len(sizes):
            if layer.tp_size > 1:
                raise ValueError(f"{layer.prefix} is one stacked weight, over {layer.tp_size} GPUs; expected one GPU.")
            sizes = [sum(sizes)]
        _check_heads(layer, self._modules)
        siblings = [
            self._sibling(layer, module, size, input_size) for module, size in zip(self._modules, sizes, strict=True)
        ]
        self._siblings = siblings
        layer.input_size_per_partition = siblings[0].in_features
        layer.input_size = siblings[0].in_features * (layer.tp_size if self._by_input else 1)
        layer.output_partition_sizes = [sibling.out_features for sibling in siblings]
        layer.output_size_per_partition = sum(layer.output_partition_sizes)
        layer.output_size = layer.output_size_per_partition * (1 if self._by_input else layer.tp_size)
        if hasattr(layer, "output_sizes") and len(siblings) == len(layer.output_sizes):
            layer.output_sizes = [size * layer.tp_size for size in layer.output_partition_sizes]
        rows = sum(sibling.rows for sibling in siblings)
        seconds = sum(sibling.out_features * sibling.rank for sibling in siblings if sibling.rank)
        self._add(layer, "weight", (rows, siblings[0].in_features), params_dtype, self._load_first)
        if seconds:
            self._add(layer, "second", (seconds,), params_dtype, self._load_second)

    def _sibling(self, layer: Any, module: Module | None, out_features: int, in_features: int) -> _Sibling:
        rank = None
        if module is not None:
            rank, in_features = module.sizes.get("rank"), module.sizes["in_features"]
            if not isinstance(layer, QKVParallelLinear):  # its sizes count heads that several processes have
                planned = module.sizes["out_features"]
                out_features = planned if self._by_input else _divided(layer, planned)
        return _Sibling(rank, out_features, _divided(layer, in_features) if self._by_input else in_features)

    def _add(self, layer: Any, name: str, shape: tuple[int, ...], dtype: torch.dtype, load: Any) -> None:
        parameter = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)

        def weight_loader(parameter: nn.Parameter, loaded: Tensor, shard: Any = None) -> None:
            load(layer, parameter, loaded, _SHARDS.get(shard, shard))

        parameter.weight_loader = weight_loader  # type: ignore[attr-defined]
        layer.register_parameter(name, parameter)

    def _load_first(self, layer: Any, parameter: nn.Parameter, loaded: Tensor, index: int) -> None:
        sibling = self._siblings[index]
        order = first_rows([each.rank or 0 for each in self._siblings])
        start = sum(self._siblings[before].rows for before in order[: order.index(index)])
        if self._by_input:
            loaded = loaded.narrow(1, layer.tp_rank * sibling.in_features, sibling.in_features)
        elif sibling.rank is None:
            loaded = self._rows(layer, loaded, index)
        parameter.data[start : start + sibling.rows].copy_(loaded)

    def _load_second(self, layer: Any, parameter: nn.Parameter, loaded: Tensor, index: int) -> None:
        loaded = loaded if self._by_input else self._rows(layer, loaded, index)
        start = sum(before.out_features * (before.rank or 0) for before in self._siblings[:index])
        parameter.data[start : start + loaded.numel()].copy_(loaded.reshape(-1))

    def _rows(self, layer: Any, loaded: Tensor, index: int) -> Tensor:
        """Return the rows of a weight that this process has: whole heads, or a part of the neurons."""
        rows = self._siblings[index].out_features
        replicas = getattr(layer, "num_kv_head_replicas", 1) if index else 1
        return loaded.narrow(0, layer.tp_rank // replicas * rows, rows)

    def process_weights_after_loading(self, layer: Any) -> None:
        if not hasattr(layer, "second"):
            super().process_weights_after_loading(layer)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply: x ``(tokens, in)`` gives ``(tokens, out)`` of all siblings, one beside the other."""
        if not hasattr(layer, "second"):
            dense: Tensor = super().apply(layer, x, bias)
            return dense
        ranks = [sibling.rank or 0 for sibling in self._siblings]
        strided = isinstance(layer, QKVParallelLinear)
        y: Tensor = project(x, layer.weight, layer.second, bias, ranks, layer.output_partition_sizes, strided)
        return y if self.activation is None else self.activation(y)


def _check_heads(layer: Any, modules: Sequence[Module | None]) -> None:
    if not isinstance(layer, QKVParallelLinear):
        return
    keys, queries = (heads * layer.head_size for heads in (layer.total_num_kv_heads, layer.total_num_heads))
    expected = (queries, keys, keys) if len(modules) == 3 else (queries + 2 * keys,)
    for module, features in zip(modules, expected, strict=True):
        if module is not None and module.sizes["out_features"] != features:
            problem = f"{layer.prefix} has {module.sizes['out_features']} features in place of {features}"
            raise ValueError(f"{problem}; expected all heads of the dense model, which this engine runs.")


def _divided(layer: Any, size: int) -> int:
    if size % layer.tp_size:
        raise ValueError(f"{layer.prefix} has {size} features; expected a multiple of {layer.tp_size} processes.")
    return int(size // layer.tp_size)
