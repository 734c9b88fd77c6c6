"""What a runner is: the operands of an operator, its launch, and a check of the result against float32."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gac.profiling.operators import Axes, Operand, Operator

WORST_ERROR = 2e-2
"""Relative Frobenius error against float32 above which a result is wrong (bf16 rounding gives 2e-3 to 5e-3)."""

_EDGE = 32

Result = Tensor | Sequence[Tensor]


class Runner(ABC):
    """Runs one operator with PyTorch; launches can be captured in a CUDA graph.

    Attributes:
        operator: its description.
        devices: the types of device that can run it.
    """

    devices: tuple[str, ...] = ("cpu", "cuda")

    def __init__(self, operator: Operator) -> None:
        self.operator = operator

    def operands(self, axes: Axes, dtype: str, cut: Callable[[Operand], Tensor]) -> Sequence[Tensor]:
        """Tensors for ``run``: every input of the description, then what is made of them ahead of a launch."""
        return [cut(operand) for operand in self.operator.inputs(axes, dtype)]

    @abstractmethod
    def run(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Result:
        """Launch once and return the result.

        It is written to the outputs, except where PyTorch has no ``out=``: then it is a tensor of its own.

        Raises:
            RuntimeError: PyTorch refuses the shape.
        """

    @abstractmethod
    def compare(self, inputs: Sequence[Tensor], result: Result) -> tuple[Tensor, Tensor]:
        """Some of the result and the same in float32, of equal shape; cheap at any size.

        The parts are the edges, the first and last 32 along an axis: there a wrong tail or an unwritten tile shows.
        """


def relative_error(runner: Runner, inputs: Sequence[Tensor], result: Result) -> float:
    """Relative Frobenius error of what the runner compares; NaN if any of it is NaN."""
    given, expected = runner.compare(inputs, result)
    return float((given.float() - expected).norm() / expected.norm())


def edges(size: int, device: torch.device) -> Tensor:
    """Indices of the first and last 32 places, or of all where there are at most 64."""
    if size <= 2 * _EDGE:
        return torch.arange(size, device=device)
    return torch.cat([torch.arange(_EDGE, device=device), torch.arange(size - _EDGE, size, device=device)])


def corners(matrix: Tensor) -> Tensor:
    """The result at its edges along the last two axes."""
    rows, columns = (edges(size, matrix.device) for size in matrix.shape[-2:])
    return matrix[..., rows, :][..., columns]


def single(result: Result) -> Tensor:
    """The one tensor of an operator with one result."""
    assert isinstance(result, Tensor), "the operator has one result"
    return result


def joined(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Several pairs of a part of the result and its reference as one pair of vectors."""
    given, expected = zip(*parts, strict=True)
    return torch.cat([part.flatten() for part in given]), torch.cat([part.flatten() for part in expected])
