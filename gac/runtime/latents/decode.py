"""When the attention of one new token over latents runs in its kernel, and why not where a GPU runs it in PyTorch."""

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from gac.runtime.fusion import elementwise
from gac.runtime.kernels.gpu import unsupported_reason, warn_slow_path_once
from gac.runtime.kernels.latent_attention.launch import Attention, attend
from gac.runtime.latents.rotation import Angles, Latents
from gac.runtime.latents.rounded import Parts
from gac.runtime.limits import latents as refused
from gac.runtime.modules import BlockLinear

_kinds: WeakKeyDictionary[Any, str | None] = WeakKeyDictionary()
_PLAIN = {"softcap": "scores are capped", "s_aux": "attention has sinks", "position_bias": "scores have a bias"}
"""Options of attention that only PyTorch knows, and what is said of them."""


def decode(
    attention: Any, seconds: Sequence[Any], query: Tensor, latents: Latents, mask: Any, options: Mapping[str, Any]
) -> Tensor | None:
    """Return what the kernel mixes, ``(batch, 1, heads, length)``; None where it cannot run, or need not.

    ``seconds`` are the second factors of keys and of values, or None; the query is rotated, ``(batch, heads, tokens,
    head_dim)``.
    """
    if query.shape[2] != 1 or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    angles = None if latents.rotary is None else latents.rotary.angles(attention, query.device)
    reason = _unsupported_reason(attention, seconds, query, latents, mask, options, angles)
    if reason is not None:
        warn_slow_path_once(query, reason, "latents are multiplied out in plain PyTorch at every token")
        return None
    assert not isinstance(latents.keys, Parts)
    assert not isinstance(latents.values, Parts)
    inputs: dict[str, Any] = dict.fromkeys(("frequencies", "turns", "positions"))
    for name, second, item in zip("kv", seconds, (latents.keys, latents.values), strict=True):
        inputs[f"{name}_factor"] = None if second is None else second.weight
        inputs[f"{name}_bias"] = None if second is None else second.bias
        inputs[f"{name}_scales"] = None if isinstance(item, Tensor) else item.scales
    keys, values = (item if isinstance(item, Tensor) else item.numbers for item in (latents.keys, latents.values))
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    if angles is not None and latents.positions is not None:
        inputs |= {"frequencies": angles.frequencies, "turns": angles.turns, "positions": latents.positions.table}
        scale *= angles.scale
    if seconds[0] is not None and (norm := norm_of(attention)) is not None:
        inputs |= {"norm": norm.weight, "eps": float(elementwise.eps_of(norm)), "kind": _kind(attention, norm)}
    return attend(Attention(query, keys, values, mask=mask, length=latents.length, scale=scale, **inputs))


def _unsupported_reason(
    attention: Any,
    seconds: Sequence[Any],
    query: Tensor,
    latents: Latents,
    mask: Any,
    options: Mapping[str, Any],
    angles: Angles | None,
) -> str | None:
    key, value = seconds
    if isinstance(latents.keys, Parts) or isinstance(latents.values, Parts):
        return "keys or values are in few bits, and no latents"
    if (reason := unsupported_reason(query.device, query.dtype)) is not None:
        return reason
    name = attention.config._attn_implementation
    if ALL_ATTENTION_FUNCTIONS.get(name) is not sdpa_attention_forward:
        return f"the model's attention is {name}, not sdpa"
    if any(second is not None and type(second) is not BlockLinear for second in seconds):
        return "second factors are stored in few bits"
    if key is not None and (norm := norm_of(attention)) is not None and _kind(attention, norm) is None:
        return "keys have norms over all heads, or another norm than RMSNorm"
    if latents.rotary is not None and angles is None:
        return "keys are rotated in another way than by one angle a place, in halves"
    if message := next((message for option, message in _PLAIN.items() if options.get(option) is not None), None):
        return message
    if options.get("dropout"):
        return "there is dropout"
    if mask is not None and mask.shape[1:] != (1, 1, latents.tokens):
        return f"the mask has shape {tuple(mask.shape)}"
    k_rank = 0 if key is None else key.weight.shape[2]
    v_rank = getattr(attention.v_proj, "length", attention.head_dim) if value is None else value.weight.shape[2]
    return refused(query.shape[-1], k_rank, v_rank)


def norm_of(attention: Any) -> Any:
    """Return what keys pass before or after they are rotated; None: nothing."""
    names = ("k_norm", "k_layernorm", "key_layernorm")
    return next((norm for name in names if (norm := getattr(attention, name, None)) is not None), None)


def _kind(attention: Any, norm: Any) -> str | None:
    if norm not in _kinds:
        before = norm is not getattr(attention, "key_layernorm", None)
        weight = getattr(norm, "weight", None)
        of_a_key = isinstance(weight, Tensor) and weight.shape == (attention.head_dim,)
        _kinds[norm] = elementwise.norm_of(norm) if before and of_a_key else None
    return _kinds[norm]
