"""Measure the loss of a layer's budget of tokens, with only that layer cut."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from gac.core.arrays import Floats
from gac.core.progress import progress_bar
from gac.evaluation.perplexity import window_divergences
from gac.measurement.store import read_arrays, write_tensors
from gac.models.modules import frozen, input_device
from gac.tokens.attending import Prefill, attending
from gac.tokens.presses import evicted

KeysValues = tuple[Tensor, Tensor]


def measure_losses(
    model: PreTrainedModel,
    windows: Tensor,
    press: Any,
    layers: Sequence[int],
    budgets: Sequence[int],
    following: int,
    folder: Path,
    progress: bool,
) -> Floats:
    """The loss of every layer at every budget, nats a token, float64, shape ``(layers, budgets)``.

    Of layer l and k tokens it is ``1 / (N F) sum_n sum_t KL(p(x_t) || p_lk(x_t))`` over the F tokens that follow each
    of N contexts: p is the dense model's next-token distribution, and p_lk that with the cache of layer l cut to k
    tokens after the context. A press cuts after a layer has attended, so that one prefill serves all layers and
    budgets, and only the F tokens are run for each.

    Args:
        windows: token ids, shape ``(windows, context + following)``.
        folder: stores the loss of each window; windows with a file there are not measured again.
    """
    runs = len(layers) * len(budgets) * len(windows)
    total = np.zeros((len(layers), len(budgets)))
    with frozen(model), torch.no_grad(), progress_bar("tokens kept", "run", runs, shown=progress) as bar:
        for number, ids in enumerate(windows):
            path = folder / f"window-{number:04d}.safetensors"
            if path.exists():
                bar.update(len(layers) * len(budgets))
            else:
                losses = _window_losses(model, ids, press, layers, budgets, following, bar)
                write_tensors(path, {"losses": losses})
            total += read_arrays(path)["losses"]
    mean: Floats = total / len(windows)
    return mean


def _window_losses(
    model: PreTrainedModel,
    ids: Tensor,
    press: Any,
    layers: Sequence[int],
    budgets: Sequence[int],
    following: int,
    bar: Any,
) -> Tensor:
    ids = ids.to(input_device(model))[None]
    context, after = ids[:, :-following], ids[:, -following:]
    cut: dict[tuple[int, int], KeysValues] = {}

    def cut_to_budgets(prefill: Prefill) -> None:
        for budget in budgets:
            cut[prefill.layer, budget] = evicted(press, prefill, budget)

    prefilled: Any = DynamicCache()
    with attending(model, layers, cut_to_budgets):
        model(input_ids=context, past_key_values=prefilled, use_cache=True, logits_to_keep=1)
    full = [(layer.keys, layer.values) for layer in prefilled.layers]
    positions = torch.arange(context.shape[1], ids.shape[1], device=ids.device)[None]

    def logits(cached: Sequence[KeysValues]) -> Tensor:
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(cached):
            cache.update(keys, values, layer)  # copies them
        result: Tensor = model(input_ids=after, position_ids=positions, past_key_values=cache).logits
        return result

    losses = torch.zeros(len(layers), len(budgets), dtype=torch.float64)
    with attending(model, layers, None):
        dense = logits(full)
        for row, layer in enumerate(layers):
            for column, budget in enumerate(budgets):
                cached = [*full[:layer], cut[layer, budget], *full[layer + 1 :]]
                divergence = window_divergences(logits(cached), dense)[0] / following
                losses[row, column] = divergence.clamp(min=0)
                bar.update()
    return losses
