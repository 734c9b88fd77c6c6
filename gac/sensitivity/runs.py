"""What a change of the model loses, by running the model with it: the divergence from what the dense one predicts."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gac.linalg import check_measured
from gac.models.linears import read_weight
from gac.models.modules import input_device, swapped
from gac.models.sites import Weight
from gac.sensitivity.layerwise import LayerStack, frozen, listening

TOKENS = 4096
"""Tokens that tell what a change loses well enough, in whole windows."""


def sampled(windows: Tensor) -> Tensor:
    """``TOKENS`` of them, in even steps, in whole windows."""
    return windows[:: -(-len(windows) * windows.shape[1] // TOKENS)]


def diverged(dense: Tensor, changed: Tensor) -> Tensor:
    """The mean Kullback-Leibler divergence of one model from another, from logarithms ``(tokens, vocabulary)``."""
    found: Tensor = (dense.exp() * (dense - changed)).sum(-1).mean()
    return found


class ModelRuns:
    """A model that is run on a few windows of text, with some of its modules changed, from the first that is.

    The hidden states at every layer and the dense model's predictions stay on the device.

    Args:
        model: a causal LM, dense.
        layers: its decoder layers, in order.
        windows: calibration token ids, int64, shape ``(windows, tokens)``; ``TOKENS`` of them are used, in even steps.
        weights: those among them that write from a block have their mean outputs taken.

    Raises:
        ModelError: a layer is not called with hidden states first.
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[nn.Module], windows: Tensor, weights: Sequence[Weight]
    ) -> None:
        self.model, self._stack = model, LayerStack(model, layers)
        self._layer_of = {module: at for at, layer in enumerate(layers) for module in layer.modules()}
        self._windows = sampled(windows)
        self._states: list[list[Tensor]] = [[] for _ in layers]
        self._means: dict[str, Tensor] = {}
        hooks = {weight.name: self._hearing(weight.name) for weight in weights if weight.block == "in"}
        self._dense = []
        with frozen(model), torch.no_grad(), self._stack.traced(0, self._keep), listening(model, hooks):
            for ids in self._windows:
                logits = model(input_ids=ids.to(input_device(model))[None], use_cache=False).logits[0]
                self._dense.append(logits.float().log_softmax(-1))

    def mean_output(self, weight: Weight) -> Tensor:
        """Of a weight that writes, over all tokens, shape ``(out,)``, in the model's dtype."""
        return self._means[weight.name].to(read_weight(self.model, weight.name).dtype)

    def divergence(self, modules: Mapping[str, nn.Module]) -> float:
        """The mean Kullback-Leibler divergence of what the model predicts with these modules in it, nats a token.

        Args:
            modules: by the names of those in whose place they stand; the model is as it was when this returns.

        Raises:
            ModelError: it is not finite.
        """
        lowest = min(self._layer_of[self.model.get_submodule(name)] for name in modules)
        with frozen(self.model), torch.no_grad(), swapped(self.model, modules):
            found = torch.stack([self._diverged(window, lowest) for window in range(len(self._windows))]).mean()
        names = ", ".join(modules)
        check_measured(found, f"the divergence without {names} is {found.item()}", "a finite one")
        return float(found)

    def _diverged(self, window: int, lowest: int) -> Tensor:
        """Of one window."""
        hidden = self._states[lowest][window]
        for layer in range(lowest, len(self._states)):
            hidden = self._stack.run(layer, hidden)
        changed = self._stack.logits(self._windows[window], hidden).float().log_softmax(-1)
        return diverged(self._dense[window], changed)

    def _keep(self, layer: int, hidden: Tensor) -> None:
        self._states[layer].append(hidden.detach())

    def _hearing(self, name: str) -> Any:
        def hear(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            mean = output.detach().float().flatten(0, -2).mean(0) / len(self._windows)
            self._means[name] = self._means[name] + mean if name in self._means else mean

        return hear
