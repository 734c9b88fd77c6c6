"""Back-propagation through a decoder layer by layer, so that one layer's graph is alive at a time.

The hidden states at every k-th layer's input are kept and those between are computed again (Training Deep Nets with
Sublinear Memory Cost, arXiv 1604.06174), for all windows at once: whoever listens to a layer hears all its windows
before the layer below is run.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from gac.measurement.runs import drawn_loss
from gac.models.examples import TokenWindow, TokenWindows
from gac.models.layer_stack import LayerStack, room
from gac.models.modules import frozen
from gac.models.streaming import on_its_device

ENOUGH = 24 * 2**30
"""Bytes of hidden states on a GPU, where these will do. With more a model of 8 billion parameters gains 3 seconds, and
takes 13 GB."""

Tick = Callable[[], object]


class LayerwiseBackward:
    """The summed token loss of every window, back-propagated one decoder layer at a time, the last one first.

    ``start()`` runs the model up to the loss; ``through(layer)`` then takes the gradients from a layer's output to its
    input. No parameter gets a gradient. Hidden states and gradients have shape ``(windows, tokens, hidden)``.

    Args:
        model: a causal LM.
        layers: its decoder layers, in order.
        windows: token ids, int64, shape ``(windows, tokens)``, or examples, each of which is a part.
        lowest: the last layer that ``through`` will be asked for.
        first: the number of the first of these windows among all of the text.
        parts: the windows that run through a layer at once; None: each by itself.
    """

    loss: Tensor
    """Summed over the windows, nats, float64; there once ``start`` has run."""
    gradients: Tensor
    """At the output of the layer that comes next."""

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        windows: TokenWindows,
        lowest: int,
        first: int = 0,
        parts: Sequence[slice] | None = None,
    ) -> None:
        self._parts = [slice(window, window + 1) for window in range(len(windows))] if parts is None else parts
        self._model, self._layers, self._windows, self._lowest, self._first = model, layers, windows, lowest, first
        self._stack = LayerStack(model, layers)
        self._states: dict[int, Tensor] = {}

    @property
    def last(self) -> int:
        return len(self._layers) - 1

    def start(self, tick: Tick) -> None:
        """Run every window forward and back to the last layer's output, all of them through one layer after the other.

        ``tick`` is called for each window in each layer, and once more for its loss. ModelError if a loss is not
        finite, or if a layer is not called with hidden states first.
        """
        losses = []
        with frozen(self._model), on_its_device(self._model, self._layers):
            self.gradients = self._outputs(tick)  # where gradients come in the place of each window's
            for number, window in enumerate(self._windows):
                losses.append(self._to_loss(number, window))
                tick()
        self.loss = torch.stack(losses).double().sum()

    def through(self, layer: int, tick: Tick) -> None:
        inputs = self._inputs_of(layer)
        with frozen(self._model), torch.enable_grad(), on_its_device(self._layers[layer]):
            for part in self._parts:
                gradient = self.gradients[part]
                hidden = inputs[part].to(gradient.device).detach().requires_grad_(True)
                output = self._stack.run(layer, hidden, self._windows[part.start])
                output.backward(gradient.to(output.device))  # type: ignore[no-untyped-call]
                assert hidden.grad is not None
                gradient.copy_(hidden.grad)
                _tick(tick, part)

    @torch.no_grad()
    def _outputs(self, tick: Tick) -> Tensor:
        hidden = self._stack.entered(self._windows)
        self._allocate(hidden)
        for index, layer in enumerate(self._layers):
            if index in self._states:
                self._states[index] = self._states[index].to(hidden.dtype).copy_(hidden)
            with on_its_device(layer):
                result = hidden
                for part in self._parts:
                    output = self._stack.run(index, hidden[part], self._windows[part.start])
                    if result.dtype != output.dtype:
                        result = torch.empty_like(hidden, dtype=output.dtype)
                    result[part] = output
                    if hidden.is_cuda and part is self._parts[-1]:
                        torch.cuda.synchronize(hidden.device)  # so that ticks tell how long a layer takes
                    _tick(tick, part)
            hidden = result
        return hidden

    def _allocate(self, hidden: Tensor) -> None:
        """Allocate the inputs of every k-th layer, k as small as fits, in ``ENOUGH`` bytes if possible."""
        shape = hidden.shape
        count = len(self._layers) - self._lowest
        size, free = math.prod(shape) * hidden.element_size(), room(hidden.device)
        every, device = _stride(count, min(free, ENOUGH) // size) or _stride(count, free // size), hidden.device
        if every is None:
            every, device = math.isqrt(count - 1) + 1, torch.device("cpu")
        for layer in range(self._lowest, len(self._layers), every):
            self._states[layer] = torch.empty(shape, dtype=hidden.dtype, device=device)

    def _to_loss(self, row: int, window: TokenWindow) -> Tensor:
        hidden = self.gradients[row].unsqueeze(0).detach().requires_grad_(True)
        with torch.enable_grad(), self._stack.ending(hidden):
            number = self._first + row
            loss, drawn = drawn_loss(self._model, window, f"calibration window {number}", seed=number)
        drawn.backward()  # type: ignore[no-untyped-call]
        assert hidden.grad is not None
        self.gradients[row] = hidden.grad[0]
        return loss

    def _inputs_of(self, layer: int) -> Tensor:
        if layer not in self._states:
            nearest = max(index for index in self._states if index < layer)
            states = self._states[nearest]
            self._states |= {
                index: torch.empty_like(states, dtype=self.gradients.dtype) for index in range(nearest + 1, layer + 1)
            }
            with frozen(self._model), torch.no_grad(), ExitStack() as loaded:
                for between in self._layers[nearest:layer]:
                    loaded.enter_context(on_its_device(between))
                for part in self._parts:
                    hidden = states[part].to(self.gradients.device)
                    for index in range(nearest, layer):
                        hidden = self._stack.run(index, hidden, self._windows[part.start])
                        self._states[index + 1][part] = hidden
        return self._states.pop(layer)


def _tick(tick: Tick, part: slice) -> None:
    for _ in range(part.start, part.stop):
        tick()


def _stride(layers: int, room: int) -> int | None:
    """Return the smallest k such that every k-th input and the k - 1 between two of them fit; None where none does."""
    return next((k for k in range(1, layers + 1) if math.ceil(layers / k) + k - 1 <= room), None)
