"""Models of which every process holds a part: FSDP2, where what is trained does not fit one GPU.

Every decoder layer is one unit, and what is left of the model another (``torch.distributed.fsdp.fully_shard``; ZeRO,
arXiv 1910.02054, stage 3). A unit is whole while it runs. Masters, gradients and moments stay in parts.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from gac.core.distributed.ranks import Ranks
from gac.models.modules import free_memory, input_device

STATE = 16
"""Bytes of a number that is trained: its master, its gradient and two moments, in float32."""
FREE = 0.6
"""The part of a GPU's free memory that they may take as a whole."""


def wanted(model: Any, trained: int, ranks: Ranks) -> bool:
    """Whether so many trained numbers are too much for each of several GPUs; the same in every process."""
    device = input_device(model)
    if ranks.count == 1 or device.type != "cuda":
        return False
    return any(ranks.gathered(not fits(trained, device)))


def fits(numbers: int, device: torch.device) -> bool:
    """Whether ``STATE`` bytes of each of so many numbers fit a GPU beside what it holds."""
    return STATE * numbers <= FREE * free_memory(device)


@contextmanager
def waiting(*models: nn.Module) -> Iterator[None]:
    """With models in host memory, which are back on their device on exit."""
    devices = [input_device(model) for model in models]
    try:
        for model in models:
            model.to("cpu")
        yield
    finally:
        for model, device in zip(models, devices, strict=True):
            model.to(device)


def shard(model: nn.Module, layers: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """Leave to every process its part of a model that is in host memory; the model stays so."""
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)  # else it would miss that it is to be trained


def whole(tensor: Tensor) -> Tensor:
    """A tensor of which this process may have a part; all processes ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(tensor: Tensor) -> Tensor:
    """What this process has of a tensor: all of it, unless that is divided."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_like(tensor: Tensor, part: Tensor) -> Tensor:
    """Values ``(...)`` of which this process has such a part, divided as a tensor is; all processes ask for it."""
    if not isinstance(tensor, DTensor):
        return part
    shape: dict[str, Any] = {"shape": tensor.shape, "stride": tensor.stride()}
    own = part.to(own_part(tensor).device)
    return DTensor.from_local(own, tensor.device_mesh, tensor.placements, run_check=False, **shape).full_tensor()


def part_like(tensor: Tensor, values: Tensor) -> Tensor:
    """What this process has, on the host, of values ``(...)`` that are divided as a tensor is."""
    return own_part(parts_like(tensor, values)).to("cpu", copy=True) if isinstance(tensor, DTensor) else values


def parts_like(tensor: Tensor, values: Tensor) -> Tensor:
    """A copy of values ``(...)`` on the device of a tensor, and divided as that is."""
    if not isinstance(tensor, DTensor):
        return values.to(tensor.device, copy=True)
    return distribute_tensor(values.to(tensor.device, copy=True), tensor.device_mesh, tensor.placements)
