"""Weights on their way to a GPU: they pass through pinned memory, which all threads of PyTorch fill."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from threading import Event
from typing import Any

import torch
from torch import Tensor, nn

LARGE = 1 << 16
"""Bytes from which a weight goes that way; smaller ones are sent as they are."""
CHUNK = 32 << 20
"""Bytes of each of the two pinned buffers: one is filled while the other is sent."""
_TURN = 2e-4
"""Seconds after which a thread lets another go on meanwhile: Python's own 0.005 would keep the GPU waiting."""
_cuda: Any = torch.cuda  # whose events have no annotations


def moved(model: Any, device: torch.device | str) -> Any:
    """The model on a device, as ``model.to(device)`` puts it there.

    To a GPU this is sooner: ``to`` has one thread read a mapped file, which is slower than the GPU takes it in.
    """
    place = torch.device(device)
    if place.type == "cuda" and (large := _large(model)):
        for values, there in zip(large, _sent(large, place), strict=True):
            values.data = there
    return model.to(place)


@contextmanager
def sending(tensors: Mapping[str, Tensor], device: torch.device) -> Iterator[Callable[[], dict[str, Tensor]]]:
    """Send tensors of host memory to a GPU, in a thread of their own, while something else is done.

    Whatever ends the context, the thread ends with it.

    Yields:
        What waits for them, and hands them over where they are then, once, or raises what failed in the thread. For any
        other device there is no thread, and it returns them as they are.
    """
    if device.type != "cuda":
        yield lambda: dict(tensors)
        return
    if device.index is None:  # each thread has a GPU of its own that is meant by this
        device = torch.device("cuda", torch.cuda.current_device())
    stopped, turn = Event(), sys.getswitchinterval()
    with ThreadPoolExecutor(1, "gac-sending") as pool:
        there = pool.submit(_sent, list(tensors.values()), device, stopped)
        sys.setswitchinterval(_TURN)
        try:
            yield lambda: {name: there.result().pop(0) for name in tensors}  # nothing here holds them then
        finally:
            sys.setswitchinterval(turn)
            stopped.set()


def _large(model: nn.Module) -> list[Tensor]:
    """Parameters and buffers in host memory, each once; none that is more than its numbers, one after the other."""
    held = {id(one): one for one in chain(model.parameters(), model.buffers())}.values()
    plain = [one for one in held if type(one) in (Tensor, nn.Parameter) and one.layout is torch.strided]
    return [one for one in plain if one.device.type == "cpu" and one.nbytes >= LARGE and one.is_contiguous()]


def _sent(tensors: Sequence[Tensor], device: torch.device, stopped: Event | None = None) -> list[Tensor]:
    """The same numbers on the GPU; of what is sent when it is told to stop, nothing is of use."""
    found = [torch.empty(one.shape, dtype=one.dtype, device=device) for one in tensors]
    pairs = list(zip(tensors, found, strict=True))
    large, small = ([pair for pair in pairs if (pair[0].nbytes >= LARGE) is is_large] for is_large in (True, False))
    with torch.cuda.device(device), torch.no_grad():
        if small:
            torch._foreach_copy_([there for _, there in small], [one for one, _ in small])
        if large:
            _pass_through(large, stopped)
        torch.cuda.synchronize()
    return found


def _pass_through(pairs: Sequence[tuple[Tensor, Tensor]], stopped: Event | None) -> None:
    """Send the bytes of large tensors, as many at a time as a pinned buffer holds."""
    stages = [torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    done = [_cuda.Event() for _ in stages]
    for turn, (sources, targets) in enumerate(_batches(pairs)):
        if stopped is not None and stopped.is_set():
            break
        stage, event = stages[turn % 2], done[turn % 2]
        event.synchronize()
        sizes = [len(one) for one in sources]
        staged = torch.split_with_sizes(stage[: sum(sizes)], sizes)
        torch._foreach_copy_(staged, sources)  # in one call, for Python goes on in other threads meanwhile
        torch._foreach_copy_(targets, staged, non_blocking=True)
        event.record()


def _batches(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """The bytes of tensors, and where each goes in those that they are sent to, as many at a time as a buffer holds."""
    sources: list[Tensor] = []
    targets: list[Tensor] = []
    room = CHUNK
    for source, target in pairs:
        for piece, place in zip(_pieces(source), _pieces(target), strict=True):
            if len(piece) > room:
                yield sources, targets
                sources, targets, room = [], [], CHUNK
            sources.append(piece)
            targets.append(place)
            room -= len(piece)
    if sources:
        yield sources, targets


def _pieces(values: Tensor) -> Sequence[Tensor]:
    """Its bytes, as many at a time as a buffer holds."""
    return torch.split(values.detach().reshape(-1).view(torch.uint8), CHUNK)
