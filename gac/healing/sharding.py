"""Sharded training (FSDP2) for models whose training state does not fit one GPU.

Every decoder layer is one unit, and the rest of the model another (``torch.distributed.fsdp.fully_shard``; ZeRO, arXiv
1910.02054, stage 3). A unit is gathered while it runs. Masters, gradients and moments stay sharded.
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

STATE_BYTES = 16  # bytes of a trained number: master, gradient and two moments, in float32
FREE = 0.6  # the share of a GPU's free memory that they may take


def needs_sharding(model: Any, trained: int, ranks: Ranks) -> bool:
    """True if ``trained`` numbers are too many for one of several GPUs; the same in every process."""
    device = input_device(model)
    if ranks.count == 1 or device.type != "cuda":
        return False
    return any(ranks.gathered(not fits(trained, device)))


def fits(numbers: int, device: torch.device, reserved: int = 0) -> bool:
    """True if ``STATE_BYTES`` for each number, and other ``reserved`` bytes, fit the free memory of a GPU."""
    return STATE_BYTES * numbers + reserved <= FREE * free_memory(device)


@contextmanager
def offloaded(*models: nn.Module) -> Iterator[None]:
    devices = [input_device(model) for model in models]
    try:
        for model in models:
            model.to("cpu")
        yield
    finally:
        for model, device in zip(models, devices, strict=True):
            model.to(device)


def shard(model: nn.Module, layers: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """Shard a model that is in host memory; its parameters stay there until they are gathered."""
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)  # else it would miss that it is to be trained


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor of a sharded one; every process has to call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_part(tensor: Tensor) -> Tensor:
    """This process's shard; the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gather_like(tensor: Tensor, part: Tensor) -> Tensor:
    """The full values of which every process has a part, sharded as ``tensor`` is; every process has to call."""
    if not isinstance(tensor, DTensor):
        return part
    shape: dict[str, Any] = {"shape": tensor.shape, "stride": tensor.stride()}
    local = part.to(local_part(tensor).device)
    return DTensor.from_local(local, tensor.device_mesh, tensor.placements, run_check=False, **shape).full_tensor()


def shard_like(tensor: Tensor, values: Tensor) -> Tensor:
    return local_part(distribute_like(tensor, values)).to("cpu", copy=True) if isinstance(tensor, DTensor) else values


def distribute_like(tensor: Tensor, values: Tensor) -> Tensor:
    """A copy of full values on the device of ``tensor``, sharded as that is."""
    values = values.to(tensor.device, copy=True)
    return distribute_tensor(values, tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else values
