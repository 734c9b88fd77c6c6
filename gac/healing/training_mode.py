"""Settings under which models are trained: deterministic kernels, fused norms, and attention without masks.

While a CUDA graph is captured, transformers cannot see that windows are not packed sequences. It passes a mask to
attention, which makes PyTorch's kernels slower. Gradients of cuDNN's attention are not deterministic. Those of
FlashAttention are only if deterministic algorithms are required strictly, which other kernels refuse; so this is done
around these gradients alone. Layers with a sliding window shorter than the text keep their mask.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils.import_utils import is_tracing

from gac.models.families import text_config
from gac.models.modules import autocast_dtype
from gac.runtime.fusion.elementwise import Forward, Norm, eps_of, fuse_elementwise
from gac.runtime.kernels.gpu import SIXTEEN_BIT

_NAME = "gac_windows"
_MULTIPLE, _LARGEST = 8, 192
"""FlashAttention has gradients on every GPU for head sizes that are multiples of the first, up to the second."""
_UNSUPPORTED = ("dropout", "output_attentions", "position_bias", "softcap")
_PACKED = "find_packed_sequence_indices"
_STRICT = Lock()
_flash: Any = torch.ops.aten._scaled_dot_product_flash_attention
_flash_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_backward


@contextmanager
def training_mode(*models: Any) -> Iterator[None]:
    """Run models deterministically, with fused norms and attention without masks; all is undone on exit."""
    with deterministic_kernels(models[0].device), fused_norms(*models), maskless_attention(*models):
        yield


@contextmanager
def deterministic_kernels(device: torch.device) -> Iterator[None]:
    """Use deterministic kernels on a GPU, as far as PyTorch has them; those of a CPU always are."""
    if device.type != "cuda":
        yield
        return
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        with _deterministic(warn_only=True), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic.*")
            yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


@contextmanager
def _deterministic(warn_only: bool) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@contextmanager
def fused_norms(*models: nn.Module) -> Iterator[None]:
    """Run norms, rotary embeddings and the teacher's gated products in one kernel each, except patched modules."""
    before = {module: vars(module).get("forward") for model in models for module in model.modules()}
    try:
        for model in models:
            fuse_elementwise(model)
        norms = {module: norm for module in before if isinstance(norm := vars(module).get("forward"), Norm)}
        for module, norm in norms.items():
            module.forward = _TrainedNorm(module, norm.kind)
        yield
    finally:
        for module, forward in before.items():
            vars(module).pop("forward", None)
            if forward is not None:
                module.forward = forward


class _TrainedNorm(Forward):
    """A float32 RMSNorm with gradients in one kernel. A 16-bit one rounds between its steps, and runs as before."""

    def __init__(self, norm: nn.Module, kind: str) -> None:
        super().__init__(norm)
        self._eps, self._offset = eps_of(norm), 1.0 if kind == "gemma" else 0.0

    def __call__(self, hidden_states: Tensor) -> Tensor:
        weight = self.module.weight
        assert isinstance(weight, Tensor)
        if (hidden_states.dtype, weight.dtype) != (torch.float32, torch.float32):
            y: Tensor = self.plain(hidden_states)
            return y
        gain = weight + self._offset if self._offset else weight
        y = functional.rms_norm(hidden_states, gain.shape, gain, self._eps)
        return y.to(autocast_dtype(y))  # else it would be rounded again for every weight that reads it


@contextmanager
def maskless_attention(*models: Any) -> Iterator[None]:
    """Replace the SDPA attention of models on GPUs by deterministic FlashAttention without masks."""
    AttentionInterface.register(_NAME, _attend)
    AttentionMaskInterface.register(_NAME, _mask)
    configs = [text_config(each.config) for each in models if _has_flash(each.device)]
    configs = [config for config in configs if config._attn_implementation == "sdpa"]
    find = getattr(masking_utils, _PACKED, None)
    try:
        for config in configs:
            config._attn_implementation = _NAME
        if configs and find is not None:
            setattr(masking_utils, _PACKED, lambda ids: None if is_tracing(ids) else find(ids))
        yield
    finally:
        for config in configs:
            config._attn_implementation = "sdpa"
        if find is not None:
            setattr(masking_utils, _PACKED, find)


def _has_flash(device: torch.device) -> bool:
    return (
        device.type == "cuda"
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def _mask(**options: Any) -> Tensor | None:
    window, keys = options.get("local_size"), options["kv_length"]
    causal = options.get("allow_is_causal_skip", True) and options.get("attention_mask") is None
    full = options["q_length"] == keys and (window is None or window >= keys)
    return None if causal and full else sdpa_mask(**options)


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Transformers' attention call: ``(batch, heads, tokens, size)`` each, returns ``(batch, tokens, heads, size)``."""
    dtype = autocast_dtype(query)
    size = max(query.shape[-1], value.shape[-1])
    causal = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    causal = causal and attention_mask is None and query.shape[2] == key.shape[2]
    supported = query.is_cuda and dtype in SIXTEEN_BIT and size <= _LARGEST and not any(map(options.get, _UNSUPPORTED))
    if not (supported and causal):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    scale, padded = options.get("scaling") or query.shape[-1] ** -0.5, -(-size // _MULTIPLE) * _MULTIPLE
    heads = (_padded(states.to(dtype), padded) for states in (query, key, value))
    output: Tensor = _FlashAttention.apply(*heads, scale)  # type: ignore[no-untyped-call]
    return output[..., : value.shape[-1]].transpose(1, 2).contiguous(), None


def _padded(heads: Tensor, size: int) -> Tensor:
    return heads if heads.shape[-1] == size else functional.pad(heads, (0, size - heads.shape[-1]))


class _FlashAttention(torch.autograd.Function):
    """Causal FlashAttention (arXiv 2307.08691) with deterministic gradients; supports grouped queries."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        output, log_sums, *lengths, state, unused, _ = _flash(query, key, value, 0.0, True, scale=scale)
        ctx.save_for_backward(query, key, value, output, log_sums, state, unused)
        ctx.lengths, ctx.scale = lengths, scale
        return output  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        *saved, state, unused = ctx.saved_tensors
        with _STRICT, _deterministic(warn_only=False):
            by_input = _flash_backward(gradients[0], *saved, *ctx.lengths, 0.0, True, state, unused, scale=ctx.scale)
        return *by_input, None
