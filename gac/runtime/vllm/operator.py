"""The operators that stand for layers in compiled graphs, for any number of tokens.

vLLM compiles what lies between two attentions, once for all layers whose graphs differ in names alone. Ranks and widths
differ from layer to layer. So an operator knows its layer by a number in a tensor, and only sizes that are the same in
every layer are in the graph. Elsewhere layers run without it: the dispatcher is slow.
"""

from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from vllm.utils.torch_utils import direct_register_custom_op

_layers: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()
_numbers = count()


def number_of(layer: nn.Module) -> Tensor:
    """Return a new number of the layer, by which operators find it."""
    number = next(_numbers)
    _layers[number] = layer
    return torch.tensor([number], device="cpu")


def layer_of(number: Tensor) -> nn.Module:
    return _layers[int(number)]


def planned_linear(x: Tensor, number: Tensor, bias: Tensor | None, features: int, width: int) -> Tensor:
    """Run a layer.

    Args:
        x: shape ``(..., in)``.
        number: of the layer.
        bias: shape ``(features,)``.
        width: of the rows in memory, of which the result has the first features.

    Returns:
        Shape ``(..., features)``.
    """
    result: Tensor = torch.ops.vllm.gac_linear(x, number, bias, features, width)
    return result


def _run(x: Tensor, number: Tensor, bias: Tensor | None, features: int, width: int) -> Tensor:
    layer: Any = layer_of(number)
    result: Tensor = layer.quant_method.run_joined(layer, x, bias, width)
    return result


def _shape(x: Tensor, number: Tensor, bias: Tensor | None, features: int, width: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], width)[..., :features]


def stored_rows(ids: Tensor, number: Tensor, features: int, dtype: torch.dtype) -> Tensor:
    """Look up ids ``(...)`` in an embedding: ``(..., features)``."""
    result: Tensor = torch.ops.vllm.gac_embedding(ids, number, features, dtype)
    return result


def _rows(ids: Tensor, number: Tensor, features: int, dtype: torch.dtype) -> Tensor:
    layer: Any = layer_of(number)
    result: Tensor = layer.quant_method.rows(layer, ids)
    return result


def _shape_of_rows(ids: Tensor, number: Tensor, features: int, dtype: torch.dtype) -> Tensor:
    return ids.new_empty(*ids.shape, features, dtype=dtype)


direct_register_custom_op("gac_linear", _run, fake_impl=_shape)
direct_register_custom_op("gac_embedding", _rows, fake_impl=_shape_of_rows)
