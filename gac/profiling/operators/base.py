"""Operators: named axes, operands, arithmetic, traffic, the shapes that libraries refuse, and how PyTorch runs them.

torch is imported where an operator runs, so that planning reads descriptions without it.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from gac.core.arrays import Bools, Ints
from gac.core.errors import ProfileError
from gac.core.operations import Operation, batched_gemm, linear
from gac.schemes import DEFAULT_SCHEME, Scheme, scheme_named, scheme_timed_as

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Axes = Mapping[str, int]

ITEM_BYTES = {"bf16": 2, "fp16": 2, "fp8": 1, "fp32": 4, "int32": 4, "int64": 8, "int8": 1, "uint8": 1}
"""Bytes of a number. Every other dtype belongs to a scheme that has a storage for its weights."""

_FLOATS = {"bf16": "bfloat16", "fp16": "float16", "fp8": "float8_e4m3fn", "fp32": "float32"}
TORCH_NAMES = {name: _FLOATS.get(name, name) for name in ITEM_BYTES}  # PyTorch's names of these dtypes
ACTIVATIONS = scheme_named(DEFAULT_SCHEME).dtype  # the 16-bit dtype of inputs and results of schemes

WORST_ERROR = 2e-2
"""Relative Frobenius error against float32 above which a result is wrong (bf16 rounding gives 2e-3 to 5e-3)."""

WORST_ROUNDED_ERROR = 5e-2
"""Likewise where a row of inputs is rounded to 8 bits with a scale of its own.

Between the GEMMs of a pair the largest number of a row may round to the next one in 16 bits. Then the scale changes,
and all other numbers round anew: up to 3.6e-2.
"""

_EDGE = 32


def stored_as(dtype: str) -> Scheme:
    """Return the scheme that latency tables call by this dtype; ProfileError where there is none."""
    if (scheme := scheme_timed_as(dtype)) is None:
        raise ProfileError(
            f"dtype {dtype!r}",
            f"one of {', '.join(ITEM_BYTES)}, or that of a scheme with a storage",
            "Correct the name, or register the scheme.",
        )
    return scheme


def name_of(dtype: "torch.dtype") -> str:
    """Return the name of a dtype of PyTorch; RuntimeError where operands cannot have it."""
    for name, torch_name in TORCH_NAMES.items():
        if str(dtype) == f"torch.{torch_name}":
            return name
    raise RuntimeError(f"a storage holds {dtype}, of which no operands are made; they are {', '.join(TORCH_NAMES)}")


def numbers_of(dtype: str) -> str:
    """Return the dtype of activations: the dtype itself, or the 16 bits that schemes multiply with."""
    return dtype if dtype in ITEM_BYTES else ACTIVATIONS


@dataclass(frozen=True)
class Operand:
    """A contiguous tensor that a launch reads or writes, or a matrix in the storage of a scheme, columns last.

    ``dtype`` is a name in ``ITEM_BYTES``, or the dtype of a scheme.
    """

    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        if self.dtype in ITEM_BYTES:
            return math.prod(self.shape) * ITEM_BYTES[self.dtype]
        *rows, columns = self.shape
        return stored_as(self.dtype).bytes(math.prod(rows), columns)


@dataclass(frozen=True)
class AxisSweep:
    """Dims to time along one axis of an operator to describe a GPU.

    ``dtype`` None: the dtype of the profile, and each of its schemes. ``hot``: also with the operands in L2.
    """

    axis: str
    dims: Iterable[int]
    fixed: Axes
    dtype: str | None = None
    hot: bool = False


def around(centre: int, half: int) -> range:
    return range(centre - half, centre + half + 1)


class Runner(ABC):
    """Run and check an operator with PyTorch; a CUDA graph can capture its launches.

    Every method raises RuntimeError where PyTorch or a kernel refuses the shape.
    """

    worst_error: float = WORST_ERROR

    @abstractmethod
    def operands(self, axes: Axes, dtype: str, cut: Callable[[Operand], "Tensor"]) -> Sequence[Any]:
        """Make what ``run`` reads: every input, cut from memory, then what is derived from them before a launch."""

    @abstractmethod
    def run(self, inputs: Sequence[Any], outputs: Sequence["Tensor"]) -> Sequence["Tensor"]:
        """Launch once and return the results: the outputs, or new tensors where PyTorch has no ``out=``."""

    @abstractmethod
    def compare(self, inputs: Sequence[Any], result: Sequence["Tensor"]) -> tuple["Tensor", "Tensor"]:
        """Return some of the result and the same in float32, of equal shape; cheap at any size.

        The parts are the edges, the first and last 32 along an axis: a wrong tail or an unwritten tile shows there.
        """


class Operator(Runner):
    """One operator over named axes: its description, and how it runs in plain numbers.

    A new operator is a subclass in ``operators/NAME.py``, whose instances are in that module's ``OPERATORS``.
    """

    name: str  # in profiles
    axes: tuple[str, ...]  # names of its axes, in the order in which an operation gives them
    dtypes: tuple[str, ...] = ("bf16", "fp16")  # the numbers that it can be timed in
    # It can also be timed with weights in the storage of a scheme, in the scheme's dtype. Then it reads activations
    # once, and multiplies them with one weight after the other.
    stored: bool = False
    reads: tuple[str, ...] = ()  # axes of each tensor that one launch reads, as in ``m k``; activations first
    writes: tuple[str, ...] = ()  # axes of each tensor that it writes: intermediates first, results last
    # The axes of each GEMM, whose sizes multiply to its multiplications; where weights can be stored in the order of
    # ``linear`` or ``batched_gemm``.
    products: tuple[str, ...] = ()
    smooth: bool = False  # latency follows sizes alone, whatever divides them: it is linear between two measured dims
    compressed_axis: str = "k"  # the axis that compression changes
    cublas: bool = True  # GEMMs of cuBLAS do its work, so that the rules of cuBLAS bind its dims
    # For each axis along the rows of a matrix, its sides in the GEMMs: ``k`` (rows of both operands), ``n`` (rows of
    # the result), or both.
    gemm_sides: Mapping[str, str] = MappingProxyType({})
    pair_of: str | None = None  # for an operator of two GEMMs in a row, the operator of each by itself
    general: tuple[AxisSweep, ...] = ()  # the sweeps that describe a GPU
    aligned_inputs: int = 8  # GEMMs of 16 bits are as fast at a multiple of it as at other multiples, along ``k``

    def runner_in(self, scheme: Scheme) -> Runner | None:
        """Return what runs it with weights in a scheme, where that is no storage's module after the other."""
        return None

    def in_own_kernel(self, shapes: Ints) -> Bools:
        """Mark the shapes ``(shapes, axes)`` at which a kernel of GAC's multiplies numbers of 16 bits, not cuBLAS."""
        return np.zeros(len(shapes), dtype=np.bool_)

    def takes(self, dtype: str) -> bool:
        return dtype in self.dtypes or (self.stored and dtype not in ITEM_BYTES and bool(scheme_timed_as(dtype)))

    def inputs(self, axes: Axes, dtype: str) -> tuple[Operand, ...]:
        """List what one launch reads: activations first, then weights, then scales."""
        dtypes = chain([numbers_of(dtype)], repeat(dtype))
        return tuple(Operand(_sizes(names, axes), numbers) for names, numbers in zip(self.reads, dtypes, strict=False))

    def outputs(self, axes: Axes, dtype: str) -> tuple[Operand, ...]:
        """List what one launch writes: intermediates first, results last."""
        return tuple(Operand(_sizes(names, axes), numbers_of(dtype)) for names in self.writes)

    def flops(self, axes: Axes) -> int:
        return 2 * sum(math.prod(_sizes(names, axes)) for names in self.products)

    def bytes(self, axes: Axes, dtype: str) -> int:
        return sum(operand.bytes for operand in (*self.inputs(axes, dtype), *self.outputs(axes, dtype)))

    def unmet(self, axes: Axes) -> str | None:
        """Describe the condition that these sizes break; None where they are an operation."""
        return None

    def refusal(self, axes: Axes, dtype: str) -> str | None:
        """Describe the documented rule by which PyTorch, or a scheme, refuses this shape; None where none is known."""
        if dtype in ITEM_BYTES:
            return None
        scheme = stored_as(dtype)
        refused = next((gemm for gemm in self.gemms(axes) if not scheme.supports(gemm)), None)
        if refused is None:
            return None
        sizes = ", ".join(f"{axis} = {size}" for axis, size in refused.shape if axis != "m")
        return f"scheme {scheme.name} needs {scheme.shape_requirement}: {sizes}"

    def gemms(self, axes: Axes) -> list[Operation]:
        return [(batched_gemm if "b" in names.split() else linear)(*_sizes(names, axes)) for names in self.products]

    def operands(self, axes: Axes, dtype: str, cut: Callable[[Operand], "Tensor"]) -> Sequence[Any]:
        return [cut(operand) for operand in self.inputs(axes, dtype)]


def _sizes(names: str, axes: Axes) -> tuple[int, ...]:
    return tuple(axes[name] for name in names.split())


def indivisible(axes: Axes, names: tuple[str, ...], divisor: int) -> str | None:
    """List the axes that a divisor does not divide, as ``k = 107, n = 33``; None where it divides them all."""
    return ", ".join(f"{name} = {axes[name]}" for name in names if axes[name] % divisor) or None


def relative_error(runner: Runner, inputs: Sequence[Any], result: Sequence["Tensor"]) -> float:
    actual, expected = runner.compare(inputs, result)
    return float((actual.float() - expected).norm() / expected.norm())


def edges(size: int, device: "torch.device") -> "Tensor":
    import torch

    if size <= 2 * _EDGE:
        return torch.arange(size, device=device)
    return torch.cat([torch.arange(_EDGE, device=device), torch.arange(size - _EDGE, size, device=device)])


def corners(matrix: "Tensor") -> "Tensor":
    rows, columns = (edges(size, matrix.device) for size in matrix.shape[-2:])
    return matrix[..., rows, :][..., columns]


def joined(parts: Sequence[tuple["Tensor", "Tensor"]]) -> tuple["Tensor", "Tensor"]:
    import torch

    actual, expected = ([part.flatten() for part in side] for side in zip(*parts, strict=True))
    return torch.cat(actual), torch.cat(expected)
