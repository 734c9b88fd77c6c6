"""Attention whose cache differs in length from layer to layer: a call after each prefill, and masks that fit."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from gac.errors import GacError
from gac.models.attentions import not_pressed
from gac.runtime.contract import CACHES

Prefilled = Callable[[nn.Module, int, Tensor, Any, Tensor | None, Mapping[str, Any]], None]
"""Called with the attention, its number, its inputs, its layer of the cache, its weights or None, and its arguments."""


def attentions(model: PreTrainedModel) -> list[nn.Module]:
    """The attention of every layer, where presses find it.

    Raises:
        ModelError: the architecture has them elsewhere.
    """
    decoder: Any = getattr(model, "model", None)
    decoder = getattr(decoder, "language_model", decoder)
    layers = list(getattr(decoder, "layers", ()))
    found = [layer.self_attn for layer in layers if hasattr(layer, "self_attn")]
    if not layers or len(found) < len(layers) or not hasattr(decoder, "rotary_emb"):
        raise not_pressed(model.config.model_type)
    return found


@contextmanager
def attending(model: PreTrainedModel, layers: Sequence[int], prefilled: Prefilled | None) -> Iterator[None]:
    """Inside, the cache of each of these layers may have a length of its own.

    transformers makes one mask for all layers. Each of these gets its own: every cached token is before all new ones,
    so all are seen, and new ones see each other causally.

    Args:
        prefilled: called after the attention of each of these layers has seen a context, and nothing before it.
    """
    found, mends = attentions(model), model.config._attn_implementation in ("sdpa", "eager")
    decoder: Any = getattr(model.model, "language_model", model.model)
    with ExitStack() as stack:
        for layer in layers:
            attention = found[layer]
            if not hasattr(attention, "rotary_emb"):
                attention.rotary_emb = decoder.rotary_emb
                stack.callback(delattr, attention, "rotary_emb")
            before = _before(layer, mends)
            stack.callback(attention.register_forward_pre_hook(before, with_kwargs=True).remove)
            if prefilled is not None:
                after = _after(layer, prefilled)
                stack.callback(attention.register_forward_hook(after, with_kwargs=True).remove)
        yield


def _cache_of(given: Mapping[str, Any]) -> Any:
    """The cache among an attention's arguments; None where it has none."""
    return next((given[name] for name in CACHES if given.get(name) is not None), None)


def _length(cache: Any, layer: int) -> int:
    return int(cache.layers[layer].get_seq_length()) if layer < len(cache.layers) else 0


def _before(layer: int, mends: bool) -> Callable[..., Any]:
    def before(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        cache, mask = _cache_of(named), named.get("attention_mask")
        if cache is None:
            return None
        cached = _length(cache, layer)
        if not cached:
            _check_no_padding(mask)
        elif mends:
            hidden = named["hidden_states"]
            return given, named | {"attention_mask": _mask(hidden, cached)}
        return None

    return before


def _mask(hidden: Tensor, cached: int) -> Tensor | None:
    """What new tokens see, added to scores, shape ``(1, 1, new, cached + new)``; None where that is all."""
    new = hidden.shape[1]
    if new == 1:
        return None
    least = torch.finfo(hidden.dtype).min
    mask = torch.full((new, cached + new), least, dtype=hidden.dtype, device=hidden.device)
    return mask.triu(cached + 1)[None, None]


def _check_no_padding(mask: Tensor | None) -> None:
    """Refuse a context of which some tokens are padding: a press would keep them."""
    if mask is None:
        return
    last = mask[..., -1, :] if mask.ndim == 4 else mask
    seen = last if last.dtype == torch.bool else last >= 0 if mask.ndim == 4 else last != 0
    if not bool(seen.all()):
        expected = "contexts of one length, without padding"
        raise GacError("a padded batch with a press", expected, "Run contexts of different lengths one by one.")


def _after(layer: int, prefilled: Prefilled) -> Callable[..., Any]:
    def after(attention: nn.Module, _: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        cache, hidden = _cache_of(named), named["hidden_states"]
        if cache is None or _length(cache, layer) != hidden.shape[1]:
            return
        if not isinstance(cache.layers[layer], DynamicLayer):
            given = f"a {type(cache).__name__} of {type(cache.layers[layer]).__name__} with a press"
            raise GacError(given, "a DynamicCache, from which tokens can be taken", "Use cache_implementation=None.")
        prefilled(attention, layer, hidden, cache.layers[layer], output[1], named)

    return after
