"""What a workload runs: one prefill or one decoded token of a transformers model, ready to be captured as a graph."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache, PreTrainedModel, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from gac.errors import GacError
from gac.sites import Workload

_ATTENTION = "sdpa_whole"

Step = Callable[[], Tensor]


def step_of(model: PreTrainedModel, workload: Workload, seed: int = 0) -> Step:
    """One run of the workload on random tokens; every call does the same work and returns the last logits.

    ``prefill`` reads ``tokens`` tokens of each sequence and keeps keys and values in a new cache. ``decode`` reads the
    last of ``tokens`` tokens over a static cache that is full with it: so no mask is needed, and attention runs in
    PyTorch's fused kernels with shared key-value heads. Logits are those of the last position, as ``generate`` takes
    them. Windows of sliding attention are ignored.

    Raises:
        GacError: the context is longer than the model has positions for, or has one token.
    """
    _check_length(model, workload)
    AttentionInterface.register(_ATTENTION, sdpa_attention_forward)  # a name without a mask function makes no mask
    model.set_attn_implementation(_ATTENTION)
    generator = torch.Generator().manual_seed(seed)
    vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    ids = torch.randint(0, vocabulary, (workload.batch, workload.tokens), generator=generator).to(model.device)
    return _prefill(model, ids) if workload.phase == "prefill" else _decode(model, ids)


def _prefill(model: Any, ids: Tensor) -> Step:
    @torch.no_grad()
    def step() -> Tensor:
        cache = DynamicCache(config=model.config)
        logits: Tensor = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return logits

    return step


def _decode(model: Any, ids: Tensor) -> Step:
    before = ids.shape[1] - 1
    cache = StaticCache(config=model.config, max_cache_len=ids.shape[1])
    with torch.no_grad():
        model(input_ids=ids[:, :-1], past_key_values=cache, use_cache=True, logits_to_keep=1)
    # All layers' lengths in one tensor: a graph then winds them back with one kernel.
    lengths = torch.full((len(cache.layers),), before, device=ids.device)
    for layer, length in zip(cache.layers, lengths.unbind(), strict=True):
        layer.cumulative_length = length  # type: ignore[attr-defined]
    token, position = ids[:, -1:].contiguous(), torch.full((1, 1), before, device=ids.device)

    @torch.no_grad()
    def step() -> Tensor:
        lengths.fill_(before)
        logits: Tensor = model(
            input_ids=token, position_ids=position, past_key_values=cache, use_cache=True, logits_to_keep=1
        ).logits
        return logits

    return step


def _check_length(model: PreTrainedModel, workload: Workload) -> None:
    most = getattr(model.config, "max_position_embeddings", None)
    if most is not None and workload.tokens > most:
        raise GacError(
            f"workload {workload}", f"at most {most} tokens, as the model has positions for", "Use shorter sequences."
        )
    if workload.phase == "decode" and workload.tokens < 2:
        raise GacError(f"workload {workload}", "a context of 2 tokens or more", "Use decode:1@1024.")


