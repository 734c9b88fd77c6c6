"""Copy weights to a GPU through pinned memory, which all threads of PyTorch fill."""

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
"""Bytes from which a weight goes through pinned memory."""
CHUNK = 32 << 20
"""Bytes of each of two pinned buffers: one is filled while the other is sent."""
_TURN = 2e-4
"""Switch interval of threads in seconds; Python's default of 0.005 would keep the GPU waiting."""
_cuda: Any = torch.cuda  # whose events have no annotations


def moved(model: Any, device: torch.device | str) -> Any:
    """The model on a device, like ``model.to(device)``, which reads a mapped file with one slow thread."""
    place = torch.device(device)
    if place.type == "cuda" and (large := _large(model)):
        for values, copy in zip(large, _sent(large, place), strict=True):
            values.data = copy
    return model.to(place)


@contextmanager
def sending(tensors: Mapping[str, Tensor], device: torch.device) -> Iterator[Callable[[], dict[str, Tensor]]]:
    """Copy tensors from host memory to a GPU in a background thread, which ends with the context.

    Yields:
        A function to call once: it waits for the copies and returns them, or raises the error of the thread. For any
        other device it returns the tensors as they are.
    """
    if device.type != "cuda":
        yield lambda: dict(tensors)
        return
    if device.index is None:  # which is another GPU in another thread
        device = torch.device("cuda", torch.cuda.current_device())
    stopped, turn = Event(), sys.getswitchinterval()
    with ThreadPoolExecutor(1, "gac-sending") as pool:
        copies = pool.submit(_sent, list(tensors.values()), device, stopped)
        sys.setswitchinterval(_TURN)
        try:
            yield lambda: {name: copies.result().pop(0) for name in tensors}  # frees them here
        finally:
            sys.setswitchinterval(turn)
            stopped.set()


def _large(model: nn.Module) -> list[Tensor]:
    tensors = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}.values()
    plain = [tensor for tensor in tensors if type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided]
    return [
        values for values in plain if values.device.type == "cpu" and values.nbytes >= LARGE and values.is_contiguous()
    ]


def _sent(tensors: Sequence[Tensor], device: torch.device, stopped: Event | None = None) -> list[Tensor]:
    targets = [torch.empty(source.shape, dtype=source.dtype, device=device) for source in tensors]
    pairs = list(zip(tensors, targets, strict=True))
    large, small = ([pair for pair in pairs if (pair[0].nbytes >= LARGE) is is_large] for is_large in (True, False))
    with torch.cuda.device(device), torch.no_grad():
        if small:
            torch._foreach_copy_([target for _, target in small], [source for source, _ in small])
        if large:
            _pass_through(large, stopped)
        torch.cuda.synchronize()
    return targets


def _pass_through(pairs: Sequence[tuple[Tensor, Tensor]], stopped: Event | None) -> None:
    stages = [torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    done = [_cuda.Event() for _ in stages]
    for turn, (sources, targets) in enumerate(_batches(pairs)):
        if stopped is not None and stopped.is_set():
            break
        stage, event = stages[turn % 2], done[turn % 2]
        event.synchronize()
        sizes = [len(source) for source in sources]
        staged = torch.split_with_sizes(stage[: sum(sizes)], sizes)
        torch._foreach_copy_(staged, sources)  # in one call, for Python goes on in other threads meanwhile
        torch._foreach_copy_(targets, staged, non_blocking=True)
        event.record()


def _batches(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
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
    return torch.split(values.detach().reshape(-1).view(torch.uint8), CHUNK)
