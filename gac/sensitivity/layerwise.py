"""Back-propagation through a decoder layer by layer, so that one layer's graph is alive at a time.

The hidden states at every k-th layer's input are kept and those between are computed again (Training Deep Nets with
Sublinear Memory Cost, arXiv 1604.06174), for all windows at once: whoever listens to a layer hears all its windows
before the layer below is run. Layers are called as the model itself calls them, so nothing here knows an architecture.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gac.errors import ModelError
from gac.models.modules import free_memory, run_on
from gac.models.streaming import on_its_device
from gac.sensitivity.losses import drawn_loss

HOST_BYTES = 4 * 2**30
"""Hidden states kept in host memory while that spares computing them again."""
ENOUGH = 24 * 2**30
"""More are not kept where these will do: a model of 8 billion parameters gains 3 seconds by them, and takes 13 GB."""

Tick = Callable[[], object]


class LayerStack:
    """A model's decoder layers, each of which can be run as the model itself runs it.

    Args:
        model: a causal LM.
        layers: its decoder layers, in order.
    """

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module]) -> None:
        self.model, self.layers = model, layers
        self._calls: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self._beside: tuple[None, ...] | None = None

    @contextmanager
    def traced(self, lowest: int, seen: Callable[[int, Tensor], None]) -> Iterator[None]:
        """Learn how the layers are called, from one window at a time.

        Args:
            lowest: the first layer that will be run.
            seen: hears each of those layers' numbers and input, ``(1, tokens, hidden)``.

        Raises:
            ModelError: a layer is not called with hidden states first, or with what differs between windows.
        """
        with ExitStack() as hooks:
            for at in range(lowest, len(self.layers)):
                hook = partial(self._enter, at, seen)
                hooks.enter_context(self.layers[at].register_forward_pre_hook(hook, with_kwargs=True))
            yield

    @torch.no_grad()
    def entered(self, windows: Tensor) -> Tensor:
        """What the first layer reads of windows ``(windows, tokens)``; it is learnt how all layers are called.

        Only the first layer runs, for one window: that shows what layers return.

        Returns:
            hidden states, ``(windows, tokens, hidden)``.

        Raises:
            ModelError: as ``traced``.
        """
        heard: list[Tensor] = []

        def seen(layer: int, hidden: Tensor) -> None:
            if layer == 0:
                heard.append(hidden)
            if layer == len(self.layers) - 1:
                raise StopLayerError

        with self.traced(0, lambda _layer, _hidden: None):
            first = next(entering(self.model, self.layers[0], [windows[:1]]))
        self.run(0, first)
        found = first.new_empty(len(windows), *first.shape[1:])
        with self.traced(0, seen), self._passing(self.layers):
            for ids, hidden in zip(windows, found, strict=True):
                heard.clear()
                with suppress(StopLayerError):
                    run_on(self.model, ids[None])
                hidden.copy_(heard[0][0])
        return found

    def run(self, layer: int, hidden: Tensor) -> Tensor:
        """A layer's output for hidden states ``(windows, tokens, hidden)``."""
        args, kwargs = self._calls[layer]
        output = self.layers[layer](hidden, *args, **kwargs)
        self._beside = None if isinstance(output, Tensor) else (None,) * (len(output) - 1)
        return _hidden(output)

    def logits(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """The model's logits ``(tokens, vocabulary)`` of a window, as ``ending`` lets it run; ids ``(tokens,)``."""
        with self.ending(hidden):
            found: Tensor = run_on(self.model, ids[None]).logits[0]
        return found

    @contextmanager
    def ending(self, hidden: Tensor) -> Iterator[None]:
        """With ``hidden (1, tokens, hidden)`` as the last layer's output; ``run`` has shown what layers return."""
        with self._passing(self.layers[:-1]), _calling(self.layers[-1], lambda *_args, **_kwargs: self._passed(hidden)):
            yield

    @contextmanager
    def _passing(self, layers: Iterable[nn.Module]) -> Iterator[None]:
        """With layers that return what they are given."""
        with ExitStack() as replaced:
            for layer in layers:
                replaced.enter_context(_calling(layer, self._passed))
            yield

    def _passed(self, given: Tensor, *_args: Any, **_kwargs: Any) -> Any:
        return given if self._beside is None else (given, *self._beside)

    def _enter(
        self,
        layer: int,
        seen: Callable[[int, Tensor], None],
        _module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        if not args or not isinstance(args[0], Tensor):
            raise _not_a_decoder(self.model, "whose layers take something else first")
        call = args[1:], kwargs
        if not _same(self._calls.setdefault(layer, call), call):
            raise _not_a_decoder(self.model, f"whose layer {layer} also takes what differs between windows")
        seen(layer, args[0])


class LayerwiseBackward:
    """The summed token loss of every window, back-propagated one decoder layer at a time, the last one first.

    ``start()`` runs the model up to the loss; ``through(layer)`` then takes the gradients from a layer's output to its
    input. No parameter gets a gradient. Hidden states and gradients have shape ``(windows, tokens, hidden)``.

    Args:
        model: a causal LM.
        layers: its decoder layers, in order.
        windows: token ids, int64, shape ``(windows, tokens)``.
        lowest: the last layer that ``through`` will be asked for.
        first: the number of the first of these windows among all of the text.
    """

    loss: Tensor
    """Summed over the windows, nats, float64; there once ``start`` has run."""
    gradients: Tensor
    """At the output of the layer that comes next."""

    def __init__(
        self, model: nn.Module, layers: Sequence[nn.Module], windows: Tensor, lowest: int, first: int = 0
    ) -> None:
        self._model, self._layers, self._windows, self._lowest, self._first = model, layers, windows, lowest, first
        self._stack = LayerStack(model, layers)
        self._states: dict[int, Tensor] = {}

    @property
    def last(self) -> int:
        """The layer that ``through`` is to be called with first."""
        return len(self._layers) - 1

    def start(self, tick: Tick) -> None:
        """Run every window forward and back to the last layer's output, all of them through one layer after the other.

        Args:
            tick: called for each window in each layer, and once more for its loss.

        Raises:
            ModelError: a loss is not finite, or a layer is not called with hidden states first.
        """
        losses = []
        with frozen(self._model), on_its_device(self._model, self._layers):
            self.gradients = self._outputs(tick)  # where gradients come in the place of each window's
            for window, ids in enumerate(self._windows):
                losses.append(self._to_loss(window, ids))
                tick()
        self.loss = torch.stack(losses).double().sum()

    def through(self, layer: int, tick: Tick) -> None:
        """Take the gradients of every window from a layer's output to its input."""
        inputs = self._inputs_of(layer)
        with frozen(self._model), torch.enable_grad(), on_its_device(self._layers[layer]):
            for at, gradient in enumerate(self.gradients):
                hidden = inputs[at].unsqueeze(0).to(gradient.device).detach().requires_grad_(True)
                output = self._stack.run(layer, hidden)
                output.backward(gradient.unsqueeze(0).to(output.device))  # type: ignore[no-untyped-call]
                assert hidden.grad is not None
                gradient.copy_(hidden.grad[0])
                tick()

    @torch.no_grad()
    def _outputs(self, tick: Tick) -> Tensor:
        """Those of the last layer; what some of the layers read is kept on the way."""
        hidden = self._stack.entered(self._windows)
        self._allocate(hidden)
        for at, layer in enumerate(self._layers):
            if at in self._states:
                self._states[at] = self._states[at].to(hidden.dtype).copy_(hidden)
            with on_its_device(layer):
                hidden = self._left_by(at, hidden, tick)
        return hidden

    def _left_by(self, layer: int, hidden: Tensor, tick: Tick) -> Tensor:
        """What a layer makes of all windows, in their place where it keeps their dtype."""
        left = hidden
        for window in range(len(hidden)):
            output = self._stack.run(layer, hidden[window : window + 1])[0]
            if left.dtype != output.dtype:
                left = torch.empty_like(hidden, dtype=output.dtype)
            left[window] = output
            if hidden.is_cuda and window == len(hidden) - 1:
                torch.cuda.synchronize(hidden.device)  # so that ticks tell how long a layer takes
            tick()
        return left

    def _allocate(self, hidden: Tensor) -> None:
        """Room for the inputs of every k-th layer, k as small as fits, in ``ENOUGH`` bytes if it can."""
        shape = hidden.shape
        count = len(self._layers) - self._lowest
        own, free = math.prod(shape) * hidden.element_size(), room(hidden.device)
        every, device = _stride(count, min(free, ENOUGH) // own) or _stride(count, free // own), hidden.device
        if every is None:
            every, device = math.isqrt(count - 1) + 1, torch.device("cpu")
        for layer in range(self._lowest, len(self._layers), every):
            self._states[layer] = torch.empty(shape, dtype=hidden.dtype, device=device)

    def _to_loss(self, window: int, ids: Tensor) -> Tensor:
        """Back-propagate the loss of labels drawn for one window, ids ``(tokens,)``; returns the window's own, nats."""
        hidden = self.gradients[window].unsqueeze(0).detach().requires_grad_(True)
        with torch.enable_grad(), self._stack.ending(hidden):
            number = self._first + window
            loss, drawn = drawn_loss(self._model, ids, f"calibration window {number}", seed=number)
        drawn.backward()  # type: ignore[no-untyped-call]
        assert hidden.grad is not None
        self.gradients[window] = hidden.grad[0]
        return loss

    def _inputs_of(self, layer: int) -> Tensor:
        """The hidden states that a layer reads; those that were not kept are computed from the nearest that were."""
        if layer not in self._states:
            nearest = max(at for at in self._states if at < layer)
            kept = self._states[nearest]
            self._states |= {
                at: torch.empty_like(kept, dtype=self.gradients.dtype) for at in range(nearest + 1, layer + 1)
            }
            with frozen(self._model), torch.no_grad(), ExitStack() as loaded:
                for between in self._layers[nearest:layer]:
                    loaded.enter_context(on_its_device(between))
                for window in range(len(kept)):
                    hidden = kept[window].unsqueeze(0).to(self.gradients.device)
                    for at in range(nearest, layer):
                        hidden = self._stack.run(at, hidden)
                        self._states[at + 1][window] = hidden[0]
        return self._states.pop(layer)


class StopLayerError(Exception):
    """What was wanted of a layer has been seen; nobody sees this."""


def stop_at(heard: list[Tensor], _module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """A hook that hears what a module is called with, and ends the run before it."""
    heard.append(inputs[0])
    raise StopLayerError


def entering(model: nn.Module, first: nn.Module, parts: Iterable[Tensor]) -> Iterator[Tensor]:
    """What the first decoder layer reads of each of some windows ``(windows, tokens)``: the run ends there."""
    for ids in parts:
        heard: list[Tensor] = []
        stopping = first.register_forward_pre_hook(partial(stop_at, heard))
        with torch.no_grad(), stopping, suppress(StopLayerError):
            run_on(model, ids)
        yield heard[0].clone()


def _hidden(output: Any) -> Tensor:
    """The hidden states that a layer returns, alone or first."""
    found: Tensor = output if isinstance(output, Tensor) else output[0]
    return found


@contextmanager
def _calling(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """With another ``forward`` on a module."""
    own = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


@contextmanager
def listening(model: nn.Module, hooks: Mapping[str, Callable[..., None]]) -> Iterator[None]:
    """With these forward hooks on the modules of these names."""
    with ExitStack() as registered:
        for name, hook in hooks.items():
            registered.enter_context(model.get_submodule(name).register_forward_hook(hook))
        yield


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """In eval mode and with no parameter that requires a gradient, and as it was on exit."""
    training = {module: module.training for module in model.modules()}
    required = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    try:
        model.eval()
        for parameter in required.values():
            parameter.requires_grad_(False)
        yield
    finally:
        for module, was in training.items():
            module.training = was
        now = dict(model.named_parameters())
        for name, parameter in required.items():  # streamed weights are other parameters by now
            parameter.requires_grad_(True)
            now.get(name, parameter).requires_grad_(True)


def _stride(layers: int, room: int) -> int | None:
    """The smallest k at which every k-th input and the k - 1 between two of them fit; None where none does."""
    return next((k for k in range(1, layers + 1) if math.ceil(layers / k) + k - 1 <= room), None)


def room(device: torch.device) -> int:
    """Bytes for hidden states: half of what is free on a GPU."""
    return free_memory(device) // 2 if device.type == "cuda" else HOST_BYTES


def _same(one: Any, other: Any) -> bool:
    """Whether two calls' arguments are equal, tensors by value."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _not_a_decoder(model: nn.Module, why: str) -> ModelError:
    return ModelError(
        f"a {type(model).__name__} {why}",
        "decoder layers that are called with hidden states, and with the same beside them for every window",
        "Use a causal language model of a supported architecture.",
    )
