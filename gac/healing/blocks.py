"""Block-local distillation: every decoder layer learns what the dense layer makes, from what it is given itself.

Layers are trained in the order in which they run. The input of a layer is what the compressed model, healed so far, has
at that place; what it learns is the output that the dense layer has in the dense model. So it makes up for what was
lost before it, too. The loss is the squared error of each token relative to the square of what it should be: the next
RMSNorm reads tokens whatever their size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gac.core.distributed.ranks import Ranks
from gac.healing.descent import Descent, scheduled
from gac.healing.gradients import Captures, Gradients
from gac.healing.text import order
from gac.healing.work import Span
from gac.models.layer_stack import LayerStack, entering, room
from gac.models.modules import input_device, run_on

HELD_STATES = 4
"""Sets of hidden states of which there has to be room on a device."""


class Passage:
    """The hidden states of windows on their way through a model's decoder layers.

    Args:
        model: a causal LM that needs no gradients.
        layers: its decoder layers, in order.
        parts: token ids, each ``(windows, tokens)``, the first with one window at least.
        on_host: whether states wait in host memory.

    Attributes:
        states: at the input of the layer that comes next, for each part ``(windows, tokens, hidden)``.
    """

    states: list[Tensor]

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], parts: Sequence[Tensor], on_host: bool) -> None:
        self._layers, self._on_host = layers, on_host
        self._stack = LayerStack(model, layers)
        with torch.no_grad(), self._stack.traced(0, lambda _layer, _hidden: None):
            run_on(model, parts[0][:1])
        self.states = [self._kept(hidden) for hidden in entering(model, layers[0], parts)]

    def run(self, layer: int, hidden: Tensor) -> Tensor:
        """A layer's output for states ``(windows, tokens, hidden)``."""
        return self._stack.run(layer, hidden.to(next(self._layers[layer].parameters()).device))

    @torch.no_grad()
    def advance(self, layer: int) -> None:
        """Take all states through a layer."""
        for at, hidden in enumerate(self.states):
            self.states[at] = self._kept(self.run(layer, hidden))

    def _kept(self, hidden: Tensor) -> Tensor:
        return hidden.cpu() if self._on_host else hidden


@dataclass(frozen=True, eq=False)
class LayerSteps:
    """Steps of one layer towards what it is to make.

    Attributes:
        run_layer: its output for hidden states ``(windows, tokens, hidden)``.
        pairs: what it reads, and what it is to make of that, of this process.
        seed: of their order.
        ranks: the processes that take part.
        captures: whether they are captured in a CUDA graph.
    """

    run_layer: Callable[[Tensor], Tensor]
    pairs: Sequence[tuple[Tensor, Tensor]]
    seed: int
    ranks: Ranks
    captures: Captures

    def run(self, descent: Descent, span: Span, where: str) -> int:
        """Take them until the span is over; returns the tokens that were read, by all processes.

        Args:
            where: what an error calls the layer.

        Raises:
            HealingError: a loss is not finite.
        """
        read = step = 0
        gradients = Gradients(self._loss, descent.parameters, self.captures, self.ranks)
        while (progress := span.progress()) < 1:
            turn, place = divmod(step, len(self.pairs))
            hidden, due = self.pairs[int(order(len(self.pairs), self.seed, turn)[place])]
            gradients.begin()
            loss = gradients.add(hidden, due)
            step += 1
            descent.step(loss, scheduled(progress), f"step {step} of {where}")
            batch = due.shape[0] * due.shape[1] * self.ranks.count
            span.read(batch)
            read += batch
        return read

    def _loss(self, hidden: Tensor, due: Tensor) -> Tensor:
        return relative_error(self.run_layer(hidden), due)


def on_host(model: Any, tokens: int) -> bool:
    """Whether the states of so many tokens have to wait in host memory."""
    needed = HELD_STATES * tokens * model.config.hidden_size * model.dtype.itemsize
    device = input_device(model)
    return device.type != "cpu" and needed > room(device)


def relative_error(found: Tensor, due: Tensor) -> Tensor:
    """The mean over tokens of ``|found - due|^2 / |due|^2``, for states ``(windows, tokens, hidden)``; float32."""
    due = due.to(found.device).float()
    errors = (found.float() - due).square().sum(-1) / due.square().sum(-1).clamp_min(1e-12)
    return errors.mean()
