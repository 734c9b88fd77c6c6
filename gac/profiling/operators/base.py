"""What an operator is: named axes, operands, arithmetic, traffic, and the shapes its libraries refuse."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from gac.core.errors import ProfileError
from gac.core.operations import Operation, batched_gemm, linear
from gac.schemes import DEFAULT_SCHEME, Scheme, scheme_named, scheme_timed_as

Axes = Mapping[str, int]

ITEM_BYTES: Mapping[str, int] = MappingProxyType(
    {"bf16": 2, "fp16": 2, "fp8": 1, "fp32": 4, "int32": 4, "int64": 8, "int8": 1, "uint8": 1}
)
"""Bytes of a number. Every other dtype is that of a scheme, which has its weights in a storage."""

ACTIVATIONS = scheme_named(DEFAULT_SCHEME).dtype
"""What schemes multiply with: inputs come, and results go, in 16 bits."""


def stored_as(dtype: str) -> Scheme:
    """The scheme that latency tables call so.

    Raises:
        ProfileError: there is none.
    """
    if (found := scheme_timed_as(dtype)) is None:
        raise ProfileError(
            f"dtype {dtype!r}",
            f"one of {', '.join(ITEM_BYTES)}, or that of a scheme with a storage",
            "Correct the name, or register the scheme.",
        )
    return found


def numbers_of(dtype: str) -> str:
    """The numbers of activations: those of the dtype itself, or those that schemes multiply with."""
    return dtype if dtype in ITEM_BYTES else ACTIVATIONS


@dataclass(frozen=True)
class Operand:
    """A contiguous tensor that a launch reads or writes, or a matrix in the storage of a scheme.

    Attributes:
        shape: sizes, slowest axis first; of a matrix in a storage its columns come last.
        dtype: a name in ``ITEM_BYTES``, or the dtype of a scheme.
    """

    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        if self.dtype in ITEM_BYTES:
            return math.prod(self.shape) * ITEM_BYTES[self.dtype]
        *rows, columns = self.shape
        return stored_as(self.dtype).bytes(math.prod(rows), columns)


class Operator:
    """One operator over named axes.

    Attributes:
        name: what profiles call it.
        axes: names of its axes, in the order in which an operation gives them.
        dtypes: the numbers that it can be timed in.
        stored: whether it can be timed with weights in the storage of a scheme too, in the scheme's dtype. Then it
            reads activations once, and multiplies them with one weight after the other.
        reads: the axes of each tensor that one launch reads, as in ``m k``; activations first, then weights.
        writes: the axes of each tensor that it writes: intermediates first, the result or the results last.
        products: the axes of each GEMM, whose sizes multiply to its multiplications; where weights can be stored in
            the order of ``linear`` or ``batched_gemm``.
        smooth: whether its latency follows sizes alone, whatever divides them, so that it can be read off the line
            between two measured ones.
        runner: where its ``gac.profiling.timing.runners.Runner`` is, as ``module:class``.
    """

    name: str
    axes: tuple[str, ...]
    dtypes: tuple[str, ...] = ("bf16", "fp16")
    stored: bool = False
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    products: tuple[str, ...] = ()
    smooth: bool = False
    runner: str

    def takes(self, dtype: str) -> bool:
        """Whether it can be timed in a dtype."""
        return dtype in self.dtypes or (self.stored and dtype not in ITEM_BYTES and bool(scheme_timed_as(dtype)))

    def inputs(self, axes: Axes, dtype: str) -> tuple[Operand, ...]:
        """What one launch reads: activations first, then weights, then scales."""
        activations, *rest = (_sizes(names, axes) for names in self.reads)
        return Operand(activations, numbers_of(dtype)), *(Operand(sizes, dtype) for sizes in rest)

    def outputs(self, axes: Axes, dtype: str) -> tuple[Operand, ...]:
        """What one launch writes: intermediates first, the result or the results last."""
        return tuple(Operand(_sizes(names, axes), numbers_of(dtype)) for names in self.writes)

    def flops(self, axes: Axes) -> int:
        """Floating-point operations that the result needs, a multiply-add counted as two."""
        return 2 * sum(math.prod(_sizes(names, axes)) for names in self.products)

    def bytes(self, axes: Axes, dtype: str) -> int:
        """The fewest bytes to move: every operand once."""
        return sum(operand.bytes for operand in (*self.inputs(axes, dtype), *self.outputs(axes, dtype)))

    def unmet(self, axes: Axes) -> str | None:
        """The condition that these sizes break, in words; None where they are an operation."""
        return None

    def refusal(self, axes: Axes, dtype: str) -> str | None:
        """The documented rule by which PyTorch, or a scheme, refuses this shape, in words; None where none is known.

        It explains and predicts. What a device does with the shape is only known by running it.
        """
        if dtype in ITEM_BYTES:
            return None
        scheme = stored_as(dtype)
        refused = next((one for one in self.gemms(axes) if not scheme.supports(one)), None)
        if refused is None:
            return None
        sizes = ", ".join(f"{axis} = {size}" for axis, size in refused.shape if axis != "m")
        return f"scheme {scheme.name} needs {scheme.shape_requirement}: {sizes}"

    def gemms(self, axes: Axes) -> list[Operation]:
        """Its GEMMs by themselves, in the order of ``products``."""
        return [(batched_gemm if "b" in names.split() else linear)(*_sizes(names, axes)) for names in self.products]


def _sizes(names: str, axes: Axes) -> tuple[int, ...]:
    return tuple(axes[name] for name in names.split())


def indivisible(axes: Axes, names: tuple[str, ...], divisor: int) -> str | None:
    """Which of these axes the divisor does not divide, as ``k = 107, n = 33``; None where it divides them all."""
    return ", ".join(f"{name} = {axes[name]}" for name in names if axes[name] % divisor) or None
