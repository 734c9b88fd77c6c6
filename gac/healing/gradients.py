"""Gradients of a loss; on a GPU the passes of a small model are captured in a CUDA graph once, and replayed.

A step of a small model is thousands of kernels of a few microseconds, which run faster than Python launches them.
Replayed, they are the same kernels on the same numbers.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gac.core.distributed.ranks import ALONE, Ranks
from gac.core.errors import first_line
from gac.healing.losses import LARGE
from gac.runtime.storage.modules import count_parameters

logger = logging.getLogger(__name__)

WARM_UP_PASSES = 2
Loss = Callable[..., Tensor]


@dataclass
class Capturing:
    """A switch for capturing, shared by a run: what cannot be captured is not tried again."""

    enabled: bool = False


class Gradients:
    """Accumulates the gradients of a loss, a function of tensors that is captured once for each set of shapes."""

    def __init__(
        self, loss: Loss, parameters: Iterable[nn.Parameter], capturing: Capturing, ranks: Ranks = ALONE
    ) -> None:
        self._loss, self._parameters, self._capturing, self._ranks = loss, [*parameters], capturing, ranks
        self._captured: dict[tuple[torch.Size, ...], _CapturedPass] = {}
        self._buffers: list[Tensor] = []

    def zero(self) -> None:
        """Start a sum of gradients; captured passes add to the same tensors every time."""
        if not self._capturing.enabled:
            return
        self._buffers = self._buffers or [torch.zeros_like(parameter) for parameter in self._parameters]
        for parameter, buffer in zip(self._parameters, self._buffers, strict=True):
            parameter.grad = buffer
        torch._foreach_zero_(self._buffers)

    def add(self, *inputs: Tensor, last: bool = True) -> Tensor:
        """Add the gradients of the loss of these inputs, and return it; the ``last`` sum is averaged over processes."""
        shapes = tuple(tensor.shape for tensor in inputs)
        if self._capturing.enabled and shapes not in self._captured:
            self._capture(inputs, shapes)
        captured = self._captured.get(shapes)
        # FSDP averages the gradients of sharded parameters by itself.
        replicated = [each for each in self._parameters if last and not isinstance(each, DTensor)]
        if captured is None:
            with self._ranks.averaging(replicated):
                return self._run(*inputs)
        loss = captured.run(inputs)
        self._ranks.average(parameter.grad for parameter in replicated if parameter.grad is not None)
        return loss

    def _capture(self, inputs: Sequence[Tensor], shapes: tuple[torch.Size, ...]) -> None:
        before, captured, reason = [buffer.clone() for buffer in self._buffers], None, ""
        try:
            device = self._parameters[0].device
            captured = _CapturedPass(self._run, [tensor.to(device, copy=True) for tensor in inputs])
        except RuntimeError as failure:  # for example of a model that waits for a result of its GPU
            reason = first_line(failure)
        torch._foreach_copy_(self._buffers, before)
        reasons = [text for text in self._ranks.gathered(reason) if text]
        if captured is not None and not reasons:
            self._captured[shapes] = captured
            return
        logger.info("steps are not captured in a CUDA graph, and take longer: %s", reasons[0])
        self._capturing.enabled = False  # in every process, because all have to average alike
        self._captured.clear()

    def _run(self, *inputs: Tensor) -> Tensor:
        loss = self._loss(*inputs)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


class _CapturedPass:
    """A forward and backward pass in a CUDA graph that reads ``inputs``, which every run overwrites."""

    def __init__(self, run: Loss, inputs: Sequence[Tensor]) -> None:
        self._inputs, self._device, self._graph = inputs, inputs[0].device, torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.current_stream(self._device)):
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARM_UP_PASSES):
                    run(*inputs)
            torch.cuda.current_stream().wait_stream(side)
            with torch.cuda.graph(self._graph):
                self._loss = run(*inputs)

    def run(self, inputs: Sequence[Tensor]) -> Tensor:
        for static, tensor in zip(self._inputs, inputs, strict=True):
            static.copy_(tensor)
        with torch.cuda.device(self._device):
            self._graph.replay()
        return self._loss.clone()


def can_capture(*models: nn.Module) -> bool:
    """True if all models are small, not sharded, and on one GPU; large models keep their GPU busy anyway."""
    parameters = [parameter for model in models for parameter in model.parameters()]
    return (
        len({parameter.device for parameter in parameters}) == 1
        and parameters[0].is_cuda
        and not any(isinstance(parameter, DTensor) for parameter in parameters)
        and all(count_parameters(model) < LARGE for model in models)
    )
