"""Communication between the processes of a run: sums, values of one for all, modules.

Every process runs the same program, so all of them call the same methods in the same order. Alone they do nothing.
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
BUCKET_BYTES = 2**26  # bytes of small tensors that are sent at once


class Ranks:
    """The ``count`` processes of a run: a single one, or several of ``torch.distributed``; rank 0 prints and writes.

    Several have a process group for tensors of each type of device; that of ``cpu`` takes objects too. ``settle`` is
    called when a group fails, since another process is gone; it returns if that is not the reason.
    """

    count, rank = 1, 0

    def __init__(
        self, groups: Mapping[str, dist.ProcessGroup] | None = None, settle: Callable[[], None] = lambda: None
    ) -> None:
        if groups is not None:
            self.count, self.rank = dist.get_world_size(), dist.get_rank()
        self._groups, self._settle = groups or {}, settle

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def owns(self, turn: int) -> bool:
        """True if this process does the work of this number, where all take turns."""
        return turn % self.count == self.rank

    def rows(self, count: int) -> slice:
        """Return this process's share of so many rows: shares are contiguous, in order, and differ by at most one."""
        return slice(self.rank * count // self.count, (self.rank + 1) * count // self.count)

    def shared_out(self, sizes: Sequence[int]) -> list[int]:
        """Assign works to ranks so that the largest sum of sizes is small: the largest first, to the least loaded."""
        load, owners = [0] * self.count, [0] * len(sizes)
        for work in sorted(range(len(sizes)), key=lambda work: (-sizes[work], work)):
            owners[work] = min(range(self.count), key=lambda rank: (load[rank], rank))
            load[owners[work]] += sizes[work]
        return owners

    def total(self, tensor: Tensor) -> Tensor:
        """Sum over all processes, in place, in every one."""
        if self.count > 1:
            self._call(dist.all_reduce, tensor, group=self._groups[tensor.device.type])
        return tensor

    def average(self, tensors: Iterable[Tensor]) -> None:
        """Average over all processes, in place, in every one. Small tensors of one dtype are sent at once."""
        if self.count == 1:
            return
        for bucket in _take_tensors(tensors, BUCKET_BYTES):  # type: ignore[no-untyped-call]
            means = self.total(_flatten_dense_tensors(bucket))  # type: ignore[no-untyped-call]
            torch._foreach_copy_(bucket, _unflatten_dense_tensors(means.div_(self.count), bucket))  # type: ignore[no-untyped-call]

    @contextmanager
    def averaging(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Average the gradients of one backward pass, each while those before it in the model are computed."""
        pending: list[tuple[nn.Parameter, dist.Work]] = []

        def begin(parameter: nn.Parameter) -> None:
            options = {"group": self._groups[parameter.device.type], "async_op": True}
            pending.append((parameter, self._call(dist.all_reduce, parameter.grad, **options)))

        watched = parameters if self.count > 1 else ()
        hooks = [weight.register_post_accumulate_grad_hook(begin) for weight in watched]  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        for parameter, work in pending:
            self._call(work.wait)
            cast(Tensor, parameter.grad).div_(self.count)

    def total_at(self, owner: int, tensor: Tensor) -> Tensor:
        """Sum over all processes, in place; the result is valid at the owner alone."""
        if self.count > 1:
            self._call(dist.reduce, tensor, dst=owner, group=self._groups[tensor.device.type])
        return tensor

    def once(self, find: Callable[[], T]) -> T:
        """Call a function on rank 0, and return its value in every process."""
        if self.count == 1:
            return find()
        value: T = self._broadcast([find()] if self.leads else [None], 0)
        return value

    def gathered(self, value: T) -> list[T]:
        """Return the values of all processes, in every process, by rank."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        self._call(dist.all_gather_object, values, value, group=self._groups["cpu"])
        return values

    def modules(self, modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
        """Return the modules of all processes, in every process, with the same bits; each is given by one of them."""
        if self.count == 1:
            return dict(modules)
        names = self.gathered(list(modules))
        return {name: self._module(modules.get(name), owner) for owner, theirs in enumerate(names) for name in theirs}

    def collected(self, rows: Tensor) -> Tensor | None:
        """Concatenate the rows of all processes at rank 0, on the CPU if there are several; return None elsewhere."""
        if self.count == 1:
            return rows
        sizes, group = self.gathered(len(rows)), self._groups[rows.device.type]
        if not self.leads:
            self._call(dist.send, rows.contiguous(), dst=0, group=group)
            return None
        parts = [rows.cpu()]
        for rank, size in enumerate(sizes[1:], 1):
            part = rows.new_empty(size, *rows.shape[1:])
            self._call(dist.recv, part, src=rank, group=group)
            parts.append(part.cpu())
        return torch.cat(parts)

    def wait(self) -> None:
        if self.count > 1:
            self._call(dist.barrier, group=self._groups["cpu"])

    def mesh(self, device: str) -> DeviceMesh:
        return DeviceMesh.from_group(self._groups[device], device)

    def meet(self, timeout: timedelta) -> None:
        """Wait for all of several processes; RuntimeError names those that do not arrive in time."""
        dist.monitored_barrier(self._groups["cpu"], timeout, wait_all_ranks=True)

    def check_alike(self, facts: Mapping[str, Any]) -> None:
        """Raise GacError if processes differ in one of these facts; names the first process that differs."""
        everybody = self.gathered(dict(facts))
        for name, value in everybody[0].items():
            for rank, other in enumerate(everybody):
                if other[name] != value:
                    raise GacError(
                        f"{name} {other[name]} on rank {rank} of {self.count}, where rank 0 has {value}",
                        f"the same {name} in every process",
                        "Start torchrun with the same files, packages and arguments everywhere, on GPUs of one kind.",
                    )

    def _module(self, module: nn.Module | None, owner: int) -> nn.Module:
        empty = None
        if module is not None:
            tensors = (*module.parameters(), *module.buffers())
            device = next((tensor.device.type for tensor in tensors), "cpu")
            empty = copy.deepcopy(module, {id(tensor): _without_values(tensor) for tensor in tensors}), device
        skeleton, device = self._broadcast([empty], owner)
        if module is None:
            module = skeleton.to_empty(device=torch.device(device))
        with torch.no_grad():
            for tensor in filter(Tensor.numel, (*module.parameters(), *module.buffers())):
                values = tensor.detach().contiguous()
                bits = values.reshape(-1).view(torch.uint8)
                self._call(dist.broadcast, bits, src=owner, group=self._groups[bits.device.type])
                if bits.data_ptr() != tensor.data_ptr() and owner != self.rank:
                    tensor.copy_(values)
        return module

    def _broadcast(self, value: list[Any], owner: int) -> Any:
        cpu = torch.device("cpu")
        self._call(dist.broadcast_object_list, value, src=owner, group=self._groups["cpu"], device=cpu)
        return value[0]

    def _call(self, call: Callable[..., T], *args: Any, **options: Any) -> T:
        try:
            return call(*args, **options)
        except RuntimeError:
            self._settle()
            raise


def _without_values(tensor: Tensor) -> Tensor:
    empty = tensor.detach().to("meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


ALONE = Ranks()
