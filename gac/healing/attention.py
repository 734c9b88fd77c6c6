"""Attention over whole windows on a GPU: without a mask, and with gradients that are added in one order.

While a CUDA graph is captured, transformers cannot see that windows are no packed sequences. So it hands a mask to
attention, and PyTorch's kernels are slower with one. The gradients of cuDNN's attention are added in another order
every time. Those of FlashAttention are added in one order only where deterministic algorithms are an absolute demand,
which makes other kernels refuse to run. So that is demanded around these gradients alone. Layers with a window that is
shorter than the text keep their mask, and run as before.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils.import_utils import is_tracing

from gac.healing.repeatable import deterministic
from gac.runtime.kernels.gpu import SIXTEEN_BIT

_NAME = "gac_windows"
_MULTIPLE, _LARGEST = 8, 192
"""Sizes of heads that FlashAttention has gradients for on every GPU: multiples of the one, up to the other."""
_MORE = ("dropout", "output_attentions", "position_bias", "softcap")
"""Options that ask for another attention."""
_PACKED = "find_packed_sequence_indices"
"""Transformers' function that looks for packed sequences."""
_STRICT = Lock()
"""Held by the thread that asks for deterministic algorithms alone."""
_flash: Any = torch.ops.aten._scaled_dot_product_flash_attention
_flash_back: Any = torch.ops.aten._scaled_dot_product_flash_attention_backward


@contextmanager
def of_windows(*models: Any) -> Iterator[None]:
    """With the attention of models on GPUs that run PyTorch's; as it was on exit."""
    AttentionInterface.register(_NAME, _attend)
    AttentionMaskInterface.register(_NAME, _mask)
    with ExitStack() as after:
        for model in models:
            if model.config._attn_implementation == "sdpa" and _has_flash(model.device):
                after.callback(setattr, model.config, "_attn_implementation", "sdpa")
                model.config._attn_implementation = _NAME
                after.enter_context(_never_packed())
        yield


@contextmanager
def _never_packed() -> Iterator[None]:
    """With no sequences found to be packed while a CUDA graph is captured, where transformers cannot look."""
    look = getattr(masking_utils, _PACKED, None)
    if look is None:
        yield
        return
    setattr(masking_utils, _PACKED, lambda ids: None if is_tracing(ids) else look(ids))
    try:
        yield
    finally:
        setattr(masking_utils, _PACKED, look)


def _has_flash(device: torch.device) -> bool:
    return (
        device.type == "cuda"
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def _mask(**given: Any) -> Tensor | None:
    """No mask where each token attends to all before it and to itself, and transformers' own elsewhere."""
    window = given.get("local_size")
    causal = given.get("allow_is_causal_skip", True) and given.get("attention_mask") is None
    whole = given["q_length"] == given["kv_length"] and (window is None or window >= given["kv_length"])
    return None if causal and whole else sdpa_mask(**given)


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """What transformers calls, ``(batch, heads, tokens, size)`` each; ``(batch, tokens, heads, size)`` of it."""
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    size = max(query.shape[-1], value.shape[-1])
    asked = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if asked is None else asked
    causal = causal and attention_mask is None and query.shape[2] == key.shape[2]
    runs = query.is_cuda and dtype in SIXTEEN_BIT and size <= _LARGEST
    if not (runs and causal) or any(options.get(one) for one in _MORE):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    scale, wide = options.get("scaling") or query.shape[-1] ** -0.5, -(-size // _MULTIPLE) * _MULTIPLE
    given = (_widened(one.to(dtype), wide) for one in (query, key, value))
    found: Tensor = _InOneOrder.apply(*given, scale)  # type: ignore[no-untyped-call]
    return found[..., : value.shape[-1]].transpose(1, 2).contiguous(), None


def _widened(heads: Tensor, size: int) -> Tensor:
    """With zeros behind each vector, up to a size; as they are where they have it."""
    return heads if heads.shape[-1] == size else functional.pad(heads, (0, size - heads.shape[-1]))


class _InOneOrder(torch.autograd.Function):
    """FlashAttention (arXiv 2307.08691), causal; heads of keys and values are shared where there are fewer."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        found, sums, *lengths, state, unused, _ = _flash(query, key, value, 0.0, True, scale=scale)
        ctx.save_for_backward(query, key, value, found, sums, state, unused)
        ctx.lengths, ctx.scale = lengths, scale
        out: Tensor = found
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *by: Any) -> Any:
        *held, state, unused = ctx.saved_tensors
        with _STRICT, deterministic(warn_only=False):
            gradients = _flash_back(by[0], *held, *ctx.lengths, 0.0, True, state, unused, scale=ctx.scale)
        return *gradients, None
