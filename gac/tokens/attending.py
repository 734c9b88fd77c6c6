"""Attention whose cache differs in length from layer to layer: a call after each prefill, and masks that fit."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from gac.core.errors import GacError, ModelError
from gac.models.attentions import not_pressed
from gac.runtime.contract import CACHES
from gac.runtime.latents.attention import caches_latents

_MASKED = ("sdpa", "eager")
"""Attentions of transformers that take a mask; flash attention needs none for new tokens behind cached ones."""
Prefilled = Callable[[nn.Module, int, Tensor, Any, Tensor | None, Mapping[str, Any]], None]
"""Called with the attention, its number, its inputs, its layer of the cache, its weights or None, and its arguments."""


def attentions(model: PreTrainedModel) -> list[nn.Module]:
    """The attention of every layer, where presses find it.

    Raises:
        ModelError: the architecture has them elsewhere, they cache latents, or their mask cannot differ by layer.
    """
    if caches_latents(model):
        given, expected = "a model that caches latents, with a press", "a cache of keys and values, which presses score"
        raise ModelError(given, expected, "Plan the weights without the form latent, or keep all tokens.")
    implementation = str(model.config._attn_implementation)
    if implementation not in _MASKED and not implementation.startswith("flash_attention"):
        given, expected = f"attn_implementation {implementation!r} with a press", "sdpa, eager or flash_attention"
        raise ModelError(given, expected, "Call model.set_attn_implementation('sdpa').")
    decoder: Any = getattr(model, "model", None)
    decoder = getattr(decoder, "language_model", decoder)
    layers = list(getattr(decoder, "layers", ()))
    found = [layer.self_attn for layer in layers if hasattr(layer, "self_attn")]
    if not layers or len(found) < len(layers) or not hasattr(decoder, "rotary_emb"):
        raise not_pressed(model.config.model_type)
    return found


class EvictedLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Keys and values of which a press has taken some away: its length counts these too, so that positions go on.

    Attributes:
        context: tokens that there were when it did.
        evicted: how many of them are gone.
    """

    context: int
    evicted: int

    def get_seq_length(self) -> int:
        return super().get_seq_length() + self.evicted if self.is_initialized else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return super().get_seq_length() + query_length, self.evicted

    def crop(self, tokens: int) -> None:
        """Take back tokens, the last ``-tokens``, or all behind the first ``tokens``; none of the context.

        Raises:
            GacError: the context would be cut.
        """
        removed = -tokens if tokens < 0 else self.get_seq_length() - tokens if tokens else 0
        if removed > self.get_seq_length() - self.context:
            given = f"a cache that is cropped to {self.get_seq_length() - removed} tokens"
            raise GacError(given, f"at least {self.context}, its context, which a press has cut", "Use a new cache.")
        if removed > 0:
            states: Any = self  # versions of transformers crop by other lengths
            states.keys, states.values = states.keys[..., :-removed, :], states.values[..., :-removed, :]

    def reset(self) -> None:
        super().reset()
        self.__class__ = DynamicLayer  # type: ignore[assignment]


def evict(layer: DynamicLayer, keys: Tensor, values: Tensor) -> None:
    """Leave these of a layer's keys and values, each ``(batch, key-value heads, tokens, head_dim)``; in place."""
    context = layer.get_seq_length()
    layer.__class__ = EvictedLayer
    layer.keys, layer.values = keys, values
    layer.context, layer.evicted = context, context - keys.shape[-2]  # type: ignore[attr-defined]


@contextmanager
def attending(model: PreTrainedModel, layers: Sequence[int], prefilled: Prefilled | None) -> Iterator[None]:
    """Inside, the cache of each of these layers may have a length of its own.

    transformers makes one mask for all layers. Each of these gets its own: every cached token is before all new ones,
    so all are seen, and new ones see each other causally.

    Args:
        prefilled: called after the attention of each of these layers has seen a context, and nothing before it.
    """
    found, mends = attentions(model), model.config._attn_implementation in _MASKED
    decoder: Any = getattr(model.model, "language_model", model.model)
    with ExitStack() as stack:
        for layer in layers:
            attention = found[layer]
            if not hasattr(attention, "rotary_emb"):
                attention.rotary_emb = _rotary(decoder.rotary_emb, attention)
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


def _rotary(rotary: Any, attention: nn.Module) -> Any:
    """The rotary embedding as presses call it; Gemma-3 has one for each kind of layer."""
    if "layer_type" not in inspect.signature(rotary.forward).parameters:
        return rotary
    described: Any = attention
    return partial(rotary, layer_type=described.config.layer_types[described.layer_idx])


def _cached(cache: Any, layer: int) -> int:
    """How many keys a head of a layer holds."""
    keys = getattr(cache.layers[layer], "keys", None) if layer < len(cache.layers) else None
    return 0 if keys is None else int(keys.shape[-2])


def _before(layer: int, mends: bool) -> Callable[..., Any]:
    def before(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        cache, mask, hidden = _cache_of(named), named.get("attention_mask"), named["hidden_states"]
        if cache is None:
            expected = (
                "a cache, from which tokens can be taken: without one the model answers as if there were no press"
            )
            raise GacError("a model without a cache, with a press", expected, "Run it with use_cache=True.")
        if hidden.shape[1] > 1:
            _check_no_padding(mask, hidden.shape[1])
        if mends and (cached := _cached(cache, layer)) and isinstance(cache.layers[layer], DynamicLayer):
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


def _check_no_padding(mask: Tensor | None, new: int) -> None:
    """Refuse new tokens of which some are padding: a press would keep them, and the masks here would show them."""
    if mask is None:
        return
    last = (mask[..., -1, :] if mask.ndim == 4 else mask)[..., -new:]
    seen = last if last.dtype == torch.bool else last >= 0 if mask.ndim == 4 else last != 0
    if not bool(seen.all()):
        expected = "texts of one length, without padding"
        raise GacError("a padded batch with a press", expected, "Run texts of different lengths one by one.")


def _after(layer: int, prefilled: Prefilled) -> Callable[..., Any]:
    def after(attention: nn.Module, _: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        cache, hidden = _cache_of(named), named["hidden_states"]
        held = cache.layers[layer]
        if int(held.get_seq_length()) != hidden.shape[1]:
            return
        if type(held) is not DynamicLayer or getattr(cache, "offloading", False):
            kind = "offloaded " if getattr(cache, "offloading", False) else ""
            given = f"a {kind}{type(cache).__name__} of {type(held).__name__} with a press"
            raise GacError(given, "a DynamicCache, from which tokens can be taken", "Use cache_implementation=None.")
        prefilled(attention, layer, hidden, held, output[1], named)

    return after
