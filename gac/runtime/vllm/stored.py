"""Linear layers of vLLM whose weights, or whose factors, lie in storages: packed integers, and numbers of 8 bits.

Siblings in one storage take one GEMM, as those of 16 bits do. Others run apart.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, product
from typing import Any

import torch
from torch import Tensor, nn

from gac.runtime.header import Module, storage_of
from gac.runtime.kernels.elementwise.rows import AddNorm
from gac.runtime.storage.base import Storage, Tensors
from gac.runtime.vllm.linear import PlannedLinearMethod, part_rows, processes_of, shard_index
from gac.runtime.vllm.project import linear

_FIRST, _SECOND = "weight", "second"
"""Begin the names of parameters: of what reads the input, and of second factors."""


@dataclass(frozen=True)
class _Plain(Storage):
    """One matrix in a 16- or 32-bit dtype."""

    dtype: torch.dtype

    def tensors(self, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {_FIRST: ((rows, columns), self.dtype)}

    def values(self, tensors: Tensors, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        return tensors[_FIRST].to(dtype)

    def can_slice_columns(self, columns: slice, total: int) -> bool:
        return True

    def slice_columns(self, tensors: Tensors, columns: slice, total: int) -> dict[str, Tensor]:
        return {_FIRST: tensors[_FIRST][:, columns]}

    def unsupported_reason(self, device: torch.device, dtype: torch.dtype, rows: int, columns: int) -> str | None:
        return None

    def multiply(self, x: Tensor, tensors: Tensors, rows: int, columns: int, bias: Tensor | None) -> Tensor:
        return linear(x, tensors[_FIRST], bias)


class Gemm:
    """Matrices of one storage, one above the other, that are multiplied at once; the layer has their tensors.

    Attributes:
        parts: rows of each.

    Args:
        name: of the buffers, before those of the storage.
        rows: of each matrix. Each begins where every tensor of the storage begins anew.
    """

    def __init__(self, layer: nn.Module, name: str, storage: Storage, rows: Sequence[int], columns: int) -> None:
        self.storage, self._name, self._columns = storage, name, columns
        step = storage.step
        starts = accumulate((-(-count // step) * step for count in rows), initial=0)
        self.parts = [slice(start, start + count) for start, count in zip(starts, rows, strict=False)]
        self.rows = self.parts[-1].stop
        layout = storage.tensors(self.rows, columns).items()
        self._names = [tensor for tensor, _ in layout if tensor not in storage.metadata]
        for tensor, (shape, dtype) in layout:
            if tensor in self._names:
                layer.register_buffer(f"{name}_{tensor}", _any_numbers(shape, dtype))

    def tensors(self, layer: Any) -> dict[str, Tensor]:
        return {name: layer._buffers[f"{self._name}_{name}"] for name in self._names}

    def fill(self, layer: nn.Module, rows: slice, tensors: Tensors) -> None:
        """Take the tensors of these rows."""
        for name, part in self.storage.slice_rows(self.tensors(layer), rows).items():
            part.copy_(tensors[name])

    def multiply(self, layer: nn.Module, x: Tensor, activation: nn.Module | None = None) -> Tensor:
        """Multiply x ``(rows, columns)``; with an activation x is gate beside up, of twice as many columns."""
        tensors = self.tensors(layer)
        if activation is not None:
            product = self.storage.gated_kernel(x, tensors, self._columns) if self._can_run(x) else None
            if product is not None:
                return product
            x = activation(x)
        return self.storage.multiply(x, tensors, self.rows, self._columns, None)

    def normed(self, layer: nn.Module, x: Tensor, norm: AddNorm) -> Any:
        """Return a norm of x as ``multiply_prepared`` takes it; None where no launch makes that, and none ran."""
        return self.storage.normed_inputs(x, norm, self.tensors(layer), self._columns) if self._can_run(x) else None

    def multiply_prepared(self, layer: nn.Module, inputs: Any, dtype: torch.dtype) -> Tensor:
        return self.storage.kernel_of_prepared(inputs, self.tensors(layer), dtype)

    def _can_run(self, x: Tensor) -> bool:
        return len(x) > 0 and self.storage.unsupported_reason(x.device, x.dtype, self.rows, self._columns) is None

    def check(self, layer: Any, dtype: torch.dtype) -> None:
        """Refuse a matrix that no kernel of this GPU multiplies."""
        device = next(iter(self.tensors(layer).values())).device
        reason = self.storage.unsupported_reason(device, dtype, self.rows, self._columns)
        if reason is not None and device.type == "cuda":
            problem = f"{layer.prefix}, {self.rows} x {self._columns} in {self.storage}, has no kernel here: {reason}"
            raise RuntimeError(f"{problem}; expected one. Plan in another scheme, or serve the dense model.")


def _any_numbers(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor for numbers that are read later. Timing without a checkpoint needs numbers that are not all 0."""
    if dtype in (torch.int32, torch.int8):
        limits = torch.iinfo(dtype)
        return torch.randint(limits.min, limits.max, shape, dtype=dtype)
    return torch.zeros(shape, dtype=dtype)


def all_read(storage: Storage, read: Tensors) -> dict[str, Tensor] | None:
    """Return the tensors that hold a matrix; None while some of its storage were not read."""
    if read.keys() < storage.tensors(1, 1).keys():
        return None
    return {name: tensor for name, tensor in read.items() if name not in storage.metadata}


def add_name(layer: Any, name: str, load: Callable[[Any, Tensor], None]) -> None:
    """Add a parameter that holds nothing, by whose name vLLM loads a tensor; ``load`` takes shard and tensor."""

    def weight_loader(parameter: nn.Parameter, loaded: Tensor, shard: Any = None) -> None:
        load(shard, loaded)

    parameter = nn.Parameter(torch.empty(0), requires_grad=False)
    parameter.weight_loader = weight_loader  # type: ignore[attr-defined]
    layer.register_parameter(name, parameter)


class StoredLinearMethod(PlannedLinearMethod):
    """Multiplies by the weights of a layer, of which some, or some factors, lie in a storage.

    The parameters have the names of a checkpoint's tensors, and hold nothing: loading fills the buffers of GEMMs.

    Attributes:
        hands_over: gate and up leave their activation to the down projection, which quantises what it gives.

    Args:
        name: of the layer, for errors.
        modules: of the siblings; None: dense as they were.
    """

    hands_over = False

    def __init__(self, name: str, modules: Sequence[Module | None]) -> None:
        super().__init__(modules)
        self._stored = [None if module is None else storage_of(name, module) for module in modules]
        self._read: dict[tuple[int, str], dict[str, Tensor]] = {}
        self._prepared: tuple[int, Any] | None = None  # the address of the next input, and what the kernel reads of it

    def _add_parameters(self, layer: Any, dtype: torch.dtype) -> None:
        self._dtype, self._strided = dtype, False
        self._storages = [stored or _Plain(dtype) for stored in self._stored]
        alike: dict[Storage, list[int]] = {}
        for index, storage in enumerate(self._storages):
            alike.setdefault(storage, []).append(index)
        columns = self._siblings[0].in_features
        self._firsts: list[Gemm] = []
        self._places: dict[int, tuple[Gemm, int]] = {}
        for number, (storage, members) in enumerate(alike.items()):
            rows = [self._siblings[index].rows for index in members]
            self._firsts.append(Gemm(layer, f"gemm{number}", storage, rows, columns))
            self._places |= {index: (self._firsts[-1], place) for place, index in enumerate(members)}
        self._seconds = {
            index: Gemm(layer, f"second{index}", self._storages[index], [sibling.out_features], sibling.rank)
            for index, sibling in enumerate(self._siblings)
            if sibling.rank
        }
        for index, storage in enumerate(self._storages):
            for name, begins in product(storage.tensors(1, 1), (_FIRST, _SECOND)[: 1 + (index in self._seconds)]):
                if (parameter := begins + name.removeprefix(_FIRST)) not in layer._parameters:
                    add_name(layer, parameter, partial(self._load, layer, begins, name))

    def _load(self, layer: Any, begins: str, tensor: str, shard: Any, loaded: Tensor) -> None:
        """Keep a tensor until all those of a matrix are there."""
        index = shard_index(shard)
        storage, read = self._storages[index], self._read.setdefault((index, begins), {})
        read[tensor] = loaded
        if (tensors := all_read(storage, read)) is None:
            return
        del self._read[index, begins]
        sibling = self._siblings[index]
        writes_outputs = begins == _SECOND or sibling.rank is None
        if self._by_input and begins == _FIRST and layer.tp_size > 1:
            tensors = _columns(layer, storage, tensors, sibling.in_features)
        elif writes_outputs and processes_of(layer) > 1:
            parts = [storage.slice_rows(tensors, aligned(layer, storage, rows)) for rows in part_rows(layer, sibling)]
            tensors = {name: torch.cat([part[name] for part in parts]) for name in tensors}
        gemm, place = (self._seconds[index], 0) if begins == _SECOND else self._places[index]
        gemm.fill(layer, gemm.parts[place], tensors)

    def process_weights_after_loading(self, layer: Any) -> None:
        for gemm in (*self._firsts, *self._seconds.values()):
            gemm.check(layer, self._dtype)

    def run(self, layer: Any, x: Tensor, bias: Tensor | None, width: int) -> Tensor:
        tokens = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        gate_up = None if self.gate_up is None else self.gate_up.quant_method
        activation = gate_up.activation if isinstance(gate_up, StoredLinearMethod) and gate_up.hands_over else None
        products = {gemm: self._product(gemm, layer, tokens, activation) for gemm in self._firsts}
        if len(products) == 1 and not self._seconds and self._firsts[0].rows == self.features:
            y = products[self._firsts[0]]
        else:
            parts = {index: products[gemm][:, gemm.parts[place]] for index, (gemm, place) in self._places.items()}
            for index, second in self._seconds.items():
                parts[index] = second.multiply(layer, parts[index])
            y = torch.cat([parts[index] for index in sorted(parts)], 1) if len(parts) > 1 else parts[0]
        y = y if bias is None else y + bias
        y = y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])
        return y if self.activation is None or self.hands_over else self.activation(y)

    def prepare(self, layer: Any, x: Tensor, norm: AddNorm) -> bool:
        """Run the norm that makes the next input, as the kernel reads it; False: it was not run, for none does."""
        inputs = self._firsts[0].normed(layer, x, norm) if len(self._firsts) == 1 else None
        self._prepared = None if inputs is None else (norm.into[0].data_ptr(), inputs)
        return inputs is not None

    def _product(self, gemm: Gemm, layer: Any, x: Tensor, activation: nn.Module | None) -> Tensor:
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared[0] == x.data_ptr():
            return gemm.multiply_prepared(layer, prepared[1], x.dtype)
        return gemm.multiply(layer, x, activation)


def _columns(layer: Any, storage: Storage, tensors: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """Return the columns of a weight that this process has."""
    columns, total = slice(layer.tp_rank * count, (layer.tp_rank + 1) * count), layer.tp_size * count
    if not storage.can_slice_columns(columns, total):
        raise _undivided(layer, f"{total} columns in {storage}")
    return storage.slice_columns(tensors, columns, total)


def aligned(layer: Any, storage: Storage, rows: slice) -> slice:
    if rows.start % storage.step:
        raise _undivided(layer, f"rows in {storage}")
    return rows


def _undivided(layer: Any, what: str) -> ValueError:
    problem = f"{layer.prefix} has {what}; expected whole groups and words on each of {layer.tp_size} processes"
    return ValueError(f"{problem}. Make the plan with tensor_parallel={layer.tp_size}, or serve it on one GPU.")
