"""Gradients that a run leaves; on a GPU a small model's run is captured once in a CUDA graph, and replayed.

A step of a small model is thousands of kernels of a few microseconds, and Python launches them more slowly than they
run. Replayed, they are the same kernels on the same numbers.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gac.core.distributed.ranks import ALONE, Ranks
from gac.healing.logits import CHECKPOINTED
from gac.runtime.storage.modules import count_parameters

logger = logging.getLogger(__name__)

WARM = 2
"""Runs before one is captured, in which libraries set up what they need."""

Loss = Callable[..., Tensor]
"""Of some tensors."""


@dataclass
class Captures:
    """Whether runs of a healing are captured; what cannot be is not tried again.

    Attributes:
        on: whether they are.
    """

    on: bool = False


class Gradients:
    """Those of a loss, left at parameters.

    Args:
        loss: what is made smaller.
        captures: whether its runs are captured, once for all tensors of a shape.
        ranks: the processes over which gradients are averaged, each process having those of its own share.
    """

    def __init__(
        self, loss: Loss, parameters: Iterable[nn.Parameter], captures: Captures, ranks: Ranks = ALONE
    ) -> None:
        self._loss, self._parameters, self._captures, self._ranks = loss, [*parameters], captures, ranks
        self._captured: dict[tuple[torch.Size, ...], _Captured] = {}
        self._held: list[Tensor] = []

    def begin(self) -> None:
        """Let there be none; captured runs add them to the same tensors every time."""
        if not self._captures.on:
            return
        self._held = self._held or [torch.zeros_like(one) for one in self._parameters]
        for one, held in zip(self._parameters, self._held, strict=True):
            one.grad = held
        torch._foreach_zero_(self._held)

    def add(self, *given: Tensor, last: bool = True) -> Tensor:
        """Those of the loss of these tensors, which is returned.

        Args:
            last: whether the sum is complete, and is averaged over all processes.
        """
        shapes = tuple(one.shape for one in given)
        if self._captures.on and shapes not in self._captured:
            self._capture(given, shapes)
        captured = self._captured.get(shapes)
        own = [one for one in self._parameters if last and not isinstance(one, DTensor)]  # parts are means by now
        if captured is None:
            with self._ranks.averaging(own):
                return self._run(*given)
        loss = captured.run(given)
        self._ranks.average(one.grad for one in own if one.grad is not None)
        return loss

    def _capture(self, given: Sequence[Tensor], shapes: tuple[torch.Size, ...]) -> None:
        before, captured, why = [one.clone() for one in self._held], None, ""
        try:
            device = self._parameters[0].device
            captured = _Captured(self._run, [one.to(device, copy=True) for one in given])
        except RuntimeError as failure:  # what PyTorch raises where a model waits for what its GPU finds, say
            why = str(failure).partition("\n")[0] or type(failure).__name__
        torch._foreach_copy_(self._held, before)
        reasons = [one for one in self._ranks.gathered(why) if one]  # all go on alike, for they average alike
        if captured is not None and not reasons:
            self._captured[shapes] = captured
            return
        logger.info("steps are not captured in a CUDA graph, and take longer: %s", reasons[0])
        self._captures.on = False
        self._captured.clear()

    def _run(self, *given: Tensor) -> Tensor:
        loss = self._loss(*given)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


class _Captured:
    """A run in a CUDA graph.

    Args:
        given: what it reads, on the GPU, which every run fills anew.
    """

    def __init__(self, run: Loss, given: Sequence[Tensor]) -> None:
        self._given, self._device, self._graph = given, given[0].device, torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.current_stream(self._device)):
            aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                for _ in range(WARM):
                    run(*given)
            torch.cuda.current_stream().wait_stream(aside)
            with torch.cuda.graph(self._graph):
                self._found = run(*given)

    def run(self, given: Sequence[Tensor]) -> Tensor:
        """With other tensors of the same shapes."""
        for held, one in zip(self._given, given, strict=True):
            held.copy_(one)
        with torch.cuda.device(self._device):
            self._graph.replay()
        return self._found.clone()


def can_be_captured(*models: nn.Module) -> bool:
    """Whether models are small, whole, and all on one GPU; large ones keep their GPU busy as they are."""
    held = [one for model in models for one in model.parameters()]
    return (
        len({one.device for one in held}) == 1
        and held[0].is_cuda
        and not any(isinstance(one, DTensor) for one in held)
        and all(count_parameters(model) < CHECKPOINTED for model in models)
    )
