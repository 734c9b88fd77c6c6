"""A decoder's layers, each called as the model itself calls it, so nothing here knows an architecture."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gac.core.errors import ModelError
from gac.models.modules import free_memory, run_on

HOST_BYTES = 4 * 2**30
"""Hidden states kept in host memory while that spares computing them again."""


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
