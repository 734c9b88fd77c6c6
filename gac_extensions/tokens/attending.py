"""Attention whose cache length differs from layer to layer: a callback after each prefill, and masks that fit."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from gac.core.errors import GacError, ModelError
from gac.runtime.contract import CACHES
from gac.runtime.latents.attention import caches_latents
from gac_extensions.tokens.layers import not_pressed

_MASKED = ("sdpa", "eager")
"""Attentions of transformers that take a mask; flash attention needs none for new tokens behind cached ones."""


class Prefill(NamedTuple):
    """An attention that has read a context."""

    attention: nn.Module
    layer: int  # its number
    hidden: Tensor  # its inputs, ``(batch, tokens, hidden size)``
    cache: Any  # its layer of the cache, with keys and values ``(batch, key-value heads, tokens, head_dim)``
    weights: Tensor | None  # of attention, if it returns them
    arguments: Mapping[str, Any]  # its keyword arguments


def attentions(model: PreTrainedModel) -> list[nn.Module]:
    """The attention of every layer, where presses look for it.

    A ModelError says if they are kept elsewhere, cache latents, or have a mask that cannot differ by layer.
    """
    if caches_latents(model):
        expected = "a cache of keys and values, which presses score"
        remedy = "Plan the weights without the form latent, or keep all tokens."
        raise ModelError("a model that caches latents, with a press", expected, remedy)
    implementation = str(model.config._attn_implementation)
    if implementation not in _MASKED and not implementation.startswith("flash_attention"):
        problem, expected = f"attn_implementation {implementation!r} with a press", "sdpa, eager or flash_attention"
        raise ModelError(problem, expected, "Call model.set_attn_implementation('sdpa').")
    decoder: Any = getattr(model, "model", None)
    decoder = getattr(decoder, "language_model", decoder)
    layers = list(getattr(decoder, "layers", ()))
    modules = [layer.self_attn for layer in layers if hasattr(layer, "self_attn")]
    if not layers or len(modules) < len(layers) or not hasattr(decoder, "rotary_emb"):
        raise not_pressed(model.config.model_type)
    return modules


class EvictedLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Keys and values after eviction. The length counts evicted tokens too, so that positions continue."""

    context: int  # number of tokens before the eviction
    evicted: int  # number of those that were removed

    def get_seq_length(self) -> int:
        return super().get_seq_length() + self.evicted if self.is_initialized else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return super().get_seq_length() + query_length, self.evicted

    def crop(self, tokens: int) -> None:
        """Remove the last ``-tokens`` tokens, or all behind the first ``tokens``; a GacError if the context is cut."""
        removed = -tokens if tokens < 0 else self.get_seq_length() - tokens if tokens else 0
        if removed > self.get_seq_length() - self.context:
            problem = f"a cache that is cropped to {self.get_seq_length() - removed} tokens"
            raise GacError(problem, f"at least {self.context}, its context, which a press has cut", "Use a new cache.")
        if removed > 0:
            states: Any = self  # versions of transformers crop by other lengths
            states.keys, states.values = states.keys[..., :-removed, :], states.values[..., :-removed, :]

    def reset(self) -> None:
        super().reset()
        self.__class__ = DynamicLayer  # type: ignore[assignment]


def evict(layer: DynamicLayer, keys: Tensor, values: Tensor) -> None:
    """Replace a layer's keys and values by the kept ones, each ``(batch, key-value heads, tokens, head_dim)``."""
    context = layer.get_seq_length()
    layer.__class__ = EvictedLayer
    layer.keys, layer.values = keys, values
    layer.context, layer.evicted = context, context - keys.shape[-2]  # type: ignore[attr-defined]


@contextmanager
def attending(
    model: PreTrainedModel, layers: Sequence[int], prefilled: Callable[[Prefill], None] | None
) -> Iterator[None]:
    """Let the caches of these layers have lengths of their own.

    transformers makes one mask for all layers. Each of these gets its own: cached tokens precede all new ones, so all
    are visible, and new ones see each other causally.

    Args:
        prefilled: called after each of these attentions has read a context that nothing precedes.
    """
    modules, masked = attentions(model), model.config._attn_implementation in _MASKED
    decoder: Any = getattr(model.model, "language_model", model.model)
    with ExitStack() as stack:
        for layer in layers:
            attention = modules[layer]
            if not hasattr(attention, "rotary_emb"):
                attention.rotary_emb = _rotary(decoder.rotary_emb, attention)
                stack.callback(delattr, attention, "rotary_emb")
            before, after = partial(_before, layer, masked), partial(_after, layer, prefilled)
            stack.callback(attention.register_forward_pre_hook(before, with_kwargs=True).remove)
            if prefilled is not None:
                stack.callback(attention.register_forward_hook(after, with_kwargs=True).remove)
        yield


def _cache_of(arguments: Mapping[str, Any]) -> Any:
    return next((arguments[name] for name in CACHES if arguments.get(name) is not None), None)


def _rotary(rotary: Any, attention: Any) -> Any:
    if "layer_type" not in inspect.signature(rotary.forward).parameters:
        return rotary
    # Gemma-3 has a rotary embedding for each kind of layer.
    return partial(rotary, layer_type=attention.config.layer_types[attention.layer_idx])


def _before(layer: int, masked: bool, _: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    cache, hidden = _cache_of(named), named["hidden_states"]
    if cache is None:
        expected = "a cache, from which tokens can be taken: without one the model answers as if there were no press"
        raise GacError("a model without a cache, with a press", expected, "Run it with use_cache=True.")
    new, mask = hidden.shape[1], named.get("attention_mask")
    if new > 1 and mask is not None:
        _check_no_padding(mask, new)
    stored = cache.layers[layer] if layer < len(cache.layers) else None
    keys = getattr(stored, "keys", None)
    if not masked or not isinstance(stored, DynamicLayer) or keys is None or not keys.shape[-2]:
        return None
    cached = int(keys.shape[-2])
    added = None  # a single new token sees everything
    if new > 1:
        least = torch.finfo(hidden.dtype).min
        full = torch.full((new, cached + new), least, dtype=hidden.dtype, device=hidden.device)
        added = full.triu(cached + 1)[None, None]
    return args, named | {"attention_mask": added}


def _check_no_padding(mask: Tensor, new: int) -> None:
    # a press would keep padding tokens, and the masks here would show them
    last = (mask[..., -1, :] if mask.ndim == 4 else mask)[..., -new:]
    visible = last if last.dtype == torch.bool else last >= 0 if mask.ndim == 4 else last != 0
    if not bool(visible.all()):
        remedy = "Run texts of different lengths one by one."
        raise GacError("a padded batch with a press", "texts of one length, without padding", remedy)


def _after(layer: int, prefilled: Any, attention: nn.Module, _: Any, named: dict[str, Any], output: Any) -> None:
    cache, hidden = _cache_of(named), named["hidden_states"]
    stored = cache.layers[layer]
    if int(stored.get_seq_length()) != hidden.shape[1]:
        return
    offloaded = "offloaded " if getattr(cache, "offloading", False) else ""
    if offloaded or type(stored) is not DynamicLayer:
        problem = f"a {offloaded}{type(cache).__name__} of {type(stored).__name__} with a press"
        raise GacError(problem, "a DynamicCache, from which tokens can be taken", "Use cache_implementation=None.")
    prefilled(Prefill(attention, layer, hidden, stored, output[1], named))
