"""Linear layers of vLLM whose weights are low-rank pairs, or narrower than the dense model's.

The layer stays of the engine's own class. What a plan changes is its *linear method*, which makes the parameters,
loads them and multiplies by them.

Over several GPUs, a layer that is split by outputs has its first factors whole in every process, and a part of the
rows of the second ones. A layer that is split by inputs has a part of the columns of its first factor, and the second
one whole: the layer sums its outputs over the processes, as it does those of dense weights.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)

from gac.runtime.header import Module
from gac.runtime.vllm.operator import number_of, planned_linear
from gac.runtime.vllm.project import first_rows, gated_linear, linear, project, width_in_place

_SHARDS = {"q": 0, "k": 1, "v": 2, None: 0}
"""Positions of siblings by the names that vLLM loads them with; gate and up are 0 and 1."""


@dataclass(frozen=True)
class _Part:
    """Consecutive outputs of a weight that are divided among the processes: those of q, or of gate.

    Attributes:
        features: of the weight.
        size: of these, in this process.
    """

    features: int
    size: int


@dataclass(frozen=True)
class _Sibling:
    """A weight of a layer, as this process has it.

    Attributes:
        rank: of a low-rank pair; None: one matrix.
        parts: outputs of the (second) matrix; more than one where the dense model stacks weights.
        in_features: columns of the (first) matrix here.
    """

    rank: int | None
    parts: tuple[_Part, ...]
    in_features: int

    @property
    def out_features(self) -> int:
        """Rows of the (second) matrix here."""
        return sum(part.size for part in self.parts)

    @property
    def rows(self) -> int:
        """Rows that it has in the first GEMM."""
        return self.out_features if self.rank is None else self.rank


class DenseLinearMethod(UnquantizedLinearMethod):  # type: ignore[misc]
    """Multiplies as the engine does, but on a GPU with the kernels for few rows.

    Attributes:
        activation: of gate and up: the module ``silu(gate) * up`` that follows, which this runs too. In compiled graphs
            the down projection runs both, since the width of an MLP is its own.
        gate_up: of a down projection: the layer before that activation.
        features: of the result.
    """

    activation: nn.Module | None = None
    gate_up: Any = None
    features: int

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        *sizes: Any,
        **options: Any,
    ) -> None:
        """Make the parameters of this process."""
        super().create_weights(layer, input_size_per_partition, output_partition_sizes, *sizes, **options)
        self._register(layer, sum(output_partition_sizes))

    def _register(self, layer: Any, features: int) -> None:
        self.features, layer.number = features, number_of(layer)

    @property
    def width(self) -> int:
        """Numbers of a row of the result in memory."""
        return self.features

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply: x ``(..., in)`` gives ``(..., out)`` of all siblings, one beside the other."""
        if not torch.compiler.is_compiling():
            return self.run(layer, x, bias, self.width)
        if self.activation is not None:
            return x
        return planned_linear(x, layer.number, bias, self.features, self.width)

    def run_joined(self, layer: Any, x: Tensor, bias: Tensor | None, width: int) -> Tensor:
        """Multiply in a compiled graph: a down projection runs gate, up and their activation first."""
        if (gate_up := self.gate_up) is not None:
            method = gate_up.quant_method
            x = method.run(gate_up, x, gate_up.bias, method.width)
        return self.run(layer, x, bias, width)

    def run(self, layer: Any, x: Tensor, bias: Tensor | None, width: int) -> Tensor:
        """Multiply, in rows that are so many numbers apart."""
        if x.is_cuda and self.activation is not None and bias is None:
            return gated_linear(x, layer.weight)
        y: Tensor = linear(x, layer.weight, bias) if x.is_cuda else super().apply(layer, x, bias)
        return y if self.activation is None else self.activation(y)


def shard_index(shard: str | int | None) -> int:
    """Return the position of a sibling by the name that vLLM loads it with."""
    return _SHARDS[shard] if shard is None or isinstance(shard, str) else shard


_widest: dict[int, int] = defaultdict(int)
"""Numbers of a row in memory where first GEMMs write in place, by the features of the result: alike in all layers."""


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
        # Kernels of adapters add to an output in one piece.
        strided = isinstance(layer, QKVParallelLinear) and get_current_vllm_config().lora_config is None
        dense = _dense_parts(layer, output_partition_sizes)
        split = [dense] if len(self._modules) == 1 else [[part] for part in dense]
        siblings = [
            self._sibling(layer, module, parts, input_size) for module, parts in zip(self._modules, split, strict=True)
        ]
        self._siblings = siblings
        self._ranks = [sibling.rank or 0 for sibling in siblings]
        self._sizes = [sibling.out_features for sibling in siblings]
        layer.input_size_per_partition = siblings[0].in_features
        layer.input_size = siblings[0].in_features * (layer.tp_size if self._by_input else 1)
        layer.output_partition_sizes = [part.size for sibling in siblings for part in sibling.parts]
        layer.output_size_per_partition = sum(layer.output_partition_sizes)
        layer.output_size = layer.output_size_per_partition * processes_of(layer)
        if hasattr(layer, "output_sizes"):
            layer.output_sizes = [size * layer.tp_size for size in layer.output_partition_sizes]
        self._register(layer, sum(self._sizes))
        self._strided = strided and any(self._ranks) and len(siblings) > 1
        self._add_parameters(layer, params_dtype)

    def _add_parameters(self, layer: Any, dtype: torch.dtype) -> None:
        if self._strided:
            _widest[self.features] = max(_widest[self.features], width_in_place(self._ranks, self._sizes))
        rows = sum(sibling.rows for sibling in self._siblings)
        self._add(layer, "weight", (rows, self._siblings[0].in_features), dtype, self._load_first)
        if seconds := sum(map(prod, zip(self._ranks, self._sizes, strict=True))):
            self._add(layer, "second", (seconds,), dtype, self._load_second)

    def _sibling(self, layer: Any, module: Module | None, dense: list[_Part], in_features: int) -> _Sibling:
        rank, parts = None, dense
        if module is not None:
            rank, in_features = module.sizes.get("rank"), module.sizes["in_features"]
            parts = _planned_parts(layer, module.sizes["out_features"], dense)
        here = _divided(layer, in_features, layer.tp_size) if self._by_input else in_features
        return _Sibling(rank, tuple(parts), here)

    def _add(self, layer: Any, name: str, shape: tuple[int, ...], dtype: torch.dtype, load: Any) -> None:
        parameter = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)

        def weight_loader(parameter: nn.Parameter, loaded: Tensor, shard: Any = None) -> None:
            load(layer, parameter, loaded, shard_index(shard))

        parameter.weight_loader = weight_loader  # type: ignore[attr-defined]
        layer.register_parameter(name, parameter)

    def _load_first(self, layer: Any, parameter: nn.Parameter, loaded: Tensor, index: int) -> None:
        sibling = self._siblings[index]
        order = first_rows(self._ranks)
        start = sum(self._siblings[before].rows for before in order[: order.index(index)])
        if self._by_input:
            loaded = loaded.narrow(1, layer.tp_rank * sibling.in_features, sibling.in_features)
        elif sibling.rank is None:
            loaded = _rows(layer, loaded, sibling)
        parameter.data[start : start + sibling.rows].copy_(loaded)

    def _load_second(self, layer: Any, parameter: nn.Parameter, loaded: Tensor, index: int) -> None:
        rows = _rows(layer, loaded, self._siblings[index])
        start = sum(before.out_features * (before.rank or 0) for before in self._siblings[:index])
        parameter.data[start : start + rows.numel()].copy_(rows.reshape(-1))

    def process_weights_after_loading(self, layer: Any) -> None:
        if not hasattr(layer, "second"):
            super().process_weights_after_loading(layer)

    @property
    def width(self) -> int:
        return _widest[self.features] if self._strided else self.features

    def run(self, layer: Any, x: Tensor, bias: Tensor | None, width: int) -> Tensor:
        if not hasattr(layer, "second"):
            return super().run(layer, x, bias, width)
        tokens = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])  # transformers' code has a batch
        y: Tensor = project(tokens, layer.weight, layer.second, bias, self._ranks, self._sizes, width)
        y = y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])
        return y if self.activation is None else self.activation(y)


def processes_of(layer: Any) -> int:
    """Return the number of processes among which the outputs of a layer are divided."""
    return layer.tp_size if isinstance(layer, ColumnParallelLinear) else 1


def _dense_parts(layer: Any, sizes: list[int]) -> list[_Part]:
    """Return the outputs of the dense layer. Processes that are more than the KV heads share these."""
    features = [size * processes_of(layer) for size in sizes]
    if isinstance(layer, QKVParallelLinear):
        features[1:] = [layer.total_num_kv_heads * layer.head_size, layer.total_num_kv_heads * layer.v_head_size]
    return [_Part(*part) for part in zip(features, sizes, strict=True)]


def _planned_parts(layer: Any, features: int, dense: list[_Part]) -> list[_Part]:
    """Return the outputs of a module; those of gate and up, in one matrix, are equally many."""
    expected = sum(part.features for part in dense)
    if features == expected:
        return dense
    if isinstance(layer, QKVParallelLinear):
        problem = f"{layer.prefix} has {features} features in place of {expected}"
        raise ValueError(f"{problem}; expected all heads of the dense model, which this engine runs.")
    each = features // len(dense)
    return [_Part(each, _divided(layer, each, processes_of(layer)))] * len(dense)


def _rows(layer: Any, loaded: Tensor, sibling: _Sibling) -> Tensor:
    """Return the rows of a weight that this process has."""
    return torch.cat([loaded[rows] for rows in part_rows(layer, sibling)])


def part_rows(layer: Any, sibling: _Sibling) -> Iterator[slice]:
    """Return the rows of each part of a weight that this process has."""
    start = 0
    for part in sibling.parts:
        sharing = part.size * processes_of(layer) // part.features
        index = layer.tp_rank // sharing if processes_of(layer) > 1 else 0
        yield slice(start + index * part.size, start + (index + 1) * part.size)
        start += part.features


def _divided(layer: Any, size: int, processes: int) -> int:
    if size % processes:
        problem = f"{layer.prefix} has {size} features; expected a multiple of {processes} processes"
        raise ValueError(f"{problem}. Make the plan with tensor_parallel={processes}, or serve it on one GPU.")
    return int(size // processes)
