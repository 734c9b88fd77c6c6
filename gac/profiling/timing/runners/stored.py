"""Products with weights in the storage of a scheme, through the modules in which models hold them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gac.profiling.operators import Axes, Operand, Operator
from gac.profiling.timing.operands import name_of
from gac.profiling.timing.runners import Runner, edges
from gac.runtime.modules import BlockLinear, empty_linear, multiply_blocks
from gac.runtime.storage.eight_bits import READERS
from gac.runtime.storage.modules import StoredLinear
from gac.schemes import Scheme
from gac.schemes.storages import storage_of


class StoredRunner(Runner):
    """The activations through one weight after the other; every launch reads tensors of its own.

    What a token has in the blocks of a batched GEMM lies side by side, as in a model: the memory of x ``(b, m, k)`` is
    read as ``(m, b * k)``, and that of the result likewise.

    Args:
        operator: one whose weights can be stored.
        scheme: one that has a storage.
    """

    def __init__(self, operator: Operator, scheme: Scheme) -> None:
        super().__init__(operator)
        storage = storage_of(scheme)
        assert storage is not None, f"scheme {scheme.name} has no storage"
        self._storage = storage
        self._read = None if scheme.reads is None else READERS[scheme.reads]

    def operands(self, axes: Axes, dtype: str, cut: Callable[[Operand], Tensor]) -> Sequence[Any]:
        """The activations, and each weight as a module that holds random numbers."""
        if (reason := self.operator.refusal(axes, dtype)) is not None:
            raise RuntimeError(reason)
        x, *weights = self.operator.inputs(axes, dtype)
        return [cut(x), *(self._stored(weight.shape, cut) for weight in weights)]

    def run(self, inputs: Sequence[Any], outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        x, *weights = inputs
        y = _by_token(x)
        for weight in weights:
            y = weight(y)
        return [y.reshape(outputs[-1].shape)]

    def compare(self, inputs: Sequence[Any], result: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """All columns of the first and last rows, for their product takes the whole weight."""
        x, *weights = inputs
        rows = edges(x.shape[-2], x.device)
        y = _by_token(x)[rows]
        for weight in weights:
            expected = self._product(y, weight)
            y = expected.to(x.dtype)
        return _by_token(result[0])[rows], expected

    def _stored(self, shape: tuple[int, ...], cut: Callable[[Operand], Tensor]) -> StoredLinear:
        """A weight ``(rows, columns)``, or blocks of such, made of what is cut."""
        module = StoredLinear.of(self._storage, _plain(*shape))
        tensors = self._storage.tensors(*module.matrix)
        module.fill({name: cut(Operand(size, name_of(dtype))) for name, (size, dtype) in tensors.items()})
        return module

    def _product(self, x: Tensor, weight: StoredLinear) -> Tensor:
        """In float32, of inputs as the scheme reads them."""
        values = weight.values(torch.float32)
        return multiply_blocks(self._as_read(x), values.view(-1, *values.shape[-2:]), None)

    def _as_read(self, x: Tensor) -> Tensor:
        if self._read is None:
            return x.float()
        numbers, scale = self._read(x)
        return numbers.float() * scale


def _plain(*shape: int) -> nn.Module:
    """What such a weight is without a storage; it takes no memory."""
    *blocks, rows, columns = shape
    if blocks:
        return BlockLinear(blocks[0], columns, rows, bias=False, device="meta")
    return empty_linear(columns, rows, bias=False, device="meta")


def _by_token(x: Tensor) -> Tensor:
    """A matrix of as many rows; blocks lie side by side in each."""
    return x.reshape(x.shape[-2], -1)
