"""What a workload runs: one prefill or one decoded token of a transformers model, ready to be captured as a graph."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache, PreTrainedModel, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from gac.core.errors import GacError
from gac.core.workloads import Workload
from gac.measurement.text import check_positions

_ATTENTION = "sdpa_whole"
READ = 1024
"""Tokens of a sequence that are read to fill a context."""

Step = Callable[[], Tensor]
_Layout = tuple[tuple[tuple[int, ...], ...], ...]


class Context:
    """A static cache that is full but for the last token, for every model of the same keys and values.

    What it holds is what the model wrote that made it, of the first ``READ`` tokens over and over: a long prompt of
    many sequences would take more memory than a step does. Other models only take as long over it.

    Args:
        model: reads the tokens, but for the last of each sequence.
        ids: int64, shape ``(batch, tokens)``.
    """

    def __init__(self, model: Any, ids: Tensor) -> None:
        self.before = ids.shape[1] - 1
        self.token = ids[:, -1:].contiguous()
        self.position = torch.full((1, 1), self.before, device=ids.device)
        self.cache = StaticCache(config=model.config, max_cache_len=ids.shape[1])
        with torch.no_grad():
            read = min(self.before, READ)
            model(input_ids=ids[:, :read], past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        layers: Any = self.cache.layers
        for states in (one for layer in layers if layer.is_initialized for one in (layer.keys, layer.values)):
            for known in range(read, states.shape[2], read):
                states[:, :, known : known + read] = states[:, :, : min(read, states.shape[2] - known)]
        # All layers' lengths in one tensor: a graph then winds them back with one kernel.
        self.lengths = torch.full((len(layers),), self.before, device=ids.device)
        for layer, length in zip(layers, self.lengths.unbind(), strict=True):
            layer.cumulative_length = length

    @property
    def nbytes(self) -> int:
        layers: Any = self.cache.layers
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in layers if layer.is_initialized)


class Contexts:
    """Those of one workload. Models of the same keys and values share one: with each its own they would not fit."""

    def __init__(self) -> None:
        self._workload: Workload | None = None
        self._kept: dict[_Layout, Context] = {}

    def of(self, model: Any, workload: Workload, ids: Tensor) -> Context:
        """That of the workload for this model, made where there is none."""
        if workload != self._workload:
            self._workload, self._kept = workload, {}
        layout = _layout(model, ids[:1, :1])
        if layout not in self._kept:
            self._kept[layout] = Context(model, ids)
        return self._kept[layout]


@torch.no_grad()
def _layout(model: Any, ids: Tensor) -> _Layout:
    """Shapes of the keys and values of these tokens in every layer that has any; a plan can make values shorter."""
    cache = DynamicCache(config=model.config)
    model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    layers: Any = cache.layers
    kept = ((layer.keys, layer.values) if layer.is_initialized else () for layer in layers)
    return tuple(tuple(tuple(one.shape) for one in pair) for pair in kept)


def prepare(model: PreTrainedModel, workload: Workload) -> Tensor:
    """Random token ids for the workload, on the model's device, int64, shape ``(batch, tokens)``.

    The model's attention then runs without a mask, in PyTorch's fused kernels with shared key-value heads.

    Raises:
        GacError: the context is longer than the model has positions for, or has one token.
    """
    check_positions(model, workload.tokens, f"sequences in {workload}")
    if workload.phase == "decode" and workload.tokens < 2:
        raise GacError(f"workload {workload}", "a context of 2 tokens or more", "Use decode:1@1024.")
    AttentionInterface.register(_ATTENTION, sdpa_attention_forward)  # a name without a mask function makes no mask
    model.set_attn_implementation(_ATTENTION)
    generator = torch.Generator().manual_seed(0)
    vocabulary = int(model.config.get_text_config().vocab_size)
    return torch.randint(0, vocabulary, (workload.batch, workload.tokens), generator=generator).to(model.device)


def prefill_step(model: Any, ids: Tensor) -> Step:
    """Read all tokens, keep keys and values in a new cache, and return the last logits, as ``generate`` takes them.

    Windows of sliding attention are ignored.
    """

    @torch.no_grad()
    def step() -> Tensor:
        cache = DynamicCache(config=model.config)
        logits: Tensor = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return logits

    return step


def decode_step(model: Any, context: Context) -> Step:
    """Read the last token of each sequence over the context, as often as it is called, and return its logits."""

    @torch.no_grad()
    def step() -> Tensor:
        context.lengths.fill_(context.before)
        logits: Tensor = model(
            input_ids=context.token,
            position_ids=context.position,
            past_key_values=context.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        return logits

    return step
