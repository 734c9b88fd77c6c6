"""A dense model and what is compressed of it so far, run layer by layer on the same windows."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from gac.core.errors import ModelError
from gac.measurement.sums import parts_of
from gac.models.families import family_of
from gac.models.layer_stack import LayerStack, StopLayerError, calling, entering, room, stop_at
from gac.models.modules import input_device, listening, run_on, swapped
from gac.models.sites import Weight

RIDGE = 1e-2
"""Gains of a norm below the root of this times their mean square ask for no more of the weight than larger ones."""
_TINY = torch.finfo(torch.float32).tiny
PLAIN = 0.02
"""The largest relative part of a layer's output that its weights may leave unexplained."""
SETS = 12
"""Sets of hidden states that are held at most, with what lies between them."""
TRACED = 2
"""Windows that run through all layers, to learn their arguments and that these are alike."""
Heard = dict[str, list[Tensor]]


class ToStream:
    """The way of outputs y ``(..., out)`` of a weight into the residual stream: times a number, mostly 1."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def added(self, outputs: Tensor) -> Tensor:
        return outputs if self._factor == 1 else outputs * self._factor

    def step(self, outputs: Tensor, more: Tensor) -> Tensor:
        """Return the change of the outputs that adds ``more`` to the stream, float32; both ``(tokens, out)``."""
        return more if self._factor == 1 else more / self._factor


class Blended(ToStream):
    """Outputs are gated, or pass a norm with others: the weight makes up for nothing that was lost before it."""

    def step(self, outputs: Tensor, more: Tensor) -> Tensor:
        return torch.zeros_like(more)


class Norm(ToStream):
    """Outputs pass an RMS norm: a(y) = s g y with gains g times the factor, and s = 1 / rms(y), from what it returns.

    A step is divided by s and g, as if s stayed as it is. What it has along y, the norm undoes; leaving that out, or
    counting tokens by s, changes nothing that could be measured (results/refit.md).
    """

    def __init__(self, norm: nn.Module, factor: float) -> None:
        super().__init__(factor)
        self._norm = norm
        with torch.no_grad():
            self._gains: Tensor = self.added(torch.ones_like(next(norm.parameters()))).float()

    def added(self, outputs: Tensor) -> Tensor:
        return super().added(self._norm(outputs))

    def step(self, outputs: Tensor, more: Tensor) -> Tensor:
        gains = self._gains
        scaled = gains * outputs.float()
        slope = (self.added(outputs).float() * scaled).sum(1) / scaled.square().sum(1).clamp_min(_TINY)
        step = more * (gains / (gains.square() + RIDGE * gains.square().mean())) / slope[:, None]
        return step.where(slope[:, None] > 0, 0.0)  # outputs that are all zero have no direction to keep


def ways_of(model: nn.Module, weights: Sequence[Weight]) -> dict[str, ToStream]:
    """The ways of those weights that write to the residual stream, and of blocks with routed experts, by name."""
    family = family_of(model.config)
    ways: dict[str, ToStream] = {}
    names = [weight.name for weight in weights if weight.to_residual]
    for name in (*names, *family.routing_blocks(model.config).values()):
        path = family.residual_path(model.config, name)
        plain = (Blended if path.blended else ToStream)(path.factor)
        ways[name] = plain if path.norm is None else Norm(model.get_submodule(path.norm), path.factor)
    return ways


@dataclass(frozen=True, eq=False)
class Seen:
    """Inputs and outputs of one layer of the dense model, a tensor for each part of the windows.

    Attributes:
        entered: the hidden states at its input, ``(windows, tokens, hidden)``.
        written: the outputs of weights that write to the residual stream, by name, ``(..., out)``, before what lies
            between.
        read: the inputs of the others, by the name of the first that reads each, ``(..., in)``.
    """

    entered: Sequence[Tensor]
    written: Mapping[str, Sequence[Tensor]]
    read: Mapping[str, Sequence[Tensor]]


class PairedRun:
    """The hidden states at the input of a layer in the dense and in the compressed model.

    They stay on the device where they are computed, or in host memory where ``SETS`` times as many would not fit.

    Args:
        model: a causal LM, dense; whoever calls puts compressed weights in and takes them out between the passes.
        layers: its decoder layers, in order.
        windows: token ids, int64, shape ``(windows, tokens)``.
        ways: those of its weights, and blocks with routed experts, that write to the residual stream, by name.
        ends: what the compressed model has for embedding and head, by name, where it has others.
        cut: a window at which a new part begins, for what is before is summed by itself.
    """

    parts: Sequence[slice]
    """The windows that run at once."""

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        windows: Tensor,
        ways: Mapping[str, ToStream],
        ends: Mapping[str, nn.Module],
        cut: int,
    ) -> None:
        self._model, self._layers, self._windows, self._ways, self._ends = model, layers, windows, ways, ends
        self._routing = family_of(model.config).routing_blocks(model.config)
        self._stack = LayerStack(model, layers)
        self._dense: list[Tensor] = []
        self._ours: list[Tensor] = []
        self._on_host = False
        self._stages: Sequence[Sequence[Weight]] = ()
        self._wrote: dict[str, dict[int, Tensor]] = {}  # by weight and part, in the compressed layer
        self._made: dict[str, dict[int, Any]] = {}  # outputs of its blocks, likewise, once their weights are fitted
        self.parts = parts_of(len(windows), windows.shape[1], cut, input_device(model))

    def start(self, lowest: int) -> None:
        """Run the models as far as the passes need them, which begin with layer ``lowest``: 0 with other ends."""
        losses: list[Tensor] = []

        def seen(layer: int, hidden: Tensor) -> None:
            if layer == lowest:
                if not losses:
                    needed = SETS * len(self._windows) * hidden.numel() * hidden.element_size()
                    self._on_host = hidden.device.type != "cpu" and needed > room(hidden.device)
                losses.append(self._kept(hidden.clone()))
            if len(losses) > TRACED or layer == len(self._layers) - 1:
                raise StopLayerError

        with self._stack.traced(lowest, seen):
            for ids in self._windows:
                with suppress(StopLayerError):
                    run_on(self._model, ids[None])
        self._dense = [torch.cat(losses[part]) for part in self.parts]
        self._ours = self._entered() if self._ends else list(self._dense)

    def dense_pass(self, layer: int, stages: Sequence[Sequence[Weight]]) -> Seen:
        """Take the dense states through a layer, which only adds what its weights and routed experts write.

        ``stages`` are its weights in the order in which they run, those that read the same input together.
        """
        self._stages, self._wrote, self._made = stages, {}, {}
        read: Heard = {stage[0].name: [] for stage in stages if not stage[0].to_residual}
        written: Heard = {weight.name: [] for stage in stages for weight in stage if weight.to_residual}
        entered, outputs = self._dense, []
        hooks = {name: self._input_to(heard) for name, heard in read.items()}
        hooks |= {name: self._output_to(heard) for name, heard in written.items()}
        routing, routed = self._routing.get(layer), list[Tensor]()
        if routing is not None:
            hooks[routing] = self._output_to(routed)
        with listening(self._model, hooks):
            for hidden in entered:
                outputs.append(self._run(layer, hidden))
        if written:
            device = next(self._layers[layer].parameters()).device
            outside = {name: heard for name, heard in written.items() if not name.startswith(f"{routing}.")}
            outside |= {routing: routed} if routing is not None else {}
            added = [self._ways[name].added(tensors[0].to(device)) for name, tensors in outside.items()]
            factor = getattr(self._layers[layer], "layer_scalar", 1.0)  # of Gemma 4, for all that a layer returns
            _check_added(layer, entered[0], outputs[0] / factor, added)
        self._dense = outputs
        return Seen(entered, written, read)

    def inputs_of(self, layer: int, stage: Sequence[Weight], seen: Seen) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Return the inputs of a stage's weights in the compressed model, ``(tokens, in)``, part by part.

        With it comes, for weights that write, what the residual stream has lost before them, float32
        ``(tokens, hidden)``. The layer has to run its weights in this order.
        """
        name = stage[0].name
        before = [weight.name for weight in chain(*self._stages[: self._stages.index(stage)]) if weight.to_residual]
        for index, hidden in enumerate(self._ours):
            heard: list[Tensor] = []
            stopping = self._model.get_submodule(name).register_forward_pre_hook(partial(stop_at, heard))
            with stopping, self._made_once(layer, index, before), suppress(StopLayerError):
                self._run(layer, hidden)
            if not heard or (stage[0].to_residual and any(index not in self._wrote[other] for other in before)):
                raise ModelError(
                    f"a model that runs {name} before {', '.join(before) or 'anything is seen of it'}",
                    "a layer whose weights run in the order of its sites",
                    "Allocate with refit='none'.",
                )
            x = _flat(heard[0])
            if not stage[0].to_residual:
                yield x, None
                continue
            lost = (seen.entered[index].float() - hidden.float()).to(x.device)
            for other in before:
                both = (outputs.to(x.device) for outputs in (seen.written[other][index], self._wrote[other][index]))
                theirs, ours = (self._ways[other].added(outputs).float() for outputs in both)
                lost += (theirs - ours).view_as(lost)
            yield x, _flat(lost)

    def compressed_pass(self, layer: int) -> None:
        for index, hidden in enumerate(self._ours):
            with self._made_once(layer, index, [name for name, made in self._made.items() if index in made]):
                self._ours[index] = self._run(layer, hidden)
        self._wrote, self._made = {}, {}

    @contextmanager
    def _made_once(self, layer: int, part: int, fitted: Sequence[str]) -> Iterator[None]:
        """Record what blocks make of a part of the windows, and give it back when the layer is run on that part again.

        ``fitted`` are weights that are not fitted any more and end their blocks, such as o_proj.
        """
        with ExitStack() as stack:
            for name in fitted:
                block, wrote = name.rpartition(".")[0], self._wrote.setdefault(name, {})
                module, made = self._model.get_submodule(block), self._made.setdefault(name, {})
                if part in made:
                    stack.enter_context(calling(module, lambda *_, output=made[part], **_named: output))
                    continue
                hooks = {name: lambda _module, _inputs, output, wrote=wrote: wrote.update({part: self._kept(output)})}
                if module is not self._layers[layer] and not self._on_host:
                    hooks[block] = lambda _module, _inputs, output, made=made: made.update({part: output})
                stack.enter_context(listening(self._model, hooks))
            yield

    def logits(self, windows: Iterable[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """Those of the dense and of the compressed model, both taken through all layers, ``(tokens, vocabulary)``."""
        device = next(self._layers[-1].parameters()).device
        for window in windows:
            part = next(index for index, rows in enumerate(self.parts) if window < rows.stop)
            index = window - self.parts[part].start
            ids = self._windows[window]
            dense = self._stack.logits(ids, self._dense[part][index : index + 1].to(device))
            with swapped(self._model, self._ends):
                ours = self._stack.logits(ids, self._ours[part][index : index + 1].to(device))
            yield dense, ours

    def _entered(self) -> list[Tensor]:
        with swapped(self._model, self._ends):
            hidden = entering(self._model, self._layers[0], torch.split(self._windows, 1))
            heard = [self._kept(hidden) for hidden in hidden]
        return [torch.cat(heard[part]) for part in self.parts]

    def _run(self, layer: int, hidden: Tensor) -> Tensor:
        device = next(self._layers[layer].parameters()).device
        return self._kept(self._stack.run(layer, hidden.to(device)))

    def _kept(self, tensor: Tensor) -> Tensor:
        return tensor.cpu() if self._on_host else tensor

    def _input_to(self, heard: list[Tensor]) -> Callable[..., None]:
        return lambda _module, inputs, _output: heard.append(self._kept(inputs[0]))

    def _output_to(self, heard: list[Tensor]) -> Callable[..., None]:
        # A copy, because Falcon's layers add to it in place.
        return lambda _module, _inputs, output: heard.append(
            self._kept((output if isinstance(output, Tensor) else output[0]).clone())
        )


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _check_added(layer: int, entered: Tensor, output: Tensor, parts: Sequence[Tensor]) -> None:
    """Check token by token, relative to rounding: a few tokens have huge hidden states."""
    before, after = (_flat(hidden.to(output.device)).float() for hidden in (entered, output))
    added = after - before
    rest = added - sum(part.to(output.device).float().view_as(added) for part in parts)
    rounding = torch.finfo(output.dtype).eps * torch.maximum(before.abs(), after.abs()).norm(dim=1)
    share = ((rest.norm(dim=1) - 4 * rounding) / added.norm(dim=1).clamp_min(1e-30)).median()
    if share > PLAIN:
        raise ModelError(
            f"a model whose layer {layer} adds {float(share):.0%} other than its weights write",
            "layers that add what o_proj and down_proj write to the residual stream, behind the norm or factor that "
            "the family names",
            "Allocate with refit='none'.",
        )
