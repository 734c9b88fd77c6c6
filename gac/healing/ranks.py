"""The processes of a run, as torchrun starts them: each trains on its share of every batch."""

import os
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class Ranks:
    """The processes of a run; of this class itself, one process that is alone.

    Attributes:
        count: how many there are.
        own: the number of this one, from 0; rank 0 leads: it speaks, and writes.
    """

    count = 1
    own = 0

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.own == 0

    def once(self, find: Callable[[], T]) -> T:
        """What rank 0 finds, in every process."""
        return find()

    def average(self, tensors: Iterable[Tensor]) -> None:
        """The mean over all processes, in every one; in place."""


class ProcessRanks(Ranks):
    """Several processes of ``torch.distributed``."""

    def __init__(self) -> None:
        self.count, self.own = dist.get_world_size(), dist.get_rank()

    def once(self, find: Callable[[], T]) -> T:
        held: list[Any] = [find() if self.leads else None]
        dist.broadcast_object_list(held)
        found: T = held[0]
        return found

    def average(self, tensors: Iterable[Tensor]) -> None:
        held = list(tensors)
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in held]:
            work.wait()
        for tensor in held:
            tensor.div_(self.count)


ALONE = Ranks()


@cache
def this_run() -> Ranks:
    """The processes of this run, brought together where torchrun has started several."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "RANK" not in os.environ:
        return ALONE
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    return ProcessRanks()
