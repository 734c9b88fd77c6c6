"""A decoder's layers, each called as the model itself calls it, so nothing here knows an architecture."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gac.core.errors import ModelError
from gac.models.modules import free_memory, run_on

_SHARED = "shared_kv_states"  # keys and values that layers leave for others; there are no others in what GAC takes
HOST_BYTES = 4 * 2**30  # hidden states kept in host memory while that spares computing them again


class LayerStack:
    """The decoder layers of a causal LM, in order, each of which can be run as the model itself runs it."""

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module]) -> None:
        self.model, self.layers = model, layers
        self._calls: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self._extra_outputs: tuple[None, ...] | None = None
        self._shared: type | None = None

    @contextmanager
    def traced(self, lowest: int, seen: Callable[[int, Tensor], None]) -> Iterator[None]:
        """Record how the layers from ``lowest`` on are called, one window at a time.

        ``seen`` gets the number and the input ``(1, tokens, hidden)`` of each. A ModelError says if a layer is not
        called with hidden states first, or with what differs between windows.
        """
        with ExitStack() as hooks:
            for layer in range(lowest, len(self.layers)):
                hook = partial(self._enter, layer, seen)
                hooks.enter_context(self.layers[layer].register_forward_pre_hook(hook, with_kwargs=True))
            yield

    @torch.no_grad()
    def entered(self, windows: Tensor) -> Tensor:
        """Inputs ``(windows, tokens, hidden)`` of the first layer for windows ``(windows, tokens)``.

        This records how all layers are called; errors as for ``traced``. Only the first layer runs, for one window:
        that shows the structure of outputs.
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
        inputs = first.new_empty(len(windows), *first.shape[1:])
        with self.traced(0, seen), self._passing(self.layers):
            for ids, hidden in zip(windows, inputs, strict=True):
                heard.clear()
                with suppress(StopLayerError):
                    run_on(self.model, ids[None])
                hidden.copy_(heard[0][0])
        return inputs

    def run(self, layer: int, hidden: Tensor) -> Tensor:
        """A layer's output for hidden states ``(windows, tokens, hidden)``."""
        args, kwargs = self._calls[layer]
        args = tuple(_for_windows(len(hidden), "", value) for value in args)
        kwargs = {name: _for_windows(len(hidden), name, value) for name, value in kwargs.items()}
        if self._shared is not None:
            kwargs[_SHARED] = self._shared()
        output = self.layers[layer](hidden, *args, **kwargs)
        self._extra_outputs = None if isinstance(output, Tensor) else (None,) * (len(output) - 1)
        states: Tensor = output if isinstance(output, Tensor) else output[0]
        return states

    def logits(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """The model's logits ``(tokens, vocabulary)`` of a window, as ``ending`` lets it run; ids ``(tokens,)``."""
        with self.ending(hidden):
            logits: Tensor = run_on(self.model, ids[None]).logits[0]
        return logits

    @contextmanager
    def ending(self, hidden: Tensor) -> Iterator[None]:
        """With ``hidden (1, tokens, hidden)`` as the last layer's output; ``run`` has shown what layers return."""
        with self._passing(self.layers[:-1]), calling(self.layers[-1], lambda *_args, **_kwargs: self._passed(hidden)):
            yield

    @contextmanager
    def _passing(self, layers: Iterable[nn.Module]) -> Iterator[None]:
        with ExitStack() as replaced:
            for layer in layers:
                replaced.enter_context(calling(layer, self._passed))
            yield

    def _passed(self, hidden: Tensor, *_args: Any, **_kwargs: Any) -> Any:
        return hidden if self._extra_outputs is None else (hidden, *self._extra_outputs)

    def _enter(
        self, layer: int, seen: Callable[[int, Tensor], None], _module: Any, args: tuple[Any, ...], kwargs: Any
    ) -> None:
        if not args or not isinstance(args[0], Tensor):
            raise _not_a_decoder(self.model, "whose layers take something else first")
        if _SHARED in kwargs:
            self._shared = type(kwargs[_SHARED])
        call = args[1:], {name: value for name, value in kwargs.items() if name != _SHARED}
        if not _same(self._calls.setdefault(layer, call), call):
            raise _not_a_decoder(self.model, f"whose layer {layer} also takes what differs between windows")
        seen(layer, args[0])


def _for_windows(windows: int, name: str, recorded: Any) -> Any:
    """A recorded argument for several windows: not all layers broadcast masks; rows of Bloom's ``alibi`` are heads."""
    if windows > 1 and isinstance(recorded, Tensor):
        if recorded.dim() == 4 and len(recorded) == 1:
            return recorded.expand(windows, -1, -1, -1)
        if name == "alibi" and recorded.dim() == 3:
            return recorded.repeat(windows, 1, 1)
    return recorded


class StopLayerError(Exception):
    """Ends a run early; never leaves this module's callers."""


def stop_at(heard: list[Tensor], _module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """A hook that hears what a module is called with, and ends the run before it."""
    heard.append(inputs[0])
    raise StopLayerError


def entering(model: nn.Module, first: nn.Module, parts: Iterable[Tensor]) -> Iterator[Tensor]:
    """Inputs of the first decoder layer for each part of windows ``(windows, tokens)``; the rest does not run."""
    for ids in parts:
        heard: list[Tensor] = []
        stopping = first.register_forward_pre_hook(partial(stop_at, heard))
        with torch.no_grad(), stopping, suppress(StopLayerError):
            run_on(model, ids)
        yield heard[0].clone()


@contextmanager
def calling(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """With another function in the place of a module's forward, which is as it was on exit."""
    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


def room(device: torch.device) -> int:
    """Bytes for hidden states: half of what is free on a GPU."""
    return free_memory(device) // 2 if device.type == "cuda" else HOST_BYTES


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return isinstance(second, Tensor) and first.shape == second.shape and torch.equal(first, second)
    if isinstance(first, Mapping):
        return first.keys() == second.keys() and all(_same(value, second[key]) for key, value in first.items())
    if isinstance(first, tuple | list):
        return len(first) == len(second) and all(map(_same, first, second))
    return bool(first == second)


def _not_a_decoder(model: nn.Module, why: str) -> ModelError:
    return ModelError(
        f"a {type(model).__name__} {why}",
        "decoder layers that are called with hidden states, and with the same beside them for every window",
        "Use a causal language model of a supported architecture.",
    )
