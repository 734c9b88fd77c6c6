"""Losses of the model on windows of text, and losses of changes of it, by running the model with them.

The divergence from what the dense model predicts is what text written by the dense model would lose. A few windows are
enough to measure it. The calibration text loses less: without one of SmolLM2's attentions 0.4 to 1.0 of that
(results/structures.md). Its loss differs more between windows, so a small one takes many.
"""

from collections.abc import Mapping, Sequence
from math import inf, sqrt
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, nll_loss

from gac.core.linalg import check_measured
from gac.forms.curvature.metric import Moments
from gac.models.examples import (
    IGNORED,
    TokenWindow,
    TokenWindows,
    labels_of,
    next_tokens,
    predicting,
    present,
)
from gac.models.layer_stack import LayerStack
from gac.models.linears import read_weight
from gac.models.modules import frozen, listening, run_window, swapped
from gac.models.sites import Weight
from gac.runtime.latents.attention import rounding_caches

TOKENS = 4096
"""Tokens that tell a divergence well enough, in whole windows."""
SURE = 1e-3
"""Nats a token: a standard error that is small enough."""
SURE_SHARE = 0.1
"""So is this part of the divergence."""
DIFFERS = 0.5
"""The distance of a text's loss from the divergence, as a share of it: about the spread that was measured."""


def window_loss(model: nn.Module, window: TokenWindow, what: str = "a calibration window") -> Tensor:
    """The summed token loss of one window in nats; the first token is not predicted.

    ``what`` names the window in the error that the loss is not finite.
    """
    logits = run_window(model, window).logits[0, :-1].float()
    loss = cross_entropy(logits, labels_of(window).to(logits.device), reduction="sum")
    check_measured(loss, f"the loss of {what} is {loss.item()}", "a finite loss")
    return loss


def drawn_loss(model: nn.Module, window: TokenWindow, what: str, seed: int) -> tuple[Tensor, Tensor]:
    """The summed token loss of one window, and that under labels which the model itself draws; nats, both.

    E[g g^T] over gradients of the second is the Fisher matrix; over those of the first, the empirical one, which fits
    the text that it is measured on (K-FAC, arXiv 1503.05671, section 5). The same ``seed`` draws the same labels on the
    same kind of device.
    """
    logits: Tensor = run_window(model, window).logits[0]
    labels = labels_of(window).to(logits.device)
    with torch.no_grad():  # in one copy of the logits that is changed in place: on a CPU new memory costs most here
        chances = logits.float().log_softmax(-1)
        observed = nll_loss(chances[:-1], labels, reduction="sum")
        check_measured(observed, f"the loss of {what} is {observed.item()}", "a finite loss")
        dice = torch.Generator(chances.device).manual_seed(seed)
        gradient = chances.exp_()
        upto = gradient[:-1].cumsum(-1)  # torch.multinomial takes longer on a CPU than the rest of the loss
        thresholds = torch.rand(len(upto), 1, generator=dice, dtype=upto.dtype, device=upto.device) * upto[:, -1:]
        drawn = torch.searchsorted(upto, thresholds, right=True).clamp_max(upto.shape[1] - 1)
        counts = labels != IGNORED
        loss = -gradient[:-1].gather(1, drawn)[counts].log().sum()
        gradient[:-1].scatter_add_(1, drawn, -torch.ones_like(thresholds))
        gradient[-1] = 0
        gradient[:-1][~counts] = 0
    known: Tensor = _WithGradient.apply(logits, loss, gradient.to(logits.dtype))  # type: ignore[no-untyped-call]
    return observed, known


class _WithGradient(torch.autograd.Function):
    """A number ``loss`` whose gradient at ``logits`` is known."""

    @staticmethod
    def forward(ctx: Any, _logits: Tensor, loss: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        return ctx.gradient if slope == 1 else ctx.gradient * slope, None, None


def sampled(windows: TokenWindows, tokens: int | None = None) -> TokenWindows:
    """Take windows in even steps, with so many tokens in all, one at least; ``TOKENS`` where none are named."""
    return windows[:: _step(windows, tokens or TOKENS)]


def _step(windows: TokenWindows, tokens: int) -> int:
    return -(-len(windows) * windows.shape[1] // tokens)


def predicted(model: nn.Module, window: TokenWindow) -> Tensor:
    """Log-probabilities of every next token of text, ``(positions, vocabulary)``, float32."""
    logits: Tensor = run_window(model, window).logits[0, predicting(window)]
    return logits.float().log_softmax(-1)


def diverged(dense: Tensor, changed: Tensor) -> Tensor:
    """The mean Kullback-Leibler divergence of one model from another, from what both predict."""
    mean: Tensor = (dense.exp() * (dense - changed)).sum(-1).mean()
    return mean


def unseen(weight: Weight) -> Moments:
    raise AssertionError(f"no moments of {weight.name} are at hand where the model is run")


class ModelRuns:
    """A model that is run on a few windows of text, with some of its modules changed, from the first that is.

    The hidden states at every layer and the dense model's predictions stay on the device.

    Args:
        model: a causal LM, dense.
        layers: its decoder layers, in order.
        windows: calibration token ids, int64, shape ``(windows, tokens)``, or examples. ``TOKENS`` of them are kept
            ready, in even steps; the others are run where those do not tell enough.
        weights: those among them that write from a block have their mean outputs taken.
        every: all windows are kept ready.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        windows: TokenWindows,
        weights: Sequence[Weight],
        every: bool = False,
    ) -> None:
        self.model, self._stack = model, LayerStack(model, layers)
        self._layer_of = {module: index for index, layer in enumerate(layers) for module in layer.modules()}
        self._windows, self._others = windows, windows[:0]
        if not every:  # the others in an order whose first few are from all over the text
            mixed = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))
            self._windows, self._others = sampled(windows), windows[mixed[mixed % _step(windows, TOKENS) > 0]]
        self._dense_losses: dict[int, float] = {}
        self._states: list[list[Tensor]] = [[] for _ in layers]
        self._means: dict[str, Tensor] = {}
        names = [weight.name for weight in weights if weight.block == "in"]
        with frozen(model), torch.no_grad():
            self._dense = [self._traced(window, names) for window in self._windows]

    def mean_output(self, weight: Weight) -> Tensor:
        """Of a weight that writes, over all tokens, shape ``(out,)``, in the model's dtype."""
        return self._means[weight.name].to(read_weight(self.model, weight.name).dtype)

    @property
    def layers(self) -> int:
        return len(self._states)

    @property
    def length(self) -> int:
        """Tokens of the longest window that is kept."""
        return max(hidden.shape[1] for hidden in self._states[0])

    def divergence(self, modules: Mapping[str, nn.Module]) -> float:
        """The mean Kullback-Leibler divergence of what the model predicts with these modules in it, nats a token.

        ``modules`` are by the names of those in whose place they stand. ModelError if it is not finite.
        """
        return float(self.measured(modules)[:, 0].mean())

    def lost(self, modules: Mapping[str, nn.Module]) -> float:
        """Loss of text with these modules in the model, nats a token; arguments as for ``divergence``.

        It is what the calibration text loses, on as many windows as it takes to be sure, drawn towards the divergence
        where they are too few: the mean of both, each weighted by the inverse of its variance.
        """
        by_window = self.measured(modules)
        distance, losses = float(by_window[:, 0].mean()), by_window[:, 1].tolist()
        for number, window in enumerate(self._others):
            if _standard_error(losses) <= max(SURE, SURE_SHARE * distance):
                break
            losses.append(self._text_loss(number, window, modules))
        bias, noise = (DIFFERS * distance) ** 2, _standard_error(losses) ** 2
        return max(0.0, distance + bias / (bias + noise) * (fmean(losses) - distance)) if bias else 0.0

    def measured(self, modules: Mapping[str, nn.Module]) -> Tensor:
        """Of each window that is kept the divergence and by how much its text is less likely, ``(windows, 2)``."""
        lowest = min(self._layer_of[self.model.get_submodule(name)] for name in modules)
        with frozen(self.model), torch.no_grad(), swapped(self.model, modules), rounding_caches(self.model):
            by_window = torch.stack([self._changed(window, lowest) for window in range(len(self._windows))])
        mean, names = by_window[:, 0].mean(), ", ".join(modules)
        check_measured(mean, f"the divergence without {names} is {mean.item()}", "a finite one")
        return by_window

    def _changed(self, number: int, lowest: int) -> Tensor:
        hidden, window = self._states[lowest][number], self._windows[number]
        for layer in range(lowest, len(self._states)):
            hidden = self._stack.run(layer, hidden, window)
        dense, logits = self._dense[number], self._stack.logits(window, hidden)[predicting(window)]
        changed, labels = logits.float().log_softmax(-1), next_tokens(window).to(logits.device)
        loss = (dense - changed)[: len(labels)].gather(1, labels[:, None]).mean()
        return torch.stack([diverged(dense, changed), loss])

    def _text_loss(self, number: int, window: TokenWindow, modules: Mapping[str, nn.Module]) -> float:
        with frozen(self.model), torch.no_grad():
            if number not in self._dense_losses:
                self._dense_losses[number] = float(window_loss(self.model, window))
            with swapped(self.model, modules):
                changed = window_loss(self.model, window, f"a calibration window without {', '.join(modules)}")
        return (float(changed) - self._dense_losses[number]) / len(next_tokens(window))

    def _traced(self, window: TokenWindow, names: Sequence[str]) -> Tensor:
        hooks = {name: self._add_mean(name, window) for name in names}
        with self._stack.traced(0, self._keep, window), listening(self.model, hooks):
            return predicted(self.model, window)

    def _keep(self, layer: int, hidden: Tensor) -> None:
        self._states[layer].append(hidden.detach())

    def _add_mean(self, name: str, window: TokenWindow) -> Any:
        def add(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            mean = output.detach().float().flatten(0, -2)[present(window)].mean(0) / len(self._windows)
            self._means[name] = self._means[name] + mean if name in self._means else mean

        return add


def _standard_error(values: Sequence[float]) -> float:
    return stdev(values) / sqrt(len(values)) if len(values) > 1 else inf
