"""Modules whose matrices lie in a storage: what a linear weight, or each factor of a pair, becomes."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import fields
from importlib import import_module
from math import prod
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import torch
from torch import Tensor, nn

from gac.runtime.latents.quantise import rounded_latents
from gac.runtime.modules import BlockLinear, RoundedLinear, ValueLinear
from gac.runtime.plain import modeling_gac
from gac.runtime.plain.modeling_gac import Heads, multiply_blocks
from gac.runtime.storage.base import Storage, Tensors


def _storages() -> dict[str, tuple[Callable[..., Storage], tuple[str, ...]]]:
    """Find the storages of this folder that have a plain class, so that a new one is a file and that class."""
    modules = {file.name for file in iter_modules([str(Path(__file__).parent)])} - {
        "base",
        "embeddings",
        "experts",
        "modules",
    }
    files = [import_module(f"{__package__}.{name}") for name in sorted(modules)]
    kinds = [getattr(file, name) for name in modeling_gac.STORAGES for file in files if hasattr(file, name)]
    return {kind.__name__: (kind, tuple(field.name for field in fields(kind))) for kind in kinds}


STORAGES = _storages()  # storages by their name in ``config.json``, and the options that make one


class Stored(modeling_gac.Matrix):
    """A matrix in a storage, whose tensors are buffers: zeros until they are filled, and never cast."""

    shape: tuple[int, ...]
    storage: Storage

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns; blocks lie one above the other."""
        return prod(self.shape[:-1]), self.shape[-1]

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self._buffers.items() if tensor is not None}

    @property
    def counted(self) -> dict[str, Tensor]:
        """The tensors that hold the matrix, whose bytes are its own."""
        return {name: item for name, item in self.tensors.items() if name not in self.storage.metadata}

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Take these tensors, which are the storage's in shape and dtype, and contiguous: so kernels read them."""
        for name, before in self.tensors.items():
            value = tensors[name]
            due = (before.shape, before.dtype)
            assert (value.shape, value.dtype) == due, f"{name} is {value.dtype} {tuple(value.shape)}"
            assert value.is_contiguous(), f"{name} has strides {value.stride()}"
            setattr(self, name, value)

    def values(self, dtype: torch.dtype, rows: Any = slice(None)) -> Tensor:
        """The matrix in the shape that it has in the plain module, or some of its rows."""
        return self.storage.values(self.tensors, *self.matrix, dtype).view(self.shape)[rows]

    def in_plain(self, path: str, dtype: torch.dtype) -> tuple[str, Tensor]:
        """The parameter of the plain module that it stands for, by its name; ``path`` is its own."""
        return f"{path}.weight".lstrip("."), self.values(dtype)


class StoredStack(Stored):
    """Matrices ``(experts, out, in)`` of routed experts, which some architectures have ``transposed``."""

    transposed = False

    def in_plain(self, path: str, dtype: torch.dtype) -> tuple[str, Tensor]:
        values = self.values(dtype)
        return path, values.mT.contiguous() if self.transposed else values


class StoredLinear(Stored):
    """y = W x + bias, W in a storage, whose tensors are buffers beside the bias; x is ``(..., in)``, y ``(..., out)``.

    It is no ``nn.Linear``: what puts layers of its own in the place of those would lose the numbers. The bias is the
    plain module's.
    """

    def __init__(self, storage: Storage, plain: Any) -> None:
        super().__init__(tuple(plain.weight.shape), storage, device=plain.weight.device)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.cache_bits = getattr(plain, "cache_bits", None)
        self.bias: nn.Parameter | None = plain.bias
        self.shared: tuple[Any, int] | None = None  # a ``SharedGemm``, and its index there; None: it runs by itself
        self.before: Any = None  # the ``QuantisingNorm`` that may have its input; None: it quantises that itself
        self.train(plain.training)

    @staticmethod
    def of(storage: Storage, plain: nn.Module) -> "StoredLinear":
        stored: StoredLinear = _STORED[type(plain)](storage, plain)
        return stored

    def forward(self, x: Tensor) -> Any:
        if self.shared is None:
            y = self.multiply(x, self.tensors, self.out_features, self.bias)
        else:
            gemm, index = self.shared
            y = gemm.of(index, x)
            y = y if self.bias is None else y + self.bias
        if self.before is not None:
            self.before.release()
        return y

    def multiply(self, x: Tensor, tensors: Tensors, rows: int, bias: Tensor | None = None) -> Tensor:
        """``Storage.multiply`` of x, or of what it was quantised to before."""
        quantised = None if self.before is None else self.before.get(x)
        if quantised is None:
            return self.storage.multiply(x, tensors, rows, self.in_features, bias)
        y: Tensor = self.storage.kernel_of_prepared(quantised, tensors, x.dtype).view(*x.shape[:-1], rows)
        return y if bias is None else y + bias

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        super().fill(tensors)
        self._join()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "StoredLinear":
        super()._apply(fn, recurse)
        self._join()
        return self

    def _join(self) -> None:
        if self.shared is not None:
            self.shared[0].join()

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.storage}"


class StoredValues(StoredLinear):
    def __init__(self, storage: Storage, plain: ValueLinear) -> None:
        super().__init__(storage, plain)
        self.length = plain.length

    def forward(self, x: Tensor) -> Heads:
        return Heads(super().forward(x), self.length)


class StoredBlocks(StoredLinear):
    def __init__(self, storage: Storage, plain: BlockLinear) -> None:
        super().__init__(storage, plain)
        self.bits = plain.bits

    @property
    def blocks(self) -> int:
        return self.shape[0]

    def forward(self, x: Tensor, is_rounded: bool = False) -> Tensor:
        x = x if is_rounded else rounded_latents(x, self.blocks, self.bits)
        return multiply_blocks(x, self.values(x.dtype), self.bias)


_STORED: dict[type, Any] = {
    nn.Linear: StoredLinear,
    RoundedLinear: StoredLinear,
    ValueLinear: StoredValues,
    BlockLinear: StoredBlocks,
}


def is_matrix(module: nn.Module) -> bool:
    """Return whether a module is a matrix and a bias, as a storage can hold it."""
    return type(module) in _STORED


def store_in(storage: Storage, module: nn.Module) -> nn.Module:
    """The module with all its matrices in a storage, zeros as yet; the argument is used up."""
    if is_matrix(module):
        return StoredLinear.of(storage, module)
    for name, child in module.named_children():
        setattr(module, name, store_in(storage, child))
    return module


def plain_state(module: nn.Module, dtype: torch.dtype, left_out: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """The module's ``state_dict`` with the weight, in the dtype, in the place of every matrix in a storage.

    Names that begin with one of ``left_out`` are left out.
    """
    stored = stored_names(module)
    state = {name: value for name, value in module.state_dict().items() if name not in stored}
    for path, matrix in stored_modules(module).items():
        if not f"{path}.".startswith(left_out):  # values take time and memory
            state.update([matrix.in_plain(path, dtype)])
    return {name: value for name, value in state.items() if not name.startswith(left_out)}


def stored_names(module: nn.Module) -> set[str]:
    """Return the names of tensors in its ``state_dict`` that hold matrices in a storage."""
    modules = stored_modules(module).items()
    return {f"{path}.{name}".lstrip(".") for path, stored in modules for name in stored.tensors}


def count_parameters(model: nn.Module) -> int:
    """Parameters of a model, each counted once, and the numbers of matrices that are in a storage."""
    rest = sum(parameter.numel() for parameter in model.parameters())
    return rest + sum(prod(stored.shape) for stored in stored_modules(model).values())


def without_kernels(model: Any) -> Counter[str]:
    """Count why stored matrices of a model run in plain PyTorch where it is."""
    reasons = (
        stored.storage.unsupported_reason(model.device, model.dtype, *stored.matrix)
        for stored in stored_modules(model).values()
    )
    return Counter(reason for reason in reasons if reason)


def stored_modules(module: nn.Module) -> dict[str, Stored]:
    """Return the modules within it whose matrices are in a storage, by name; the empty one is its own."""
    return {name: stored for name, stored in module.named_modules() if isinstance(stored, Stored)}
