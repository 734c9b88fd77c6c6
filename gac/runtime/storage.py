"""The seam of storages: the tensors that hold a matrix instead of one in the model's dtype, and products with it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from math import inf
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from .gpu import lacking, plainly
from .modules import multiply_blocks
from .rounded_rows import Rounded

Held = Mapping[str, Tensor]
"""The tensors of one matrix, by name."""


def not_scales(held: Held, name: str) -> str | None:
    """The flaw of a tensor that has numbers that are no scales: negative, zero or not finite; None where all are."""
    least, most = torch.aminmax(held[name])  # NaN, where there is one
    if least.item() > 0 and most.item() < inf:
        return None
    sound = held[name].isfinite() & (held[name] > 0)
    return f"{name} holds {int((~sound).sum())} numbers that are no scales; expected finite ones above 0"


class Storage(ABC):
    """How matrices lie in tensors. It holds none itself: it is made from the options that ``config.json`` has.

    A new one derives from this and stands in ``gac.runtime.stored.STORAGES``. One that multiplies in its own way, with
    inputs that it rounds, has a ``plain`` of its own; one that has a kernel, ``kernel`` and ``unread`` besides. If that
    reads rounded inputs, it has ``number`` and ``kernel_of``.

    Attributes:
        metadata: tensors that hold nothing of the matrix, and do not count as its bytes.
        number: dtype of rounded inputs; None: the kernel reads them in 16 bits.
    """

    metadata: ClassVar[frozenset[str]] = frozenset()
    number: ClassVar[torch.dtype | None] = None

    @abstractmethod
    def tensors(self, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every tensor that holds a matrix, by the name that it has beside the bias."""

    @abstractmethod
    def values(self, held: Held, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """The matrix ``(rows, columns)`` that the tensors stand for."""

    def flaw(self, held: Held, rows: int, columns: int) -> str | None:
        """What no matrix ``(rows, columns)`` has, in words that begin with the name of a tensor; None: nothing."""
        return None

    @property
    def step(self) -> int:
        """Rows after which every tensor begins anew: ``part`` takes what starts at a multiple of them."""
        return 1

    def part(self, held: Held, rows: slice) -> dict[str, Tensor]:
        """Views of the tensors that hold some rows of the matrix; none of ``metadata``."""
        return {name: one[rows] for name, one in held.items() if name not in self.metadata}

    def cuts(self, columns: slice, of: int) -> bool:
        """Whether some columns of a matrix with ``of`` columns can be held by themselves, by ``cut``."""
        return False

    def cut(self, held: Held, columns: slice, of: int) -> dict[str, Tensor]:
        """Views of the tensors that hold some columns of the matrix; none of ``metadata``."""
        raise NotImplementedError

    def stated(self, rows: int, columns: int) -> dict[str, Tensor]:
        """The tensors of ``metadata`` for such a matrix."""
        return {}

    def rows(self, held: Held, at: Tensor | slice, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Some rows of that matrix, ``(some, columns)``; here of all that it is made to."""
        return self.values(held, rows, columns, dtype)[at]

    def multiply(self, x: Tensor, held: Held, rows: int, columns: int, bias: Tensor | None) -> Tensor:
        """``x @ matrix.T + bias`` for x ``(..., columns)``: in a kernel where one can run, else in plain PyTorch."""
        reason = self.without_kernel(x.device, x.dtype, rows, columns)
        if reason is None and x.numel() and not (x.requires_grad and torch.is_grad_enabled()):
            y = self.kernel(x, held, columns)
            return y if bias is None else y + bias
        if reason:
            plainly(x, reason)
        return self.plain(x, held, rows, columns, bias)

    def plain(self, x: Tensor, held: Held, rows: int, columns: int, bias: Tensor | None) -> Tensor:
        """The product in plain PyTorch, on every device; here with the values in the dtype of x."""
        return functional.linear(x, self.values(held, rows, columns, x.dtype), bias)

    def without_kernel(self, device: torch.device, dtype: torch.dtype, rows: int, columns: int) -> str | None:
        """Why no kernel multiplies such a matrix with inputs of that dtype there; None where one does."""
        return lacking(device, dtype) or self.unread(device, rows, columns)

    def unread(self, device: torch.device, rows: int, columns: int) -> str | None:
        """Why the storage's kernel cannot multiply with such a matrix on that GPU; None where it can."""
        return "its storage has no kernel"

    def kernel(self, x: Tensor, held: Held, columns: int) -> Tensor:
        """``x @ matrix.T`` on a GPU, where ``unread`` says nothing against it, of inputs that need no gradients."""
        raise NotImplementedError

    def kernel_of(self, x: Rounded, held: Held, dtype: torch.dtype) -> Tensor:
        """``kernel`` of inputs that are rounded already, ``(rows of x, rows)`` in that dtype."""
        raise NotImplementedError

    def multiply_blocks(
        self, x: Tensor, held: Held, blocks: int, rows: int, columns: int, bias: Tensor | None
    ) -> Tensor:
        """The product of a ``BlockLinear``, whose blocks lie one above the other, ``(blocks * rows, columns)``."""
        weight = self.values(held, blocks * rows, columns, x.dtype).view(blocks, rows, columns)
        return multiply_blocks(x, weight, bias)
