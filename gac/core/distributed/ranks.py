"""What the processes of a run tell one another: sums, values of one for all, modules.

Every process runs the same program, so all of them call the same of these in the same order. Alone they do nothing.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors
from torch.distributed.device_mesh import DeviceMesh

from gac.core.errors import GacError

T = TypeVar("T")
TOGETHER = 2**26
"""Bytes that travel together at most, where there are more tensors than one."""


class Ranks:
    """The processes of a run; of this class itself, one process that is alone.

    Attributes:
        count: how many there are.
        own: the number of this one, from 0; rank 0 leads: it speaks, and writes what is written once.
    """

    count = 1
    own = 0

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.own == 0

    def owns(self, turn: int) -> bool:
        """Whether the work of this number is this process's own, where all take turns."""
        return turn % self.count == self.own

    def rows(self, count: int) -> slice:
        """This process's share of so many rows: all shares are contiguous, in order, and differ by one at most."""
        return slice(self.own * count // self.count, (self.own + 1) * count // self.count)

    def shared_out(self, sizes: Sequence[int]) -> list[int]:
        """Who takes each of some works, so that the largest sum of sizes is small: the largest first, to who has least.

        Everyone is given the same.
        """
        taken, owners = [0] * self.count, [0] * len(sizes)
        for work in sorted(range(len(sizes)), key=lambda work: (-sizes[work], work)):
            owners[work] = min(range(self.count), key=lambda rank: (taken[rank], rank))
            taken[owners[work]] += sizes[work]
        return owners

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in every one; in place."""
        return tensor

    def average(self, tensors: Iterable[Tensor]) -> None:
        """The mean over all processes, in every one; in place. Small tensors of one kind travel together."""

    @contextmanager
    def averaging(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """What one backward pass leaves at parameters becomes the mean over all processes.

        Each gradient travels while those before it in the model are computed. All processes run the same graph.
        """
        yield

    def total_at(self, owner: int, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place; anywhere but at the owner nothing is to be read of it then."""
        return tensor

    def once(self, find: Callable[[], T]) -> T:
        """What rank 0 finds, in every process."""
        return find()

    def gathered(self, value: T) -> list[T]:
        """Everybody's value, in every process, by rank."""
        return [value]

    def modules(self, own: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
        """Everybody's modules, in every process and with the same bits; each is given by one of them."""
        return dict(own)

    def collected(self, rows: Tensor) -> Tensor | None:
        """Everybody's rows one below another, at rank 0, on the host where there are several processes; else None."""
        return rows

    def wait(self) -> None:
        """Go on once everybody is here."""

    def mesh(self, device: str) -> DeviceMesh:
        """All processes, as a mesh of devices of this type; there are several."""
        raise AssertionError("one process has no mesh")

    def check_alike(self, facts: Mapping[str, Any]) -> None:
        """Refuse processes that differ in one of these facts.

        Raises:
            GacError: names the fact, the first process that differs, and what both have.
        """
        everybody = self.gathered(dict(facts))
        for name, value in everybody[0].items():
            for rank, other in enumerate(everybody):
                if other[name] != value:
                    raise GacError(
                        f"{name} {other[name]} on rank {rank} of {self.count}, where rank 0 has {value}",
                        f"the same {name} in every process",
                        "Start torchrun with the same files, packages and arguments everywhere, on GPUs of one kind.",
                    )


class ProcessRanks(Ranks):
    """Several processes of ``torch.distributed``.

    Args:
        groups: the process group that takes tensors of each type of device; that of ``cpu`` takes objects too.
        settle: called when a group fails, since another process is gone; returns where that is not why.
    """

    def __init__(self, groups: Mapping[str, dist.ProcessGroup], settle: Callable[[], None]) -> None:
        self.count, self.own = dist.get_world_size(), dist.get_rank()
        self._groups, self._settle = groups, settle

    def total(self, tensor: Tensor) -> Tensor:
        self._told(dist.all_reduce, tensor, group=self._groups[tensor.device.type])
        return tensor

    def average(self, tensors: Iterable[Tensor]) -> None:
        for held in _take_tensors(tensors, TOGETHER):  # type: ignore[no-untyped-call]
            means = self.total(_flatten_dense_tensors(held))  # type: ignore[no-untyped-call]
            torch._foreach_copy_(held, _unflatten_dense_tensors(means.div_(self.count), held))  # type: ignore[no-untyped-call]

    @contextmanager
    def averaging(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        under_way: list[tuple[nn.Parameter, dist.Work]] = []

        def begin(one: nn.Parameter) -> None:
            options = {"group": self._groups[one.device.type], "async_op": True}
            under_way.append((one, self._told(dist.all_reduce, one.grad, **options)))

        hooks = [one.register_post_accumulate_grad_hook(begin) for one in parameters]  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        for one, work in under_way:
            self._told(work.wait)
            cast(Tensor, one.grad).div_(self.count)

    def total_at(self, owner: int, tensor: Tensor) -> Tensor:
        self._told(dist.reduce, tensor, dst=owner, group=self._groups[tensor.device.type])
        return tensor

    def once(self, find: Callable[[], T]) -> T:
        found: T = self._given([find()] if self.leads else [None], 0)
        return found

    def gathered(self, value: T) -> list[T]:
        found: list[Any] = [None] * self.count
        self._told(dist.all_gather_object, found, value, group=self._groups["cpu"])
        return found

    def modules(self, own: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
        names = self.gathered(list(own))
        return {name: self._module(own.get(name), owner) for owner, held in enumerate(names) for name in held}

    def collected(self, rows: Tensor) -> Tensor | None:
        sizes, group = self.gathered(len(rows)), self._groups[rows.device.type]
        if not self.leads:
            self._told(dist.send, rows.contiguous(), dst=0, group=group)
            return None
        found = [rows.cpu()]
        for rank, size in enumerate(sizes[1:], 1):
            theirs = rows.new_empty(size, *rows.shape[1:])
            self._told(dist.recv, theirs, src=rank, group=group)
            found.append(theirs.cpu())
        return torch.cat(found)

    def mesh(self, device: str) -> DeviceMesh:
        return DeviceMesh.from_group(self._groups[device], device)

    def wait(self) -> None:
        self._told(dist.barrier, group=self._groups["cpu"])

    def meet(self, longest: timedelta) -> None:
        """Wait so long for everybody.

        Raises:
            RuntimeError: names who is not here by then.
        """
        dist.monitored_barrier(self._groups["cpu"], longest, wait_all_ranks=True)

    def _module(self, module: nn.Module | None, owner: int) -> nn.Module:
        """The owner's module, tensor by tensor, on everybody's own device of the same type."""
        empty = None
        if module is not None:
            held = (*module.parameters(), *module.buffers())
            device = next((tensor.device.type for tensor in held), "cpu")
            empty = copy.deepcopy(module, {id(tensor): _without_values(tensor) for tensor in held}), device
        made, device = self._given([empty], owner)
        if module is None:
            module = made.to_empty(device=torch.device(device))
        with torch.no_grad():
            for tensor in filter(Tensor.numel, (*module.parameters(), *module.buffers())):
                values = tensor.detach().contiguous()
                bits = values.reshape(-1).view(torch.uint8)
                self._told(dist.broadcast, bits, src=owner, group=self._groups[bits.device.type])
                if bits.data_ptr() != tensor.data_ptr() and owner != self.own:
                    tensor.copy_(values)
        return module

    def _given(self, value: list[Any], owner: int) -> Any:
        self._told(dist.broadcast_object_list, value, src=owner, group=self._groups["cpu"], device=_HOST)
        return value[0]

    def _told(self, call: Callable[..., T], *args: Any, **options: Any) -> T:
        try:
            return call(*args, **options)
        except RuntimeError:
            self._settle()
            raise


_HOST = torch.device("cpu")


def _without_values(tensor: Tensor) -> Tensor:
    empty = tensor.detach().to("meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


ALONE = Ranks()
