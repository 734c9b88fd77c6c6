"""Weights on their way to a GPU: large ones pass through pinned memory, which all threads fill."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

LARGE = 1 << 20
"""Bytes from which a weight goes that way."""
CHUNK = 32 << 20
"""Bytes of each of the two pinned buffers: one is filled while the other is sent."""
_cuda: Any = torch.cuda  # whose events have no annotations


def moved(model: Any, device: torch.device | str) -> Any:
    """The model on a device, as ``model.to(device)`` puts it there.

    To a GPU this is sooner: ``to`` has one thread read a mapped file, which is slower than the GPU takes it in.
    """
    place = torch.device(device)
    if place.type == "cuda" and (large := _large(model)):
        _send(large, place)
    return model.to(place)


def _large(model: nn.Module) -> list[Tensor]:
    """Parameters and buffers in host memory, each once; none that is more than its numbers, one after the other."""
    held = {id(one): one for one in chain(model.parameters(), model.buffers())}.values()
    plain = [one for one in held if type(one) in (Tensor, nn.Parameter) and one.layout is torch.strided]
    return [one for one in plain if one.device.type == "cpu" and one.nbytes >= LARGE and one.is_contiguous()]


def _send(tensors: list[Tensor], device: torch.device) -> None:
    """Put the numbers of each on the GPU; the tensors themselves stay the same objects."""
    with torch.cuda.device(device):
        stages = [torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        sent = [_cuda.Event() for _ in stages]
        turn = 0
        for values in tensors:
            there = torch.empty_like(values, device=device)
            for source, target in zip(_pieces(values), _pieces(there), strict=True):
                sent[turn].synchronize()
                stage = stages[turn][: len(source)].copy_(source)
                target.copy_(stage, non_blocking=True)
                sent[turn].record()
                turn = 1 - turn
            values.data = there
        torch.cuda.synchronize()


def _pieces(values: Tensor) -> Sequence[Tensor]:
    """Its bytes, as many at a time as a buffer holds."""
    return torch.split(values.detach().reshape(-1).view(torch.uint8), CHUNK)
