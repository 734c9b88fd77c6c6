"""When the attention of one new token over latents runs in its kernel, and why not where a GPU runs it in PyTorch."""

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from gac.runtime.fusion import elementwise as one_launch
from gac.runtime.kernels.gpu import unsupported_reason, warn_slow_path_once
from gac.runtime.kernels.latent_attention.launch import Attention, attend
from gac.runtime.latents.quantise import QuantisedLatents
from gac.runtime.latents.rotation import Angles, Latents
from gac.runtime.limits import latents as refused
from gac.runtime.modules import BlockLinear

_kinds: WeakKeyDictionary[Any, str | None] = WeakKeyDictionary()
_SLOWLY = "latents are multiplied out in plain PyTorch at every token"
_PLAIN = {"softcap": "scores are capped", "s_aux": "attention has sinks", "position_bias": "scores have a bias"}
"""Options of attention that only PyTorch knows, and what is said of them."""


def decoded(
    attention: Any, seconds: tuple[Any, Any], query: Tensor, latents: Latents, mask: Any, options: Mapping[str, Any]
) -> Tensor | None:
    """Return what the kernel mixes, ``(batch, 1, heads, length)``; None where it cannot run, or need not.

    Args:
        seconds: the second factors of keys and of values; None where there are none.
        query: rotated, ``(batch, heads, new tokens, head_dim)``.
    """
    if query.shape[2] != 1 or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    angles = None if latents.rotation is None else latents.rotation.angles(attention, query.device)
    reason = _unfit(attention, seconds, query, latents, mask, options, angles)
    if reason is not None:
        warn_slow_path_once(query, reason, _SLOWLY)
        return None
    (k_factor, k_bias), (v_factor, v_bias) = (
        (None, None) if second is None else (second.weight, second.bias) for second in seconds
    )
    scale = options.get("scaling")
    (keys, k_scales), (values, v_scales) = map(_numbers_and_scales, (latents.keys, latents.values))
    return attend(
        Attention(
            query=query,
            keys=keys,
            values=values,
            k_scales=k_scales,
            v_scales=v_scales,
            k_factor=k_factor,
            k_bias=k_bias,
            v_factor=v_factor,
            v_bias=v_bias,
            mask=mask,
            frequencies=None if angles is None else angles.frequencies,
            turns=None if angles is None else angles.turns,
            positions=None if latents.rotation is None else latents.rotation.positions.table,
            length=latents.length,
            scale=(query.shape[-1] ** -0.5 if scale is None else scale) * (1.0 if angles is None else angles.scale),
            **_norm(attention, seconds[0]),
        )
    )


def _numbers_and_scales(latents: Tensor | QuantisedLatents) -> tuple[Tensor, Tensor | None]:
    return (latents, None) if isinstance(latents, Tensor) else (latents.numbers, latents.scales)


def _unfit(
    attention: Any,
    seconds: tuple[Any, Any],
    query: Tensor,
    latents: Latents,
    mask: Any,
    options: Mapping[str, Any],
    angles: Angles | None,
) -> str | None:
    key, value = seconds
    if (reason := unsupported_reason(query.device, query.dtype)) is not None:
        return reason
    name = attention.config._attn_implementation
    if ALL_ATTENTION_FUNCTIONS.get(name) is not sdpa_attention_forward:
        return f"the model's attention is {name}, not sdpa"
    if any(second is not None and type(second) is not BlockLinear for second in seconds):
        return "second factors are stored in few bits"
    if key is not None and (norm := norm_of(attention)) is not None and _kind(attention, norm) is None:
        return "keys have norms over all heads, or another norm than RMSNorm"
    if latents.rotation is not None and angles is None:
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
        _kinds[norm] = one_launch.norm_of(norm) if before and of_a_key else None
    return _kinds[norm]


def _norm(attention: Any, key: Any) -> dict[str, Any]:
    norm = None if key is None else norm_of(attention)
    if norm is None:
        return {}
    return {"norm": norm.weight, "eps": float(one_launch.eps_of(norm)), "kind": _kind(attention, norm)}
