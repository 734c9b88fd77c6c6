"""Positions of cached latents. Their keys are rotated when they are read, so a cache keeps each token's position.

One table serves all layers of a cache that keep the same tokens and rotate alike. It is a cache layer of their class,
attached to the first of them. What changes that layer changes the table too: new tokens, crops, beams, windows.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import DynamicLayer, QuantizedLayer

from gac.runtime.kernels.latent_attention.layout import with_runs
from gac.runtime.latents.rounded import RoundedLayer

QUANTIZED: Any = getattr(cache_utils, "BaseQuantizedLayer", QuantizedLayer)
"""The class of cache layers that round what they keep."""
_OPERATIONS = (  # methods of a cache layer that change which tokens it keeps, but for ``update``
    "activate_past_recording",
    "batch_repeat_interleave",
    "batch_select_indices",
    "crop",
    "reorder_cache",
    "reset",
)


@dataclass(frozen=True, eq=False)
class Positions:
    """Positions of all tokens that a cache layer hands on."""

    table: Tensor  # ``layout.with_runs``, int32, shape ``(batch, tokens, 2)``
    # of the rotary embedding when each token came, float32, shape ``(batch, tokens, pairs)``; None: they are the same
    # for all tokens
    frequencies: Tensor | None

    def to(self, device: torch.device) -> "Positions":
        return Positions(self.table.to(device), None if self.frequencies is None else self.frequencies.to(device))


def update_positions(
    cache: Any, layer_idx: int, kind: str | None, position_ids: Tensor, frequencies: Tensor | None
) -> Positions:
    """Keep positions of new tokens ``(batch, new tokens)``, before the cache layer itself is updated.

    ``kind`` is that of the rotary embedding, None where the model has one; ``frequencies`` ``(pairs,)`` those of this
    call, None where they never change. A ValueError says if the layer holds tokens without positions.
    """
    layer: Any = cache.layers[layer_idx]
    key = kind, getattr(type(layer), "without_positions", type(layer)), getattr(layer, "sliding_window", None)
    positioned = (other for other in cache.layers[:layer_idx] if hasattr(type(other), "without_positions"))
    if (shared := next((other.positions for other in positioned if other.positions.key == key), None)) is not None:
        latest: Positions = shared.latest
        return latest
    if not hasattr(type(layer), "without_positions"):
        _attach(layer, layer_idx, key)
    table = layer.positions
    new = with_runs(position_ids, _last(table))
    words = new[..., :0]  # caches of some versions of transformers have one dtype
    if frequencies is not None:
        words = frequencies.to(new.device, torch.float32).view(torch.int32).expand(*new.shape[:2], -1)
    rows, words = (states.squeeze(1) for states in table.update(new.unsqueeze(1), words.unsqueeze(1)))
    latest = table.latest = Positions(rows, None if frequencies is None else words.view(torch.float32))
    return latest


def _attach(layer: Any, layer_idx: int, key: tuple[Any, ...]) -> None:
    if bool(layer.get_seq_length() > 0):
        raise ValueError(
            f"layer {layer_idx} of the cache holds tokens without positions; expected an empty layer, or one that this "
            "model has filled. Give it a new cache, not one that was made of tensors or that another model has filled."
        )
    kind: Any = type(layer)
    empty: Any = DynamicLayer
    layer.positions = empty() if isinstance(layer, (QUANTIZED, RoundedLayer)) else deepcopy(layer)
    layer.positions.is_initialized, layer.positions.key = False, key
    layer.__class__ = _positioned(kind)


@cache
def _positioned(kind: Any) -> Any:
    methods = {name: _on_both(getattr(kind, name)) for name in _OPERATIONS if hasattr(kind, name)}
    # without a type of its own: transformers would register the class in place of the original
    attributes = {"_layer_type": None, "without_positions": kind, "__reduce__": _reduce}
    return type(kind)(kind.__name__, (kind,), methods | attributes)


def _on_both(operation: Callable[..., None]) -> Callable[..., None]:
    @wraps(operation)
    def run(layer: Any, *args: Any, **options: Any) -> None:
        operation(layer, *args, **options)
        getattr(layer.positions, operation.__name__)(*args, **options)

    return run


def _reduce(layer: Any) -> tuple[Any, ...]:
    return _new, (layer.without_positions,), vars(layer)


def _new(kind: Any) -> Any:
    made = _positioned(kind)
    return made.__new__(made)


def _last(table: Any) -> Tensor | None:
    count = table.get_seq_length()
    if isinstance(count, Tensor):  # of a static layer, whose first row is zeros as long as it is empty
        rows: Tensor = table.keys.index_select(2, (count - 1).clamp(min=0).view(1))
        return rows.squeeze(1)
    if count == 0:
        return None
    last = min(count, table.keys.shape[2]) - 1
    row: Tensor = table.keys[:, 0, last : last + 1]
    return row
