"""Attention whose cache keeps latents: what the first factors of k_proj and v_proj write, before norms and rotation.

PaLU (arXiv 2407.21118) keeps such a cache. Any cache of transformers holds latents: they lie in it as the keys and
values of one head, ``(batch, 1, tokens, groups * rank)``; those of few bits as words of 16 bits, the scales of a token
with it (``gac.runtime.latents.quantise``). When attention reads them, the second factors make
features of them, and keys pass the norms and the rotary embedding of their model, at the positions that they have.

The model's own attention module runs, with its own queries, masks and options. Only what it asks of its cache is
answered here, and ``attend_latents`` is where it then attends.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache
from transformers.cache_utils import DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from gac.runtime.contract import CACHES
from gac.runtime.fusion.elementwise import rotate_of, with_fused_updates
from gac.runtime.latents.decode import decode
from gac.runtime.latents.positions import QUANTIZED, Positions, update_positions
from gac.runtime.latents.quantise import QuantisedLatents, pack_latents
from gac.runtime.latents.rotation import Latents, Rotary
from gac.runtime.latents.rounded import Parts, RoundedLayer, Rounding, attend_rounded
from gac.runtime.modules import BlockLinear
from gac.runtime.storage.modules import StoredBlocks

_ATTENTION = "gac_latents"
_PAIRS = ("k_proj", "v_proj")
_ROTATES: dict[str, Callable[[Any], bool]] = {  # attentions that rotate keys in some layers only, and in which
    "Cohere2Attention": lambda attention: attention.sliding_window is not None,
    "Exaone4Attention": lambda attention: attention.sliding_window is None or attention.is_sliding,
    "SmolLM3Attention": lambda attention: bool(attention.use_rope),
}


def attend_latents(
    attention: Any, query: Tensor, latents: Latents, mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Attend over latents: of one new token in a kernel where it can run, and on every device in PyTorch.

    There the second factors ``k_proj.second`` and ``v_proj.second`` rebuild keys and values of all tokens, and the
    attention that the model's config names attends to them, with its ``options``. The query is rotated, shape
    ``(batch, heads, new tokens, head_dim)``. Returns the mixed values ``(batch, new tokens, heads, head_dim)``, and
    attention weights or None.
    """
    seconds = _second_factors(attention)
    if seconds[0] is not None and (factor := getattr(attention, "key_multiplier", 1)) != 1:
        query = query * factor  # as the keys of Falcon-H1
    if (mixed := decode(attention, seconds, query, latents, mask, options)) is not None:
        return mixed, None
    keys, values = (
        item if isinstance(item, Tensor | Parts) else item.values(query.dtype)
        for item in (latents.keys, latents.values)
    )
    k_second, v_second = seconds
    if isinstance(keys, Parts):
        pass
    elif k_second is None:
        keys = _heads(keys, attention.head_dim)
    else:
        rotary, positions = latents.rotary, latents.positions
        tables = None if rotary is None or positions is None else rotary.tables(keys, positions)
        keys = _made_keys(attention, k_second(keys, is_rounded=True), tables)
    if isinstance(values, Parts):
        pass
    elif v_second is None:
        values = _heads(values, getattr(attention.v_proj, "length", attention.head_dim))
    else:
        values = _heads(v_second(values, is_rounded=True), attention.head_dim)
    return _attended(attention, query, (keys, values), mask, options)


def _attended(
    attention: Any, query: Tensor, states: Sequence[Tensor | Parts], mask: Tensor | None, options: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    attend, roundings = own_interface(attention, attention.config), roundings_of(attention)
    if any(roundings):
        return attend_rounded(attend, attention, query, states, mask, roundings, **options)
    attended: tuple[Tensor, Tensor | None] = attend(attention, query, *states, mask, **options)
    return attended


def second_factor(pair: Any) -> Any:
    """Return what makes features of a weight's latents; None where it has none."""
    second = getattr(pair, "second", None)
    return second if isinstance(second, BlockLinear | StoredBlocks) else None


def _second_factors(attention: Any) -> list[Any]:
    return [second_factor(getattr(attention, name, None)) for name in _PAIRS]


def roundings_of(attention: Any) -> tuple[Rounding | None, ...]:
    """Return how a cache rounds keys, and values; None where it does not."""
    bits = {name: getattr(getattr(attention, name, None), "cache_bits", None) for name in _PAIRS}
    return tuple(Rounding(count, name == "k_proj") if count else None for name, count in bits.items())


@contextmanager
def rounding_caches(model: Any) -> Iterator[None]:
    """Let attentions of a model round keys and values of few bits, which it has for a while."""
    AttentionInterface.register(_ATTENTION, _attend)
    hooks = [
        module.register_forward_pre_hook(_Caching(None), with_kwargs=True)
        for module in model.modules()
        if any(roundings_of(module))
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def cache_latents(model: Any) -> None:
    """Let attentions cache the latents of k_proj or v_proj, or their few bits; in place, and no more than once.

    The model is as it runs: its pairs may share their first GEMMs.
    """
    AttentionInterface.register(_ATTENTION, _attend)
    rotary = getattr(model.base_model, "rotary_emb", None)
    for attention in model.modules():
        seconds = [second for second in _second_factors(attention) if second is not None]
        for second in seconds:
            if _note_latents not in second._forward_pre_hooks.values():
                second.noting, second.noted = False, None
                second.register_forward_pre_hook(_note_latents)
        caches = seconds or any(roundings_of(attention))
        if caches and not any(isinstance(hook, _Caching) for hook in attention._forward_pre_hooks.values()):
            attention.register_forward_pre_hook(_Caching(rotary), with_kwargs=True)
            if rotary is not None and _note_positions not in rotary._forward_pre_hooks.values():
                rotary.register_forward_pre_hook(_note_positions, with_kwargs=True)


def caches_latents(model: nn.Module) -> bool:
    """Return whether its cache keeps anything else than keys and values as they are."""
    return any(any(_second_factors(module)) or any(roundings_of(module)) for module in model.modules())


def _note_latents(second: Any, inputs: tuple[Tensor]) -> tuple[Tensor, bool] | None:
    """Before a second factor runs: note what its attention's cache keeps, where it has one; of few bits words.

    Latents that were rounded for that are what it reads.
    """
    if not second.noting:
        return None
    (latents,) = inputs
    if second.bits is None:
        second.noted = latents
        return None
    second.noted, latents = pack_latents(latents, second.blocks, second.bits)
    return latents, True


def _note_positions(rotary: Any, args: Any, named: dict[str, Any]) -> None:
    rotary.noted = named["position_ids"] if "position_ids" in named else args[1]


class _Caching:
    """A hook that puts itself between an attention and its cache."""

    def __init__(self, rotary: Any) -> None:
        self.rotary = rotary

    def __call__(self, attention: Any, args: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        seconds, roundings = _second_factors(attention), roundings_of(attention)
        if any(roundings):
            if isinstance(attention.config, _Attending):  # of a call that failed
                attention.config = attention.config.config
            _check_attends(attention)
            attention.config = _Attending(attention.config)
        positions = named.get("position_ids", getattr(self.rotary, "noted", None))  # not all layers hand them on
        caches = {
            name: _LatentCache(self.rotary, attention, seconds, roundings, named[name], positions)
            for name in CACHES
            if isinstance(named.get(name), Cache)
        }
        for second in seconds:
            if caches and second is not None:
                second.noting = True
        return args, named | caches


@dataclass(frozen=True, eq=False)
class _LatentCache:
    """A cache, as one attention sees it in one call."""

    module: Any
    attention: Any
    seconds: list[Any]
    roundings: Sequence[Rounding | None]
    cache: Any
    position_ids: Tensor | None

    def update(self, keys: Tensor, values: Tensor, layer: int, *rest: Any, **named: Any) -> Any:
        """Keep the latents of new tokens; hand on what is attended to: these, or latents of all tokens."""
        new = [_to_cache(second, states) for second, states in zip(self.seconds, (keys, values), strict=True)]
        dtypes = [item.dtype for item in new]
        if torch.int16 in dtypes and not any(
            self.roundings
        ):  # both are words then: caches of some versions of transformers have one dtype
            new = [item.view(torch.int16) for item in new]
        self._check(layer, new)
        rotary, positions = self._rotation(layer, new[0])
        cached = with_fused_updates(self.cache).update(*new, layer, *rest, **named)
        tokens = cached[0].joined_tokens if isinstance(cached[0], Parts) else cached[0].shape[-2]
        if positions is not None and positions.table.shape[1] != tokens:
            raise ValueError(
                f"layer {layer} of the cache has {tokens} tokens and {positions.table.shape[1]} positions; expected "
                "as many. Change all layers together, by the methods of the cache, or give it a new cache."
            )
        if tokens == keys.shape[-2]:  # all of it is new, and made already
            return keys, values
        end = self.cache.get_seq_length(layer)  # a tensor of a static cache, which counts in place
        if not isinstance(end, Tensor):
            end = None if end >= tokens else torch.full((), end, device=cached[0].device)
        lengths = keys.shape[-1], values.shape[-1]
        stored = list(map(_from_cache, self.seconds, cached, dtypes, lengths))
        latents = Latents(stored[0], stored[1], end, rotary, positions)
        if not isinstance(self.attention.config, _Attending):
            self.attention.config = _Attending(self.attention.config)
        return latents, latents

    def _check(self, layer: int, new: list[Tensor]) -> None:
        while layer >= len(self.cache.layers):  # of a cache that adds layers as they are asked for
            self.cache.layers.append(self.cache.layer_class_to_replicate())
        stored: Any = self.cache.layers[layer]
        if any(self.roundings) or isinstance(stored, RoundedLayer):
            self._check_rounds(layer, stored)
            return
        words = new[0].dtype == torch.int16
        if words and isinstance(stored, QUANTIZED):
            raise ValueError(
                f"layer {layer} of the cache is a {type(stored).__name__}, which rounds what it keeps; expected one "
                "that keeps it as it is: this model's latents are rounded already. Give it a dynamic or a static cache."
            )
        if not getattr(stored, "is_initialized", False) or not stored.keys.numel():
            return
        if stored.keys.shape[1::2] != new[0].shape[1::2] or (stored.keys.dtype == torch.int16) != words:
            (heads, length), kind = stored.keys.shape[1::2], "words" if stored.keys.dtype == torch.int16 else "numbers"
            raise ValueError(
                f"layer {layer} of the cache holds keys of {heads} heads of {length} {kind}; expected 1 of "
                f"{new[0].shape[-1]}, the latents that this model keeps of a token. Give it a new cache, not one that "
                "another model has filled or that early_initialization has laid out."
            )

    def _check_rounds(self, layer: int, stored: Any) -> None:
        """Put a layer that rounds in the place of an empty one that keeps all tokens as they are."""
        if isinstance(stored, RoundedLayer) and stored.roundings == tuple(self.roundings):
            return
        if type(stored) is not DynamicLayer or stored.get_seq_length():
            raise ValueError(
                f"layer {layer} of the cache is a {type(stored).__name__} with {stored.get_seq_length()} tokens; "
                "expected an empty DynamicLayer, in whose place one is put that rounds as this model does. Give it a "
                "new DynamicCache: static, sliding and quantised caches cannot hold keys and values of few bits."
            )
        self.cache.layers[layer] = RoundedLayer(self.roundings)

    def _rotation(self, layer: int, latents: Tensor) -> tuple[Rotary | None, Positions | None]:
        if self.seconds[0] is None or self.module is None or not _rotates(self.attention):
            return None, None
        assert self.position_ids is not None, f"{type(self.attention).__name__} was given no position_ids"
        rotary = Rotary.of(self.module, self.attention)
        position_ids = self.position_ids.to(latents.device).expand(len(latents), -1)
        frequencies = rotary.frequencies if rotary.moves else None
        positions = update_positions(self.cache, layer, rotary.kind, position_ids, frequencies)
        return rotary, positions.to(latents.device)


def _to_cache(second: Any, states: Tensor) -> Tensor:
    """Latents, or states ``(batch, heads, tokens, length)`` where there are none, as the cache has them."""
    if second is None:
        return states.transpose(1, 2).flatten(2).unsqueeze(1)
    latents: Tensor = second.noted
    second.noting, second.noted = False, None
    return latents.unsqueeze(1)


def _from_cache(
    second: Any, states: Tensor | Parts, dtype: torch.dtype, length: int
) -> Tensor | QuantisedLatents | Parts:
    if isinstance(states, Parts):
        return Parts(*(_heads(part.squeeze(1), length) for part in (states.old, states.exact)))
    stored = states.squeeze(1)
    if second is None or second.bits is None:
        return stored.view(dtype)
    return QuantisedLatents(stored, second.blocks, second.in_features // second.blocks, second.bits)


class _Attending:
    """The config of an attention, which names ``_attend``; from when latents are handed on until it is called."""

    _attn_implementation = _ATTENTION

    def __init__(self, config: Any) -> None:
        self.config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self.config, name)


def _attend(
    attention: Any, query: Tensor, latents: Any, also: Any, mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    attention.config = attention.config.config
    if isinstance(latents, Latents):
        return attend_latents(attention, query, latents, mask, **options)
    return _attended(attention, query, (latents, also), mask, options)


def _check_attends(attention: Any) -> None:
    name = attention.config._attn_implementation
    if name not in ("sdpa", "eager"):
        raise ValueError(
            f"attention {name} over keys and values of few bits; expected sdpa or eager. Set one of these."
        )
    if getattr(attention, "sliding_window", None):
        value = f"a sliding window of {attention.sliding_window} tokens over keys and values of few bits"
        raise ValueError(f"{value}; expected attention over all tokens. Leave the form kv_bits out.")


def own_interface(attention: Any, config: Any) -> Any:
    """The attention that the model's config names, for a module of its."""
    eager = sys.modules[type(attention).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, eager)


def _rotates(attention: Any) -> bool:
    local = _ROTATES.get(type(attention).__name__)
    return rotate_of(type(attention)) is not None and (local is None or local(attention))


def _heads(features: Tensor, length: int) -> Tensor:
    return features.view(*features.shape[:-1], features.shape[-1] // length, length).transpose(1, 2)


def _made_keys(attention: Any, features: Tensor, tables: tuple[Tensor, Tensor] | None) -> Tensor:
    norm = getattr(attention, "k_norm", None) or getattr(attention, "k_layernorm", None)
    keys = _heads(features, attention.head_dim) if norm is None else _normed(norm, features, attention.head_dim)
    if tables is not None:
        size = tables[0].shape[-1]
        rotated, rest = keys[..., :size], keys[..., size:]
        _, rotated = rotate_of(type(attention))(rotated[:, :0], rotated, *tables)  # of no queries
        keys = torch.cat((rotated, rest), dim=-1)
    after: nn.Module | None = getattr(attention, "key_layernorm", None)
    return keys if after is None else after(keys)


def _normed(norm: Any, features: Tensor, head_dim: int) -> Tensor:
    if hasattr(norm, "norms"):  # StableLM: one norm a head, which read them from axis 1
        keys: Tensor = norm(_heads(features, head_dim))
        return keys
    if norm.weight.shape == features.shape[-1:]:
        return _heads(norm(features), head_dim)
    normed: Tensor = norm(features.view(*features.shape[:-1], -1, head_dim))
    return normed.transpose(1, 2)
