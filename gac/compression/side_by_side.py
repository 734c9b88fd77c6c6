"""A dense model and what is compressed of it so far, run layer by layer on the same windows."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from torch import Tensor, nn

from gac.errors import ModelError
from gac.forms import Weight
from gac.sensitivity.layerwise import LayerStack

PLAIN = 0.02
"""How much of what a layer adds may be something else than what its weights write, relative."""

Heard = dict[str, list[Tensor]]


@dataclass(frozen=True, eq=False)
class Seen:
    """What one layer of the dense model read and wrote, a tensor for each window.

    Attributes:
        entered: the hidden states at its input, ``(1, tokens, hidden)``.
        written: the outputs of weights that write to the residual stream, by name, ``(..., out)``.
        read: the inputs of the others, by the name of the first that reads each, ``(..., in)``.
    """

    entered: Sequence[Tensor]
    written: Mapping[str, Sequence[Tensor]]
    read: Mapping[str, Sequence[Tensor]]


class SideBySide:
    """The hidden states at the input of a layer in the dense and in the compressed model.

    Args:
        model: a causal LM, dense; whoever calls puts compressed weights in and takes them out between the passes.
        layers: its decoder layers, in order.
        windows: token ids, int64, shape ``(windows, tokens)``.
    """

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], windows: Tensor) -> None:
        self._model, self._windows = model, windows
        self._stack = LayerStack(model, layers)
        self._dense: list[Tensor] = []
        self._ours: list[Tensor] = []

    def start(self, lowest: int) -> None:
        """Run the dense model; the passes begin with layer ``lowest``."""

        def seen(layer: int, hidden: Tensor) -> None:
            if layer == lowest:
                self._dense.append(hidden.clone())

        embedding = self._model.get_input_embeddings()  # type: ignore[operator]
        with self._stack.traced(lowest, seen):
            for ids in self._windows:
                self._model(input_ids=ids.to(embedding.weight.device).unsqueeze(0), use_cache=False)
        self._ours = list(self._dense)

    def dense_pass(self, layer: int, stages: Sequence[Sequence[Weight]]) -> Seen:
        """Take the dense states through a layer.

        Args:
            stages: the layer's weights in the order in which they run, those that read the same input together.

        Raises:
            ModelError: weights are said to write to the residual stream, but the layer does more than to add that.
        """
        read: Heard = {stage[0].name: [] for stage in stages if not stage[0].writes}
        written: Heard = {weight.name: [] for stage in stages for weight in stage if weight.writes}
        entered, left = self._dense, []
        with _listening(self._model, read, _input_to), _listening(self._model, written, _output_to):
            for hidden in entered:
                left.append(self._stack.run(layer, hidden))
        if written:
            _check_plain(layer, entered[0], left[0], [one[0] for one in written.values()])
        self._dense = left
        return Seen(entered, written, read)

    def inputs_of(self, layer: int, stage: Sequence[Weight], seen: Seen) -> Iterator[tuple[Tensor, Tensor | None]]:
        """What the weights of a stage read in the compressed model, ``(tokens, in)``, window by window.

        With it comes, for weights that write, what the residual stream has lost before them, ``(tokens, hidden)``.
        """
        name = stage[0].name
        before = list(seen.written)[: list(seen.written).index(name)] if stage[0].writes else []
        for at, hidden in enumerate(self._ours):
            heard: Heard = {name: []}
            wrote: Heard = {other: [] for other in before}
            listening = (_listening(self._model, wrote, _output_to), _listening(self._model, heard, _input_and_stop))
            with listening[0], listening[1], suppress(_StopLayerError):
                self._stack.run(layer, hidden)
            lost = seen.entered[at] - hidden if stage[0].writes else None
            for other in before:
                assert lost is not None
                lost = lost + (seen.written[other][at] - wrote[other][0]).view_as(lost)
            yield _flat(heard[name][0]), None if lost is None else _flat(lost)

    def compressed_pass(self, layer: int) -> None:
        """Take the compressed states through a layer, whose weights are the compressed ones now."""
        self._ours = [self._stack.run(layer, hidden) for hidden in self._ours]


class _StopLayerError(Exception):
    """What was wanted of a layer has been seen; nobody sees this."""


def _input_to(heard: list[Tensor]) -> Callable[..., None]:
    return lambda _module, inputs, _output: heard.append(inputs[0])


def _output_to(heard: list[Tensor]) -> Callable[..., None]:
    return lambda _module, _inputs, output: heard.append(output)


def _input_and_stop(heard: list[Tensor]) -> Callable[..., None]:
    def hook(_module: nn.Module, inputs: tuple[Tensor, ...], _output: object) -> None:
        heard.append(inputs[0])
        raise _StopLayerError

    return hook


@contextmanager
def _listening(model: nn.Module, heard: Heard, hook: Callable[[list[Tensor]], Callable[..., None]]) -> Iterator[None]:
    handles = [model.get_submodule(name).register_forward_hook(hook(found)) for name, found in heard.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _check_plain(layer: int, entered: Tensor, left: Tensor, written: Sequence[Tensor]) -> None:
    added = (left - entered).float()
    rest = added - sum(part.float().view_as(added) for part in written)
    if rest.norm() > PLAIN * added.norm():
        raise ModelError(
            f"a model whose layer {layer} adds {float(rest.norm() / added.norm()):.0%} other than its weights write",
            "layers that add what o_proj and down_proj write to the residual stream",
            "Allocate with refit='none'.",
        )
