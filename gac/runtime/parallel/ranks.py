"""The processes that a model is split over: how they start, and what they tell each other."""

import os
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, distributed

# Newer versions of PyTorch know it by another name.
_all_gather: Any = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
_PARALLEL = ("fsdp_size", "dp_replicate_size", "pp_size", "ep_size")


class SplitError(ValueError):
    """A model that cannot be split as it was asked for: what was given, what was expected, and what to do next."""

    def __init__(self, value: str, expected: str, remedy: str) -> None:
        self.given, self.expected, self.remedy = value, expected, remedy
        super().__init__(f"{value}; expected {expected}. {remedy}")


@dataclass(frozen=True, eq=False)
class Ranks:
    """Processes of which each holds a part of the model, on a GPU of its own or on the CPU."""

    group: Any  # of ``torch.distributed``; None where nothing is sent, as for a model that is only looked at
    rank: int  # of this process
    size: int  # how many there are
    device: torch.device  # where this one computes

    def summed(self, part: Tensor) -> Tensor:
        """The sum over all processes (all-reduce); the argument may be written to."""
        _check_no_gradients(part)
        part = part.contiguous()
        distributed.all_reduce(part, group=self.group)
        return part

    def gathered(self, part: Tensor) -> Tensor:
        """The last axes of all processes, one after the other (all-gather): ``(..., size * n)`` of ``(..., n)``."""
        return self.stacked(part).movedim(0, -2).flatten(-2)

    def stacked(self, part: Tensor) -> Tensor:
        """Return what all processes have, ``(size, ..., n)`` of ``(..., n)``."""
        _check_no_gradients(part)
        rows = part.reshape(-1, part.shape[-1]).contiguous()
        result = rows.new_empty(self.size * len(rows), rows.shape[1])
        _all_gather(result, rows, group=self.group)
        return result.view(self.size, *part.shape)

    def check_alike(self, value: Any, what: str) -> None:
        """Raise a SplitError that names the first process that has something else than process 0."""
        result: list[Any] = [None] * self.size
        distributed.all_gather_object(result, value, group=self.group)
        for rank, item in enumerate(result):
            if item != result[0]:
                raise SplitError(
                    f"process {rank} has {what} {item}",
                    f"{result[0]}, as process 0 has it",
                    "Give all of them the same.",
                )

    def __deepcopy__(self, memo: Any) -> "Ranks":
        return self  # copies of a model are split over the same processes


def _check_no_gradients(part: Tensor) -> None:
    if part.requires_grad and torch.is_grad_enabled():
        raise RuntimeError("a split model was run with gradients; expected torch.no_grad(). Train it whole.")


def ranks_asked_for(options: dict[str, Any]) -> Ranks | None:
    """The processes over which ``from_pretrained`` is to split the model; None: it is not split.

    Options that ask for splitting are taken out: ``tp_plan="auto"``, ``tp_size``, ``device_mesh``, or a
    ``distributed_config`` with the first two. A SplitError says if they ask for something else, or for other processes.
    """
    distributed_config = options.pop("distributed_config", None)
    plan, size, mesh = (options.pop(name, None) for name in ("tp_plan", "tp_size", "device_mesh"))
    if distributed_config is not None:
        stated = distributed_config if isinstance(distributed_config, dict) else vars(distributed_config)
        if others := [name for name in _PARALLEL if stated.get(name) not in (None, 1)]:
            raise SplitError(f"{others[0]}={stated[others[0]]}", "tp_size and tp_plan alone", "Leave it out.")
        plan, size = stated.get("tp_plan", plan), stated.get("tp_size", size)
    if plan is None and size in (None, 1):
        return None
    if plan not in (None, "auto"):
        raise SplitError(f"tp_plan={plan!r}", "'auto'", "How a compressed model is split follows from its modules.")
    if options.get("device_map") is not None:
        raise SplitError("tp_plan and device_map", "one of them", "Leave device_map out.")
    if mesh is None:
        ranks = started()
    else:
        group = mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")
        ranks = Ranks(group, distributed.get_rank(group), distributed.get_world_size(group), _device())
    if size not in (None, ranks.size):
        raise SplitError(f"tp_size={size}", f"{ranks.size}, the number of processes", "Start as many with torchrun.")
    return ranks if ranks.size > 1 else None


def started() -> Ranks:
    """All processes of torchrun, each with the GPU of its local rank, or the CPU; a SplitError if there are none."""
    if not distributed.is_initialized():
        if "RANK" not in os.environ:
            raise SplitError("tp_plan in one process", "several", "Start them with torchrun --nproc-per-node 2.")
        distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo", device_id=_own_gpu())
    return Ranks(_everybody(), distributed.get_rank(), distributed.get_world_size(), _device())


@cache
def _everybody() -> Any:
    if torch.cuda.is_available() and "nccl" not in distributed.get_backend():
        _own_gpu()
        return distributed.new_group(backend="nccl")
    return distributed.group.WORLD


def _own_gpu() -> torch.device | None:
    if not torch.cuda.is_available():
        return None
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
