"""How every operator runs with PyTorch: what a runner is, and the one that a description names.

A runner makes the operands of an operator, launches it, and checks the result against float32.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor

from gac.core.errors import ProfileError
from gac.profiling.operators import ACTIVATIONS, ITEM_BYTES, OPERATORS, Axes, Operand, Operator, stored_as

WORST_ERROR = 2e-2
"""Relative Frobenius error against float32 above which a result is wrong (bf16 rounding gives 2e-3 to 5e-3)."""

_EDGE = 32
_STORED = "gac.profiling.timing.runners.stored:StoredRunner"


class Runner(ABC):
    """Runs one operator with PyTorch; launches can be captured in a CUDA graph.

    Attributes:
        operator: its description.
        devices: the types of device that can run it.
    """

    devices: tuple[str, ...] = ("cpu", "cuda")

    def __init__(self, operator: Operator) -> None:
        self.operator = operator

    def operands(self, axes: Axes, dtype: str, cut: Callable[[Operand], Tensor]) -> Sequence[Any]:
        """What ``run`` reads: every input of the description, then what is made of them ahead of a launch.

        They are tensors, and weights in a storage modules that hold tensors.
        """
        return [cut(operand) for operand in self.operator.inputs(axes, dtype)]

    @abstractmethod
    def run(self, inputs: Sequence[Any], outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Launch once and return the results.

        They are written to the outputs, except where PyTorch has no ``out=``: then they are tensors of their own.

        Raises:
            RuntimeError: PyTorch refuses the shape.
        """

    @abstractmethod
    def compare(self, inputs: Sequence[Any], result: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Some of the result and the same in float32, of equal shape; cheap at any size.

        The parts are the edges, the first and last 32 along an axis: there a wrong tail or an unwritten tile shows.
        """


def runner_of(name: str, dtype: str = ACTIVATIONS) -> Runner:
    """The runner of an operator: one for all numbers, and one for each scheme.

    Raises:
        ProfileError: there is no operator of this name, or no such scheme, or its weights are not stored in any.
    """
    return _in_numbers(name) if dtype in ITEM_BYTES else _in_storage(name, dtype)


@cache
def _in_numbers(name: str) -> Runner:
    operator = OPERATORS.get(name)
    made: Runner = resolve_name(operator.runner)(operator)
    return made


@cache
def _in_storage(name: str, dtype: str) -> Runner:
    operator, scheme = OPERATORS.get(name), stored_as(dtype)
    if not operator.stored:
        dtypes = ", ".join(operator.dtypes)
        raise ProfileError(f"{name} in scheme {scheme.name}", f"one of {dtypes}", "Measure it in numbers alone.")
    made: Runner = resolve_name(_STORED)(operator, scheme)
    return made


def relative_error(runner: Runner, inputs: Sequence[Any], result: Sequence[Tensor]) -> float:
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


def joined(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Several pairs of a part of the result and its reference as one pair of vectors."""
    given, expected = zip(*parts, strict=True)
    return torch.cat([part.flatten() for part in given]), torch.cat([part.flatten() for part in expected])
