"""What a layer's budget of tokens loses, measured with that layer alone cut."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from gac.core.arrays import Floats
from gac.core.progress import progress_bar
from gac.evaluation.perplexity import window_divergences
from gac.measurement.store import read_arrays, write_tensors
from gac.models.modules import frozen, input_device
from gac.tokens.attending import attending
from gac.tokens.presses import evicted

Cached = tuple[Tensor, Tensor]


def measure_losses(
    model: PreTrainedModel,
    windows: Tensor,
    press: Any,
    layers: Sequence[int],
    budgets: Sequence[int],
    following: int,
    kept: Path,
    progress: bool,
) -> Floats:
    """The loss of every layer at every budget, nats a token, float64, shape ``(layers, budgets)``.

    Of layer l and k tokens it is ``1 / (N F) sum_n sum_t KL(p(x_t) || p_lk(x_t))`` over the F tokens that follow each
    of N contexts: p is the dense model's next-token distribution, and p_lk that with the cache of layer l cut to k
    tokens after the context. A press cuts after a layer has attended, so that one prefill serves all layers and
    budgets, and only the F tokens are run for each.

    Args:
        windows: token ids, shape ``(windows, context + following)``.
        kept: a directory; windows that are measured there are not measured again.
        progress: show a bar.
    """
    runs = len(layers) * len(budgets) * len(windows)
    total = np.zeros((len(layers), len(budgets)))
    with frozen(model), torch.no_grad(), progress_bar("tokens kept", "run", runs, shown=progress) as bar:
        for number, ids in enumerate(windows):
            path = kept / f"window-{number:04d}.safetensors"
            if not path.exists():
                found = _of_window(model, ids, press, layers, budgets, following, bar)
                write_tensors(path, {"losses": found})
            else:
                bar.update(len(layers) * len(budgets))
            total += read_arrays(path)["losses"]
    mean: Floats = total / len(windows)
    return mean


def _of_window(
    model: PreTrainedModel,
    ids: Tensor,
    press: Any,
    layers: Sequence[int],
    budgets: Sequence[int],
    following: int,
    bar: Any,
) -> Tensor:
    """Losses on one window."""
    ids = ids.to(input_device(model))[None]
    context, after = ids[:, :-following], ids[:, -following:]
    whole, cut = _prefilled(model, context, press, layers, budgets)
    positions = torch.arange(context.shape[1], ids.shape[1], device=ids.device)[None]
    found = torch.zeros(len(layers), len(budgets), dtype=torch.float64)
    with attending(model, layers, None):

        def logits(cached: Sequence[Cached]) -> Tensor:
            run: Tensor = model(input_ids=after, position_ids=positions, past_key_values=_cache(cached)).logits
            return run

        wanted = logits(whole)
        for row, layer in enumerate(layers):
            for column, budget in enumerate(budgets):
                cached = [*whole[:layer], cut[layer, budget], *whole[layer + 1 :]]
                lost = window_divergences(logits(cached), wanted)[0] / following
                found[row, column] = lost.clamp(min=0)
                bar.update()
    return found


def _prefilled(
    model: PreTrainedModel, context: Tensor, press: Any, layers: Sequence[int], budgets: Sequence[int]
) -> tuple[list[Cached], dict[tuple[int, int], Cached]]:
    """What all layers cache of a context, and what the press leaves of each layer at each budget."""
    cut: dict[tuple[int, int], Cached] = {}

    def each_budget(
        attention: nn.Module, layer: int, hidden: Tensor, cached: Any, weights: Tensor | None, given: Mapping[str, Any]
    ) -> None:
        held = cached.keys, cached.values
        cut.update({(layer, one): evicted(press, attention, hidden, held, weights, given, one) for one in budgets})

    cache = DynamicCache()
    with attending(model, layers, each_budget):
        model(input_ids=context, past_key_values=cache, use_cache=True, logits_to_keep=1)
    held: Any = cache.layers
    return [(layer.keys, layer.values) for layer in held], cut


def _cache(cached: Sequence[Cached]) -> DynamicCache:
    """One with these keys and values; they are copied."""
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(cached):
        cache.update(keys, values, layer)
    return cache
