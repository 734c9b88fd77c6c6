"""The operators that can be timed: their operands, what they cost, how they run, and what they should return.

An operator is added by deriving from ``Operator`` and naming it in ``OPERATORS``; the contract suite in
``tests/profiling/test_operators.py`` then runs over it.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

DTYPES: Mapping[str, torch.dtype] = MappingProxyType({"bf16": torch.bfloat16, "fp16": torch.float16})

WORST_ERROR = 2e-2
"""Relative Frobenius error against float32 above which a result is wrong (bf16 rounding gives 2e-3 to 5e-3)."""

_ALIGNMENT = 256
_EDGE = 32

Shape = tuple[int, ...]
Axes = Mapping[str, int]


class Operator(ABC):
    """One operator over named axes. Operands are contiguous; the last output is the result."""

    name: ClassVar[str]
    axes: ClassVar[tuple[str, ...]]

    @abstractmethod
    def inputs(self, axes: Axes) -> tuple[Shape, ...]:
        """Shapes of the operands: activations first, then weights."""

    @abstractmethod
    def outputs(self, axes: Axes) -> tuple[Shape, ...]:
        """Shapes of what is written: intermediates first, the result last."""

    @abstractmethod
    def flops(self, axes: Axes) -> int:
        """Floating-point operations, a multiply-add counted as two."""

    @abstractmethod
    def run(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Compute the outputs."""

    @abstractmethod
    def reference(self, inputs: Sequence[Tensor], rows: Tensor, columns: Tensor) -> Tensor:
        """The result at these rows and columns in float32, shape ``(rows, columns)``."""

    def bytes(self, axes: Axes, itemsize: int) -> int:
        """The fewest bytes to move: every operand and output once."""
        return itemsize * sum(math.prod(shape) for shape in (*self.inputs(axes), *self.outputs(axes)))


class Linear(Operator):
    """``x[m, k] @ W[n, k].T``, both contiguous along k, as ``torch.nn.Linear`` keeps them."""

    name = "linear"
    axes = ("m", "k", "n")

    def inputs(self, axes: Axes) -> tuple[Shape, ...]:
        return (axes["m"], axes["k"]), (axes["n"], axes["k"])

    def outputs(self, axes: Axes) -> tuple[Shape, ...]:
        return ((axes["m"], axes["n"]),)

    def flops(self, axes: Axes) -> int:
        return 2 * axes["m"] * axes["k"] * axes["n"]

    def run(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        x, weight = inputs
        torch.mm(x, weight.t(), out=outputs[0])

    def reference(self, inputs: Sequence[Tensor], rows: Tensor, columns: Tensor) -> Tensor:
        x, weight = inputs
        return x[rows].float() @ weight[columns].float().t()


class LowRank(Operator):
    """``(x[m, k] @ A[r, k].T) @ B[n, r].T``: two ``torch.nn.Linear`` in a row."""

    name = "low_rank"
    axes = ("m", "k", "r", "n")

    def inputs(self, axes: Axes) -> tuple[Shape, ...]:
        return (axes["m"], axes["k"]), (axes["r"], axes["k"]), (axes["n"], axes["r"])

    def outputs(self, axes: Axes) -> tuple[Shape, ...]:
        return (axes["m"], axes["r"]), (axes["m"], axes["n"])

    def flops(self, axes: Axes) -> int:
        return 2 * axes["m"] * axes["r"] * (axes["k"] + axes["n"])

    def run(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        x, first, second = inputs
        hidden, result = outputs
        torch.mm(x, first.t(), out=hidden)
        torch.mm(hidden, second.t(), out=result)

    def reference(self, inputs: Sequence[Tensor], rows: Tensor, columns: Tensor) -> Tensor:
        x, first, second = inputs
        return (x[rows].float() @ first.float().t()) @ second[columns].float().t()


OPERATORS: Mapping[str, Operator] = MappingProxyType({operator.name: operator for operator in (Linear(), LowRank())})


class Pool:
    """One large buffer that operands are cut from, so that no shape pays for filling its own.

    Successive views lie one after the other, each 256-byte aligned, and start again at the front when the end is
    reached: what is cut next has been out of use the longest.
    """

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer
        self._step = _ALIGNMENT // buffer.element_size()
        self._next = 0

    @classmethod
    def random(cls, elements: int, dtype: torch.dtype, device: str, seed: int = 0) -> "Pool":
        """Normal values of standard deviation 0.5: never zeros, which run faster, and no overflow in fp16."""
        generator = torch.Generator(device).manual_seed(seed)
        return cls(torch.empty(elements, dtype=dtype, device=device).normal_(0.0, 0.5, generator=generator))

    @classmethod
    def unset(cls, elements: int, dtype: torch.dtype, device: str) -> "Pool":
        """A pool for outputs, full of NaN so that what is never written is seen."""
        return cls(torch.full((elements,), math.nan, dtype=dtype, device=device))

    def cut(self, shape: Shape) -> Tensor:
        """The next contiguous view of this shape."""
        size = math.prod(shape)
        assert size <= self._buffer.numel(), "a pool holds its largest operand"
        if self._next + size > self._buffer.numel():
            self._next = 0
        view = self._buffer[self._next : self._next + size].view(shape)
        self._next += -(-size // self._step) * self._step
        return view


def relative_error(operator: Operator, inputs: Sequence[Tensor], result: Tensor) -> float:
    """Relative Frobenius error against float32 over the first and last 32 rows and columns; NaN if any is NaN.

    The edges are where a wrong tail or an unwritten tile shows, and they are cheap at any size.
    """
    rows, columns = (_edges(size, result.device) for size in result.shape)
    expected = operator.reference(inputs, rows, columns)
    difference = result[rows][:, columns].float() - expected
    return float(difference.norm() / expected.norm())


def _edges(size: int, device: torch.device) -> Tensor:
    if size <= 2 * _EDGE:
        return torch.arange(size, device=device)
    return torch.cat([torch.arange(_EDGE, device=device), torch.arange(size - _EDGE, size, device=device)])
