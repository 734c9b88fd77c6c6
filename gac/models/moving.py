"""Copy weights to a GPU through pinned memory, which all threads of PyTorch fill."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

LARGE = 1 << 16
"""Bytes from which a weight goes through pinned memory."""
CHUNK = 32 << 20
"""Bytes of each of two pinned buffers: one is filled while the other is sent."""
_cuda: Any = torch.cuda  # whose events have no annotations


def moved(model: Any, device: torch.device | str) -> Any:
    """The model on a device, like ``model.to(device)``, which reads a mapped file with one slow thread."""
    place = torch.device(device)
    if place.type == "cuda" and (large := _large(model)):
        for values, copy in zip(large, _sent(large, place), strict=True):
            values.data = copy
    return model.to(place)


def _large(model: nn.Module) -> list[Tensor]:
    tensors = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}.values()
    plain = [tensor for tensor in tensors if type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided]
    return [
        values for values in plain if values.device.type == "cpu" and values.nbytes >= LARGE and values.is_contiguous()
    ]


def _sent(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    targets = [torch.empty(source.shape, dtype=source.dtype, device=device) for source in tensors]
    with torch.cuda.device(device), torch.no_grad():
        stages = [torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        done = [_cuda.Event() for _ in stages]
        for turn, (pieces, places) in enumerate(_batches(zip(tensors, targets, strict=True))):
            stage, event = stages[turn % 2], done[turn % 2]
            event.synchronize()
            sizes = [len(piece) for piece in pieces]
            staged = torch.split_with_sizes(stage[: sum(sizes)], sizes)
            torch._foreach_copy_(staged, pieces)
            torch._foreach_copy_(places, staged, non_blocking=True)
            event.record()
        torch.cuda.synchronize()
    return targets


def _batches(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
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
