"""The seam of storages: the tensors that hold a matrix instead of one in the model's dtype, and products with it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from .modules import multiply_blocks

Held = Mapping[str, Tensor]
"""The tensors of one matrix, by name."""


def not_finite(held: Held, name: str) -> str | None:
    """The flaw of a tensor that has numbers that are not finite; None where all are."""
    finite = held[name].isfinite()
    if bool(finite.all()):
        return None
    return f"{name} holds {int((~finite).sum())} numbers that are not finite; expected none"


class Storage(ABC):
    """How matrices lie in tensors. It holds none itself: it is made from the options that ``config.json`` has.

    A new one derives from this and stands in ``gac.runtime.stored.STORAGES``. One that multiplies in its own way, with
    inputs that it rounds or in a kernel, has a ``multiply`` of its own.

    Attributes:
        metadata: tensors that hold nothing of the matrix, and do not count as its bytes.
    """

    metadata: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def tensors(self, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every tensor that holds a matrix, by the name that it has beside the bias."""

    @abstractmethod
    def values(self, held: Held, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """The matrix ``(rows, columns)`` that the tensors stand for."""

    def flaw(self, held: Held, rows: int, columns: int) -> str | None:
        """What no matrix ``(rows, columns)`` has, in words that begin with the name of a tensor; None: nothing."""
        return None

    def rows(self, held: Held, at: Tensor | slice, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Some rows of that matrix, ``(some, columns)``; here of all that it is made to."""
        return self.values(held, rows, columns, dtype)[at]

    def multiply(self, x: Tensor, held: Held, rows: int, columns: int, bias: Tensor | None) -> Tensor:
        """``x @ matrix.T + bias`` for x ``(..., columns)``; here with the values in the dtype of x."""
        return functional.linear(x, self.values(held, rows, columns, x.dtype), bias)

    def multiply_blocks(
        self, x: Tensor, held: Held, blocks: int, rows: int, columns: int, bias: Tensor | None
    ) -> Tensor:
        """The product of a ``BlockLinear``, whose blocks lie one above the other, ``(blocks * rows, columns)``."""
        weight = self.values(held, blocks * rows, columns, x.dtype).view(blocks, rows, columns)
        return multiply_blocks(x, weight, bias)
